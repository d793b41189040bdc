"""Numbers as a person reads them."""

from __future__ import annotations


def shown(value: float | int | None) -> str:
    """Whole numbers whole, others with three significant digits; n/a for what is undefined, which is not the same as 0.

    >>> [shown(value) for value in (12345, 1234.5, 0.12345, 1e-7, None)]
    ['12,345', '1,234', '0.123', '1e-07', 'n/a']
    """
    if value is None:
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
