"""What edits did to a set of rollouts, and what each method would train: sums and means over records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from slime_plugin.config.method import LogitTree, Mask4d, Method, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.methods import lay_out
from slime_plugin.methods.credit import LEFT_OUT
from slime_plugin.record import Record
from slime_plugin.tree import Counts, Trajectory, count
from slime_plugin.tree.counts import compression_of

COMPARED: dict[str, Method] = {
    "naive_compressed": NaiveCompressed(),
    "naive_full": NaiveFull(),
    "logittree": LogitTree(),
    "mask4d": Mask4d(),
    "sdcc": Sdcc(),
}


@dataclass
class _Tally:
    """Running totals of one set of records."""

    counts: list[Counts] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    edits: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    sums: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in COMPARED})
    lost: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in COMPARED})

    def to_json(self) -> dict[str, Any]:
        compression = compression_of(self.counts)
        evictions = [size for counts in self.counts for size in counts.E]
        branch, trie = (sum(getattr(c, key) for c in self.counts) for key in ("branch_tokens", "trie_tokens"))
        return {
            "records": len(self.counts),
            "statuses": dict(self.statuses),
            "reward": _mean(self.rewards),
            **{key: _mean([getattr(c, key) for c in self.counts]) for key in ("K", "D", "L", "C", "R")},
            "E": _mean(evictions),
            "edits": dict(self.edits),
            "longest_view": max((c.longest_view for c in self.counts), default=0),
            "branch_tokens": branch,
            "trie_tokens": trie,
            "trie_ratio": trie / branch if branch else None,
            "frequency": compression.frequency,
            "depth": compression.depth,
            "sampled": sum(c.R for c in self.counts),
            "methods": {
                name: {key: self.sums[name][key] for key in ("tokens", "teacher_tokens", "trained")}
                | {"lost": dict(self.lost[name])}
                for name in COMPARED
            },
        }


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """Totals over all records and per harness. K, D, L, C, R, E and reward are means; tokens are sums."""
    total = _Tally()
    harnesses: dict[str, _Tally] = {}
    for record in records:
        by_harness = harnesses.setdefault(record.meta.harness or "unnamed", _Tally())
        _add(record, (total, by_harness))
    return {"total": total.to_json(), "harnesses": {name: harnesses[name].to_json() for name in sorted(harnesses)}}


def _add(record: Record, tallies: tuple[_Tally, ...]) -> None:
    trajectory = Trajectory.of(record)
    counts = count(trajectory)
    layouts = {name: lay_out(trajectory, method) for name, method in COMPARED.items()}
    for tally in tallies:
        tally.counts.append(counts)
        tally.statuses[record.meta.status] += 1
        tally.edits.update(edit.kind for edit in record.edits)
        if record.meta.reward is not None:
            tally.rewards.append(float(record.meta.reward))
        for name, layout in layouts.items():
            if record.meta.status in LEFT_OUT:
                if counts.R:
                    tally.lost[name][record.meta.status] += counts.R
                continue
            sums = {"tokens": layout.tokens, "teacher_tokens": layout.teacher_tokens, "trained": layout.trained}
            tally.sums[name].update(sums)
            tally.lost[name].update(layout.lost)


_ROWS = {
    "records": "records",
    "reward": "reward",
    "edits K": "K",
    "evicted per edit |E|": "E",
    "diverging leaves D": "D",
    "tape tokens L": "L",
    "final context C": "C",
    "sampled tokens R": "R",
    "longest context": "longest_view",
    "compression frequency": "frequency",
    "compression depth": "depth",
    "prefix tree / branches": "trie_ratio",
}


def summary_tables(summary: dict[str, Any]) -> list[Table]:
    """The same numbers for a terminal."""
    sets = {**summary["harnesses"], "all": summary["total"]} if len(summary["harnesses"]) > 1 else summary["harnesses"]
    rollouts = Table(title="rollouts and their edits (means per rollout)", title_justify="left", box=SIMPLE)
    for heading in ("", *sets):
        rollouts.add_column(heading, justify="right" if heading else "left")
    for heading, key in _ROWS.items():
        rollouts.add_row(heading, *(_shown(part[key]) for part in sets.values()))
    trained = Table(title="what each method computes and trains (tokens in all)", title_justify="left", box=SIMPLE)
    for heading in ("method", "computed", "no grad", "trained", "share", "not trained"):
        trained.add_column(heading, justify="left" if heading in ("method", "not trained") else "right")
    total = summary["total"]
    for name, part in total["methods"].items():
        share = f"{part['trained'] / total['sampled']:.1%}" if total["sampled"] else "n/a"
        lost = ", ".join(f"{number} {cause}" for cause, number in part["lost"].items()) or "-"
        numbers = (f"{part[key]:,}" for key in ("tokens", "teacher_tokens", "trained"))
        trained.add_row(name, *numbers, share, lost)
    return [rollouts, trained]


def _mean(values: list[Any]) -> float | None:
    return float(np.mean(values)) if values else None


def _shown(value: float | None) -> str:
    """Three significant digits; n/a for what is undefined, which is not the same as 0."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
