"""The two pitfalls of naive training, measured: the paper's Q1 table and its distributions.

``delta_comp`` is what Naive-Compressed changes about a token's log-probability: log p(token | final context) minus log
p(token | the context it was sampled in), over the diverging leaves. ``delta_full`` is the same for Naive-Full, over the
tokens that see evicted tokens there. A context too short makes tokens less likely (predicted: below
0), one with evicted tokens makes them more likely (predicted: above 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_plugin.errors import printable
from slime_plugin.report.formatting import format_number
from slime_plugin.report.tables import number_table
from slime_plugin.report.templating import render
from slime_plugin.tree import Trajectory, diverging_leaves, off_context

Floats = NDArray[np.float64]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PANELS = (
    ("comp", "Naive-Compressed: context too short", "#b5482f"),
    ("full", "Naive-Full: context too long", "#2f6fb5"),
)


@dataclass(frozen=True, slots=True)
class Pitfalls:
    """Differences of log-probabilities, token by token."""

    comp: Floats
    full: Floats

    @classmethod
    def of(cls, trajectory: Trajectory, live: Floats, compressed: Floats, full: Floats) -> Pitfalls:
        """From the log-probabilities [L] of every sampled token under each conditioning."""
        leaves = diverging_leaves(trajectory)
        stale = off_context(trajectory, np.arange(len(trajectory.record), dtype=np.int32))
        return cls(compressed[leaves] - live[leaves], full[stale] - live[stale])

    @classmethod
    def joined(cls, parts: list[Pitfalls]) -> Pitfalls:
        return cls(np.concatenate([part.comp for part in parts]), np.concatenate([part.full for part in parts]))

    def to_json(self) -> dict[str, dict[str, float | int | None]]:
        return {"comp": _numbers(self.comp, below=True), "full": _numbers(self.full, below=False)}


def pitfalls_table(harnesses: Mapping[str, Pitfalls]) -> Table:
    """The Q1 table: number, mean and share with the predicted sign, of both differences, per harness."""
    headings = ("harness", "n", "mean delta_comp", "below 0", "n", "mean delta_full", "above 0")
    table = number_table(headings, padding=(0, 2, 0, 0))
    for name, pitfalls in harnesses.items():
        numbers = pitfalls.to_json()
        comp, full = numbers["comp"], numbers["full"]
        table.add_row(
            Text(printable(name, 40)),
            *(format_number(comp[key]) for key in ("n", "mean", "below 0")),
            *(format_number(full[key]) for key in ("n", "mean", "above 0")),
        )
    table.add_row("predicted", "", "< 0", "-> 1", "", "> 0", "-> 1")
    return table


def pitfalls_plot(harnesses: Mapping[str, Pitfalls], console: Console) -> Table:
    """The distributions as rows of blocks on a common axis, 0 in the middle, as wide as the console allows."""
    names = [printable(name, 20) for name in harnesses]
    room = console.width - max(map(len, names)) - len("delta_comp") - 4
    width = max(11, min(61, room) - (min(61, room) + 1) % 2)  # odd, so that there is a middle
    reach = _reach(harnesses)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    for name, pitfalls in zip(names, harnesses.values(), strict=True):
        for label, values in (("delta_comp", pitfalls.comp), ("delta_full", pitfalls.full)):
            table.add_row(Text(name), label, _bars(values, reach, width, console.options.ascii_only))
    scale = f"{-reach:.3g}".ljust(width // 2) + "0" + f"{reach:.3g} nats".rjust(width // 2)
    table.add_row("", "", Text(scale, style="dim"))
    return table


def pitfalls_svg(harnesses: Mapping[str, Pitfalls], title: str) -> str:
    """The same as a drawing: one panel per pitfall, one histogram per harness, 0 marked."""
    reach = _reach(harnesses)
    panels = []
    for which, heading, colour in _PANELS:
        histograms = []
        for pitfalls in harnesses.values():
            values = getattr(pitfalls, which)
            counts = _histogram(values, reach, 41)
            caption = f"mean {values.mean():+.3g}, n {values.size}" if values.size else "no such token"
            histograms.append((caption, (counts / max(1, counts.max())).tolist()))
        panels.append((heading, colour, histograms))
    names = [printable(name, 40) for name in harnesses]
    return render("pitfalls.svg", title=title, names=names, panels=panels, reach=f"{reach:.3g}")


def _bars(values: Floats, reach: float, width: int, ascii_only: bool) -> Text:
    counts = _histogram(values, reach, width)
    tallest = max(1, int(counts.max()))
    levels = " .:-=+*#@" if ascii_only else _BLOCKS
    blocks = [levels[int(np.ceil(n / tallest * 8))] for n in counts.tolist()]
    middle = width // 2
    if blocks[middle] == " ":
        blocks[middle] = "|" if ascii_only else "│"
    text = Text("".join(blocks))
    text.stylize("red", 0, middle)
    text.stylize("blue", middle + 1)
    return text


def _histogram(values: Floats, reach: float, bins: int) -> NDArray[np.intp]:
    """Counts in an odd number of bins, the middle one around 0; values beyond ``reach`` are in the outermost."""
    counts, _ = np.histogram(np.clip(values, -reach, reach), bins=bins, range=(-reach, reach))
    return counts


def _reach(harnesses: Mapping[str, Pitfalls]) -> float:
    """Where the axis ends: the 99th percentile of all distances from 0."""
    every = np.abs(np.concatenate([np.zeros(1), *(np.concatenate((p.comp, p.full)) for p in harnesses.values())]))
    return float(np.quantile(every, 0.99)) or 1.0


def _numbers(values: Floats, *, below: bool) -> dict[str, float | int | None]:
    right = values < 0 if below else values > 0
    mean, share = (float(values.mean()), float(right.mean())) if values.size else (None, None)
    return {"n": int(values.size), "mean": mean, "below 0" if below else "above 0": share}
