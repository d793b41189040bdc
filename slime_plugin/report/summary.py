"""What edits did to a set of rollouts, and what each method would train: sums and means over records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slime_plugin.errors import printable
from slime_plugin.methods import METHODS, Layout, Totals, lay_out
from slime_plugin.record import Entry, Record
from slime_plugin.report.formatting import format_number
from slime_plugin.report.tables import number_table
from slime_plugin.tree import Counts, Trajectory, count
from slime_plugin.tree.counts import statistics_of

_SUMMED = {"tokens": "tokens", "teacher_tokens": "no grad", "trained": "trained", "off_context": "off context"}


@dataclass
class _RecordTotals:
    """Running totals of one set of records."""

    counts: list[Counts] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    edits: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    methods: dict[str, Totals] = field(default_factory=lambda: {name: Totals() for name in METHODS})

    def to_json(self) -> dict[str, Any]:
        return {
            "records": len(self.counts),
            "statuses": dict(self.statuses),
            "reward": sum(self.rewards) / len(self.rewards) if self.rewards else None,
            **statistics_of(self.counts),
            "edits": dict(self.edits),
            "longest_view": max((c.longest_view for c in self.counts), default=None),
            "methods": {name: totals.to_json() for name, totals in self.methods.items()},
        }


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """Totals over all records and per harness. K, D, L, C, R, E and reward are means; tokens are sums."""
    total = _RecordTotals()
    harnesses: dict[str, _RecordTotals] = {}
    for record in records:
        by_harness = harnesses.setdefault(record.meta.harness or "unnamed", _RecordTotals())
        _add(record, (total, by_harness))
    return {"total": total.to_json(), "harnesses": {name: harnesses[name].to_json() for name in sorted(harnesses)}}


def _add(record: Record, sets: tuple[_RecordTotals, ...]) -> None:
    trajectory = Trajectory.of(record)
    counts, status = count(trajectory), record.meta.status
    cause = record.meta.not_trained
    layouts = {
        name: lay_out(trajectory, method) if cause is None else Layout.all_lost(name, record, cause)
        for name, method in METHODS.items()
    }
    for totals in sets:
        totals.counts.append(counts)
        totals.statuses[status] += 1
        totals.edits.update(edit.kind for edit in record.edits)
        if record.meta.reward is not None and not record.meta.excluded:
            totals.rewards.append(float(record.meta.reward))
        for name, layout in layouts.items():
            totals.methods[name].add(layout)


_ROWS = {
    "rollouts (number)": "records",
    "reward": "reward",
    "edits K": "K",
    "evicted per edit |E|": "E",
    "diverging leaves D": "D",
    "tape tokens L": "L",
    "final context C": "C",
    "sampled tokens R": "R",
    "longest context (maximum)": "longest_view",
    "compressed rollouts (share)": "frequency",
    "compression depth of those": "depth",
    "prefix tree / branches": "trie_ratio",
}


def summary_tables(summary: dict[str, Any]) -> list[RenderableType]:
    """The same numbers for a terminal."""
    total = summary["total"]
    if not total["records"]:
        return ["no records"]
    sets = {**summary["harnesses"], "all": total} if len(summary["harnesses"]) > 1 else summary["harnesses"]
    rollouts = _table("rollouts and their edits (means, unless stated otherwise)", ["", *sets])
    for heading, key in _ROWS.items():
        rollouts.add_row(heading, *(format_number(part[key]) for part in sets.values()))
    methods = total["methods"]
    trained = _table("what each method computes and trains (tokens in all)", ["method", *_SUMMED.values()])
    for name, part in methods.items():
        trained.add_row(name, *(f"{part[key]:,}" for key in _SUMMED))
    causes = sorted({cause for part in methods.values() for cause in part["lost"]})
    lost = _table("sampled tokens that are not trained, by cause", ["cause", *methods])
    for cause in causes:
        lost.add_row(printable(cause), *(f"{part['lost'].get(cause, 0):,}" for part in methods.values()))
    return [rollouts, trained, lost] if causes else [rollouts, trained]


def listing(entries: Iterable[Entry]) -> Table:
    """One line per record."""
    table = _table(None, ["record", "id", "harness", "group", "reward", "status", "K", "L", "C", "sampled"])
    table.columns[0].overflow = "fold"  # a path is of no use without its end
    table.columns[0].no_wrap = False
    for column in table.columns[1:6]:
        column.justify = "left"
    for entry in entries:
        if entry.record is None:
            table.add_row(Text(entry.where), Text("damaged: see memorywalker record check", style="red"))
            continue
        record, meta = entry.record, entry.record.meta
        values = (meta.id, meta.harness, meta.group, meta.reward, meta.status)
        texts = ["-" if value is None else printable(value, 40) for value in values]
        sizes = (len(record.edits), len(record), record.view_positions(-1).size, int(record.generated.sum()))
        table.add_row(Text(entry.where), *map(Text, texts), *(f"{size:,}" for size in sizes))
    return table


def _table(title: str | None, headings: list[str]) -> Table:
    shown = [printable(heading, 40) for heading in headings]
    return number_table(shown, no_wrap=True, title=title, title_style="bold", box=SIMPLE)
