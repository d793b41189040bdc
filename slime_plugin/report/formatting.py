"""Numbers, shares, durations and lists as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_number(value: float | None) -> str:
    """Whole numbers whole, others with three significant digits; n/a for what is undefined, which is not the same as 0.

    >>> [format_number(value) for value in (12345, 1234.5, 0.12345, 1e-7, None)]
    ['12,345', '1,234', '0.123', '1e-07', 'n/a']
    """
    if value is None:
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_brief(value: float | None) -> str:
    """Two significant digits, for sentences and tiles.

    >>> format_brief(4.1234e-07), format_brief(None)
    ('4.1e-7', 'n/a')
    """
    rounded = float(f"{value:.2g}") if value is not None and 0 < abs(value) < 1 else value
    return format_number(rounded).replace("e-0", "e-")


def format_share(value: float | None) -> str:
    """A percentage; nearly all or nearly nothing is not rounded to all or nothing.

    >>> format_share(0.123), format_share(0.9999), format_share(1.0)
    ('12 %', '99.99 %', '100 %')
    """
    if value is None:
        return "n/a"
    percent = 100 * value
    rough = f"{percent:.0f}"
    return f"{percent:.2f} %" if rough in ("0", "100") and float(rough) != percent else f"{rough} %"


def format_factor(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}x"


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(50), format_duration(1830), format_duration(9000)
    ('50 s', '30 min', '2.5 h')
    """
    minutes = seconds / 60
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def format_lost(lost: Mapping[str, int]) -> str:
    """Sampled tokens that are not trained, by cause."""
    return ", ".join(f"{tokens} {cause}" for cause, tokens in lost.items()) or "none"


def format_place(name: str, near: str = "near", far: str = "far") -> str:
    """A place: the last edit before a token was sampled, and how far before.

    >>> format_place("start"), format_place("fold/near"), format_place("fold/far", "first 16", "later")
    ('before any edit', 'after fold, near', 'after fold, later')
    """
    kind, _, distance = name.partition("/")
    return "before any edit" if not distance else f"after {kind}, {near if distance == 'near' else far}"


def join_words(words: Sequence[str]) -> str:
    """
    >>> join_words(["a", "b", "c"]), join_words([])
    ('a, b and c', '')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
