"""A comparison of methods for a terminal: the table, and its result in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from slime_plugin.errors import printable
from slime_plugin.report.formatting import format_factor, format_number, join_words
from slime_plugin.report.run_data import denominator_of, number
from slime_plugin.report.tables import number_table

AT_FLOOR = 10.0
"""A method whose mean logdiff is within this factor of the floor is at the floor."""
_HIGH_FLOOR = 0.1
"""Nats per token that neither float32 nor bfloat16 explains."""
_LEGEND = (
    "logdiff: mean and maximum of its absolute value, in nats per trained token; trained: of the sampled tokens; "
    "tokens: computed with gradient + without; cost: measured time of training on a batch; both as multiples of {}"
)
_ROUNDING = 2.0**-24
"""Lower bound of the floor: below float32's own rounding it is chance."""


def heading(comparison: Mapping[str, Any], where: str) -> str:
    """What was compared."""
    iterations = comparison["iterations"]
    which = f"iteration{'s' * (len(iterations) != 1)} {join_words([str(i) for i in iterations])}"
    return f"{printable(where, 200)}: {comparison['records']:,} rollouts of {which}"


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """One row per method, from the content of ``comparison.json``."""
    caption = _LEGEND.format(denominator_of(comparison))
    headings = ("method", "exact", "logdiff\nmean", "\nmax", "trained", "tokens", "cost")
    table = number_table(headings, left=2, no_wrap=True, caption=caption, padding=(0, 2, 0, 0))
    table.columns[headings.index("tokens")].no_wrap = False
    for row in comparison_rows(comparison):
        cells = [row[key] for key in ("method", "exact", "mean", "max", "trained", "tokens", "cost")]
        table.add_row(*cells, style="bold" if row["exact"] == "yes" else None)
    return table


def comparison_rows(comparison: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The numbers of every method as text, for terminals and pages."""
    methods = comparison["methods"]
    base = number(methods, denominator_of(comparison), "tokens")
    for name, part in methods.items():
        share = number(part, "share_trained")
        yield {
            "method": name,
            "exact": "yes" if part.get("exact") else "no",
            "mean": format_number(number(part, "logdiff", "mean")),
            "max": format_number(number(part, "logdiff", "max")),
            "trained": "n/a" if share is None else f"{share:.1%}",
            "off context": format_number(number(part, "off_context")),
            "tokens": _tokens(part, base),
            "cost": format_factor(number(part, "cost")),
        }


def verdict(comparison: Mapping[str, Any]) -> str:
    """What the table shows, in a sentence."""
    floor = comparison["floor"]
    means = {name: part["logdiff"]["mean"] for name, part in comparison["methods"].items()}
    means = {name: mean for name, mean in means.items() if mean is not None}
    if floor is None or not means:
        return "no exact method was compared, so there is no floor to measure the others against"
    if floor["mean"] > _HIGH_FLOOR:
        return (
            f"even exact methods are off by {format_number(floor['mean'])} nats per token: these are not the weights "
            "that sampled these rollouts, or the sampling settings change log-probabilities"
        )
    base = max(floor["mean"], _ROUNDING)
    above = {name: round(math.log10(mean / base)) for name, mean in means.items() if mean > AT_FLOOR * base}
    at = join_words([name for name in means if name not in above])
    text = f"at the floor (rounding, {format_number(floor['mean'])} nats per token): {at}"
    if not above:
        return f"{text}; no method is above it"
    return f"{text}; above it by orders of magnitude: {join_words([f'{name} {n}' for name, n in above.items()])}"


def _tokens(part: Mapping[str, Any], base: float | None) -> str:
    """Tokens with gradient, without, and both together as a multiple of the denominator's."""
    parts = [tokens for key in ("tokens", "teacher_tokens") if (tokens := number(part, key))]
    factor = f" ({sum(parts) / base:.2f}x)" if base else ""
    return "+".join(f"{tokens:,}" for tokens in parts) + factor
