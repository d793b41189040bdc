"""A batch of rollouts, laid out once: slime's train data and the metrics of the batch come from the same object.

Every rollout of a step counts in its mean, even one that contributes nothing. An excluded rollout (aborted or failed)
is neither in the baseline of its group nor trained; a removed one (by a filter) is in the baseline and not trained.
slime divides by both, and so do the local trainer and the tests.

Train data is a dictionary of lists with one entry per row. ``multimodal_train_inputs`` holds what a row has per token
beside slime's own fields; slime concatenates it along a micro-batch and passes it to the model and the loss:

``place``             last edit before the token was sampled (:mod:`slime_plugin.tree.places`)
``weight``            token weight; on all rows of a batch in which some trained token has another weight than 1
``parent``, ``length``  index in its row of the token it follows, and tokens of the row; for methods with trees
``rollout``, ``leaf``   number of the rollout, and of its diverging leaf or -1; for methods with a teacher
``visible``, ``position``  explicit attention mask and position ids; for a method that is only scored
``method/NAME``       a column of the method's own, for its ``token_factors``

``prompt`` holds the teacher row of the row. ``rewards`` is the advantage of the rollout, the same on all its rows, and
``rollout_mask_sums`` the number of its trained tokens on all of them. A rollout without rows becomes one row of two
tokens without loss: slime splits a batch into steps by counting rollouts. Legend: N tokens of a row.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_plugin.config import method as config
from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError, LayoutError, MemoryWalkerError
from slime_plugin.methods import Layout, Method, Row, Totals, lay_out, method_of
from slime_plugin.methods.base import OWN_COLUMN
from slime_plugin.methods.credit import group_advantages
from slime_plugin.methods.row import idle_row
from slime_plugin.record import Meta, Record, RolloutReport
from slime_plugin.record.arrays import IntArray
from slime_plugin.run.metrics import user_metrics
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.samples import Sample, record_of
from slime_plugin.slime.tool_failures import ToolCalls
from slime_plugin.tree import Trajectory, count
from slime_plugin.tree.counts import statistics_of
from slime_plugin.tree.places import places_of

TrainData = dict[str, list[Any]]
"""As slime has it: one entry per row under every key."""


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One rollout of a batch."""

    number: int
    """slime's rollout id."""
    record: Record
    """With the current reward and group of its sample."""
    trajectory: Trajectory
    layout: Layout
    places: IntArray
    """[L] place of each tape token."""
    advantage: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """At least one: an idle row where the layout has none."""
        return self.layout.rows or (idle_row(self.record),)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of an iteration under one method."""

    method: Method[Any]
    rollouts: tuple[LaidOut, ...]
    user_metrics: tuple[str, ...] = ()
    """Import paths of functions that add metrics (``tracking.metrics``)."""

    @classmethod
    def of(cls, samples: Sequence[Sample], cell: Cell) -> Batch:
        """Lay out slime's samples. Groups have to be complete."""
        records = [current_record(sample) for sample in samples]
        advantages = group_advantages([record.meta for record in records], std=cell.std)
        method, rollouts = method_of(cell.method), []
        for sample, record, advantage in zip(samples, records, np.nan_to_num(advantages).tolist(), strict=True):
            trajectory, cause = Trajectory.of(record), record.meta.not_trained
            if cause is None:
                layout = lay_out(trajectory, cell.method)
            else:  # it may be more than the method can lay out
                layout, advantage = Layout.all_lost(method.name, record, cause), 0.0
            rollouts.append(LaidOut(sample.index or 0, record, trajectory, layout, places_of(trajectory), advantage))
        return cls(method, tuple(rollouts), cell.tracking.metrics)

    @classmethod
    def for_scoring(cls, records: Sequence[Record], method: config.MethodSettings) -> Batch:
        """Lay out records of any status, with or without a reward, with advantage 0."""
        trajectories = [Trajectory.of(record) for record in records]
        rollouts = (LaidOut(i, t.record, t, lay_out(t, method), places_of(t), 0.0) for i, t in enumerate(trajectories))
        return cls(method_of(method), tuple(rollouts))

    def train_data(self) -> TrainData:
        weighted = any((row.weight != 1).any() for rollout in self.rollouts for row in rollout.layout.rows)
        data: TrainData = {}
        for rollout in self.rollouts:
            for row in rollout.rows:
                for key, value in self._entry(rollout, row, weighted=weighted).items():
                    data.setdefault(key, []).append(value)
        return data

    def _entry(self, rollout: LaidOut, row: Row, *, weighted: bool) -> dict[str, Any]:
        layout, meta = rollout.layout, rollout.record.meta
        first = max(1, int(row.loss_mask.argmax()))  # nothing precedes the first token, so it is never trained
        per_token: dict[str, Any] = {"place": rollout.places[row.tape]}
        if weighted:
            per_token["weight"] = np.array(row.weight)
        if self.method.trees:
            per_token |= {"parent": np.array(row.parent), "length": np.array([len(row)], dtype=np.int32)}
        if row.visible is not None:
            per_token |= {"visible": row.visible.mask(), "position": np.array(row.position)}
        for name, column in self.method.columns(rollout.trajectory, row).items():
            if len(column) != len(row):
                raise LayoutError(
                    f"{rollout.record.label}: column {name!r:.40} of {self.method.name} has {len(column)} numbers for "
                    f"a row of {len(row)} tokens; return one per token"
                )
            per_token[f"{OWN_COLUMN}{name}"] = np.array(column)
        entry = {
            "tokens": row.tokens,
            "response_lengths": len(row) - first,
            "loss_masks": row.loss_mask[first:].astype(np.int32),
            "rollout_log_probs": np.nan_to_num(row.rollout_logprobs[first:]),  # NaN where there is no loss
            "multimodal_train_inputs": per_token,
            "rewards": rollout.advantage,
            "raw_reward": _reward(meta),
            "truncated": int(meta.status == "truncated"),
            "sample_indices": rollout.number,
            "rollout_ids": rollout.number,
            "rollout_mask_sums": layout.trained,
        }
        if self.method.distillation is not None:
            per_token |= {"rollout": np.full(len(row), rollout.number, dtype=np.int32), "leaf": _leaves(layout, row)}
            entry["prompt"] = _teacher(layout)
        return entry

    def metrics(self) -> dict[str, Any]:
        """Return edits, sizes and outcomes of the batch (docs/training.md). What is undefined is None, never 0."""
        records = [rollout.record for rollout in self.rollouts]
        totals = Totals()
        for rollout in self.rollouts:
            totals.add(rollout.layout)
        reports = [record.meta.report for record in records]
        counts = [count(rollout.trajectory) for rollout in self.rollouts]
        metas = [record.meta for record in records if not record.meta.excluded]
        rewards = [float(meta.reward) for meta in metas if meta.reward is not None]
        return {
            "rollouts": len(records),
            "statuses": dict(Counter(record.meta.status for record in records)),
            "reward": float(np.mean(rewards)) if rewards else None,
            "reward_std": float(np.std(rewards)) if rewards else None,
            **statistics_of(counts),
            "edits": dict(Counter(edit.kind for record in records for edit in record.edits)),
            "compressed_tokens": sum(c.C for c in counts),
            **totals.to_json(),
            "discarded": sum(report.discarded or 0 for report in reports),
            "turns": sum(len(report.turns) for report in reports),
            **ToolCalls.of(records).to_json(),
            **self._user_metrics(records),
        }

    def _user_metrics(self, records: Sequence[Record]) -> dict[str, Any]:
        """Return the user's metrics under ``user``, where they collide with none of ours."""
        found = user_metrics(self.user_metrics, records)
        return {"user": found} if found else {}


