"""A comparison of methods for a terminal: the table, and its result in a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from slime_plugin.errors import printable
from slime_plugin.report.formatting import format_factor, format_number, join_words

AT_FLOOR = 10.0
"""A method whose mean logdiff is within this factor of the floor is at the floor."""
_HIGH_FLOOR = 0.1
"""Nats per token that neither float32 nor bfloat16 explains."""
_LEGEND = (
    "logdiff: |trainer - rollout| in nats per trained token; trained: of the sampled tokens; tokens: computed with "
    "gradient + without; cost: measured time of an update; both as multiples of naive_compressed"
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
    methods = comparison["methods"]
    compressed = methods[comparison["denominator"]]["tokens"]
    table = Table(caption=_LEGEND, caption_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(("method", "exact", "logdiff\nmean", "\nmax", "trained", "tokens", "cost")):
        table.add_column(name, justify="right" if i > 1 else "left", no_wrap=name != "tokens", min_width=4)
    for name, part in methods.items():
        table.add_row(
            name,
            "yes" if part["exact"] else "no",
            format_number(part["logdiff"]["mean"]),
            format_number(part["logdiff"]["max"]),
            "n/a" if part["share_trained"] is None else f"{part['share_trained']:.1%}",
            _tokens(part, compressed),
            format_factor(part["cost"]),
            style="bold" if part["exact"] else None,
        )
    return table


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
        return f"{text}; no edit made a difference"
    return f"{text}; above it by orders of magnitude: {join_words([f'{name} {n}' for name, n in above.items()])}"


def _tokens(part: Mapping[str, Any], compressed: int) -> str:
    """Tokens with gradient, without, and both together as a multiple of naive_compressed."""
    parts = [number for number in (part["tokens"], part["teacher_tokens"]) if number]
    factor = f" ({sum(parts) / compressed:.2f}x)" if compressed else ""
    return "+".join(f"{number:,}" for number in parts) + factor
