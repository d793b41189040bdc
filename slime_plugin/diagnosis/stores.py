"""Statistics of the rollouts in a store: how they ended, their rewards, edits, tool calls and weight versions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from slime_plugin.errors import StoreError
from slime_plugin.record import Meta, Record, scan_store
from slime_plugin.record.store import Damage
from slime_plugin.rollout.questions import rollout_name

MOST_RECORDS = 1024
"""Of one store."""
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Rollout:
    """What is kept of a record, which may be large."""

    meta: Meta
    edits: tuple[str, ...]
    longest_view: int
    sampled: int
    certain: int

    @classmethod
    def of(cls, record: Record) -> _Rollout:
        logprobs = record.logprobs[record.generated]
        longest = max(sum(stop - start for start, stop in view) for view in record.views)
        kinds = tuple(edit.kind for edit in record.edits)
        return cls(record.meta, kinds, longest, int(logprobs.size), int(np.count_nonzero(logprobs == 0)))


@dataclass
class StoreStatistics:
    """The records of one store, as far as they were read."""

    name: str
    iteration: int | None
    """None for rollouts that were set aside, and are sampled again."""
    rollouts: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    stops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By status, and what ended the rollout."""
    errors: Counter[str] = field(default_factory=Counter)
    """Of aborted and failed rollouts, without the numbers in them."""
    example: dict[str, str] = field(default_factory=dict)
    """The first error of each of them, as it is."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """By group, of rollouts that count."""
    edits: Counter[str] = field(default_factory=Counter)
    longest_view: int = 0
    sampled: int = 0
    certain: int = 0
    """Sampled tokens with a log-probability of exactly 0."""
    calls: int = 0
    call_errors: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    straddling: int = 0
    """Rollouts during which the weights changed."""
    harnesses: Counter[str] = field(default_factory=Counter)
    damage: list[str] = field(default_factory=list)
    torn: bool = False
    """The store ends inside a record: its writer was killed."""

    @property
    def excluded(self) -> int:
        return self.statuses["aborted"] + self.statuses["failed"]

    def add(self, rollout: _Rollout) -> None:
        meta, report = rollout.meta, rollout.meta.report
        self.rollouts += 1
        self.statuses[meta.status] += 1
        self.stops[meta.status, report.stop or "unknown"] += 1
        if meta.excluded:
            error = report.error or report.stop or "unknown"
            key = _DIGITS.sub("N", error)[:300]
            self.errors[key] += 1
            self.example.setdefault(key, error)
        elif meta.reward is not None:
            self.rewards.setdefault(str(meta.group), []).append(float(meta.reward))
        self.edits.update(rollout.edits)
        self.longest_view = max(self.longest_view, rollout.longest_view)
        self.sampled += rollout.sampled
        self.certain += rollout.certain
        self.calls += report.calls or 0
        self.call_errors.update(report.error_kinds)
        if meta.weight_version is not None:
            self.versions[str(meta.weight_version)] += 1
        self.straddling += report.straddles
        self.harnesses[meta.harness or "unnamed"] += 1

    def to_json(self) -> dict[str, Any]:
        """Without errors, which may quote a rollout."""
        groups = list(self.rewards.values())
        rewards = [reward for group in groups for reward in group]
        return {
            "store": self.name,
            "iteration": self.iteration,
            "rollouts": self.rollouts,
            "statuses": dict(self.statuses),
            "stops": {f"{status}: {stop}": number for (status, stop), number in self.stops.items()},
            "reward": float(np.mean(rewards)) if rewards else None,
            "groups": len(groups),
            "groups_with_equal_rewards": sum(len(set(group)) == 1 for group in groups),
            "edits": dict(self.edits),
            "longest_context": self.longest_view,
            "sampled": self.sampled,
            "calls": self.calls,
            "call_errors": dict(self.call_errors),
            "weight_versions": dict(self.versions),
            "damage": self.damage,
        }


def read_store(path: Path, iteration: int | None) -> StoreStatistics:
    """Read the statistics of a store, whatever is wrong with it. Of several attempts at a rollout the last counts."""
    statistics = StoreStatistics(path.name, iteration)
    rollouts: dict[str, _Rollout] = {}
    try:
        for number, found in enumerate(islice(scan_store(path), MOST_RECORDS)):
            if isinstance(found, Record):
                name = str(number) if found.meta.id is None else rollout_name(found.meta.id)
                rollouts[name] = _Rollout.of(found)
            elif isinstance(found, Damage):
                statistics.torn |= found.torn
                statistics.damage.append(found.message)
            else:
                statistics.damage.append(found.lines()[0])
    except StoreError as error:
        statistics.damage.append(str(error))
    except OSError as error:
        statistics.damage.append(f"cannot be read: {error.strerror}")
    for rollout in rollouts.values():
        statistics.add(rollout)
    return statistics