def batch_of(args: Namespace, samples: Sequence[Sample]) -> Batch:
    """Return the batch of these samples, laid out once: slime logs and then converts the same list."""
    global _last  # noqa: PLW0603  # slime calls functions, one batch after the other
    cell = cell_of(args)
    inputs = [
        _Input(record_of(sample), sample.index, sample.group_index, sample.reward, sample.remove_sample)
        for sample in samples
    ]
    if _last is None or (_last[0], _last[1]) != (cell, inputs):
        _last = cell, inputs, Batch.of(samples, cell)
    return _last[2]


@dataclass(frozen=True, slots=True)
class _Input:
    """What of a sample determines its part of a batch."""

    record: Record
    index: int | None
    group: int | None
    reward: Any
    removed: bool


_last: tuple[Cell, list[_Input], Batch] | None = None


def convert(args: Namespace, samples: Sequence[Sample]) -> TrainData:
    """Return slime's train data for the samples of a batch. Raise if none of them can be trained."""
    batch = batch_of(args, samples)
    problem = next(batch.method.problems(None), None)
    if problem is not None:
        raise ConfigError(problem)
    if all(rollout.record.meta.excluded for rollout in batch.rollouts):
        meta = batch.rollouts[0].record.meta
        raise MemoryWalkerError(
            f"all {len(batch.rollouts)} rollouts were aborted or failed; the first is {meta.status}: "
            f"{meta.report.error or meta.report.stop}"
        )
    return batch.train_data()


def rewards_and_advantages(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return both of every sample; 0 and 0 for an excluded one."""
    metas = [current_record(sample).meta for sample in samples]
    advantages = np.nan_to_num(group_advantages(metas, std=cell_of(args).std))
    return [_reward(meta) for meta in metas], advantages.tolist()


def _reward(meta: Meta) -> float:
    """slime needs a number for every rollout."""
    return 0.0 if meta.excluded else float(meta.reward or 0.0)


def current_record(sample: Sample) -> Record:
    """Return the record of a sample with the group and the reward that the sample has now, and whether it was removed.

    A group is the rollouts that slime started together: a question may come up twice in a batch.
    """
    record, reward = record_of(sample), sample.reward
    meta = record.meta if sample.group_index is None else replace(record.meta, group=sample.group_index)
    if sample.remove_sample and not meta.report.removed:
        meta = meta.with_report(RolloutReport(removed=True))
    if not meta.excluded and reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ConfigError(
                f"{record.label}: its sample has the reward {reward!r:.60}, not a number; choose one with --reward-key"
            )
        meta = replace(meta, reward=float(reward))
    return record if meta == record.meta else record.with_meta(meta)


def idle_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first two tokens of an entry of train data, without loss: padding for micro-batches."""
    inputs = {key: value[:2] for key, value in entry["multimodal_train_inputs"].items()}
    if "parent" in inputs:
        inputs |= {"parent": np.array([-1, 0], dtype=np.int32), "length": np.array([2], dtype=np.int32)}
    if "leaf" in inputs:
        inputs["leaf"] = np.full(2, -1, dtype=np.int32)
    return {
        **entry,
        "tokens": entry["tokens"][:2],
        "response_lengths": 1,
        "loss_masks": np.zeros(1, dtype=np.int32),
        "rollout_log_probs": np.zeros(1, dtype=np.float32),
        "multimodal_train_inputs": inputs,
        **({"prompt": None} if "prompt" in entry else {}),
    }


def _leaves(layout: Layout, row: Row) -> IntArray:
    """[N] number of the leaf among those of its rollout, or -1."""
    leaf = np.full(len(row), -1, dtype=np.int32)
    for teacher in layout.teachers:  # at most one
        leaf[teacher.student] = np.arange(len(teacher.student))
    return leaf


def _teacher(layout: Layout) -> dict[str, IntArray] | None:
    for teacher in layout.teachers:
        return {"tokens": teacher.row.tokens, "parent": teacher.row.parent, "leaves": teacher.teacher}
    return None
