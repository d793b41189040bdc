"""Records of a batch become slime's train data: a dictionary of lists with one entry per row.

Whatever a row has per token beside slime's own fields rides in ``multimodal_train_inputs``, which slime concatenates
along a micro-batch and hands to the model and to the loss:

``parent``   index of the token it follows, within its row, and ``length``, how many those are; only for trees
``place``    what happened last before the token was sampled (:mod:`slime_plugin.tree.places`)
``weight``   factor of the token in the loss, on all rows of the batch, if one of its trained tokens has another than 1
``rollout``, ``leaf``   number of its rollout, and which diverging leaf of it the token is, or -1; only for SDCC

SDCC's teacher rows ride in ``prompt``, on the row they teach. Loss weights count rollouts: ``rewards`` is the advantage
of the rollout, the same on all its rows, and ``rollout_mask_sums`` the number of its trained tokens on all of them.

A rollout that is left out (aborted, failed), or has nothing to train under the method, is a row of two tokens without
loss: slime splits a batch into steps by counting rollouts, so each has to be there. Legend: N tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Mask4d, Sdcc
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.methods import Layout, Row, lay_out
from slime_plugin.methods.credit import LEFT_OUT, group_advantages
from slime_plugin.record import Record
from slime_plugin.record.arrays import IntArray
from slime_plugin.seam.rollout import Sample, record_of
from slime_plugin.tree import Trajectory
from slime_plugin.tree.places import places_of


@dataclass(frozen=True, slots=True)
class Rollout:
    """One record of a batch, laid out."""

    number: int
    """slime's rollout id."""
    record: Record
    layout: Layout
    places: IntArray
    """[L]"""
    advantage: float


def convert(samples: Sequence[Sample], cell: Cell) -> dict[str, list[Any]]:
    """slime's train data for the samples of a batch, of which groups are complete."""
    if isinstance(cell.method, Mask4d) and cell.method.packing == "union":
        raise ConfigError("method.packing: union is not exact and kept for scoring only; train with packing trie")
    records = [as_sampled(sample) for sample in samples]
    check_enough(records)
    removed = [sample.remove_sample for sample in samples]
    rollouts = list(lay_out_batch(records, [sample.index or 0 for sample in samples], cell, removed))
    weighted = any((row.weight != 1).any() for rollout in rollouts for row in rollout.layout.rows)
    data: dict[str, list[Any]] = {}
    for rollout in rollouts:
        for row in _rows(rollout, cell, weighted=weighted):
            for key, value in row.items():
                data.setdefault(key, []).append(value)
    return data


def check_enough(records: Sequence[Record]) -> None:
    """A batch of which nothing can be trained is an error, and says why: training on nothing would go unnoticed."""
    if all(record.meta.status in LEFT_OUT for record in records):
        meta = records[0].meta
        raise MemoryWalkerError(
            f"none of {len(records)} rollouts came to an end; the first is {meta.status}: "
            f"{meta.extra.get('error', meta.extra.get('stop'))}"
        )


def rewards_and_advantages(samples: Sequence[Sample], cell: Cell) -> tuple[list[float], list[float]]:
    """Of every sample; one that is left out has 0 and 0."""
    metas = [as_sampled(sample).meta for sample in samples]
    advantages = np.nan_to_num(group_advantages(metas, std=cell.std))
    return [float(meta.reward or 0.0) for meta in metas], advantages.tolist()


def lay_out_batch(
    records: Sequence[Record], numbers: Sequence[int], cell: Cell, removed: Sequence[bool] | None = None
) -> Iterator[Rollout]:
    """Every rollout under the method of the cell; one that is left out has an empty layout, its tokens counted.

    ``removed`` are those that a filter of the user's took out of the loss; they stay in the baseline, as in slime.
    """
    advantages = group_advantages([record.meta for record in records], std=cell.std)
    out = removed or [False] * len(records)
    for record, number, advantage, is_out in zip(records, numbers, advantages.tolist(), out, strict=True):
        trajectory = Trajectory.of(record)
        layout = lay_out(trajectory, cell.method)
        cause = record.meta.status if record.meta.status in LEFT_OUT else "removed" if is_out else None
        if cause is not None:
            layout = Layout(layout.method, (), layout.packing, lost={cause: record.sampled} if record.sampled else {})
            advantage = 0.0
        yield Rollout(number, record, layout, places_of(trajectory), advantage)


def _rows(rollout: Rollout, cell: Cell, *, weighted: bool) -> Iterator[dict[str, Any]]:
    layout, meta = rollout.layout, rollout.record.meta
    same: dict[str, Any] = {
        "rewards": rollout.advantage,
        "raw_reward": float(meta.reward or 0.0),
        "truncated": int(meta.status == "truncated"),
        "sample_indices": rollout.number,
        "rollout_ids": rollout.number,
        "rollout_mask_sums": layout.trained,
    }
    rows = layout.rows or (_idle_row(rollout.record),)
    for row in rows:
        first = max(1, int(row.loss_mask.argmax()))  # nothing precedes the first token, so it is never trained
        per_token: dict[str, Any] = {"place": rollout.places[row.tape]}
        if weighted:
            per_token["weight"] = np.array(row.weight)
        if isinstance(cell.method, Mask4d):
            per_token |= {"parent": np.array(row.parent), "length": np.array([len(row)], dtype=np.int32)}
        if isinstance(cell.method, Sdcc):
            per_token |= {"rollout": np.full(len(row), rollout.number, dtype=np.int32), "leaf": _leaves(layout, row)}
            same["prompt"] = _teacher(layout)
        yield {
            "tokens": row.tokens,
            "response_lengths": len(row) - first,
            "loss_masks": row.loss_mask[first:].astype(np.int32),
            "rollout_log_probs": np.nan_to_num(row.rollout_logprobs[first:]),  # NaN stands where there is no loss
            "multimodal_train_inputs": per_token,
            **same,
        }


def _leaves(layout: Layout, row: Row) -> IntArray:
    """[N] the number of the leaf among those of its rollout, or -1."""
    leaf = np.full(len(row), -1, dtype=np.int32)
    for teacher in layout.teachers:  # one at most
        leaf[teacher.student] = np.arange(len(teacher.student))
    return leaf


def _teacher(layout: Layout) -> dict[str, IntArray] | None:
    """The teacher row of a rollout: its tokens, their parents, and in front of which of them it is asked."""
    for teacher in layout.teachers:
        return {"tokens": teacher.row.tokens, "parent": teacher.row.parent, "leaves": teacher.teacher}
    return None


def _idle_row(record: Record) -> Row:
    """Two tokens without loss."""
    two = np.arange(2, dtype=np.int32)
    token = record.tokens[:1].repeat(2)
    return Row(token, np.zeros_like(two), two - 1, two, two < 0, np.full(2, np.nan, dtype=np.float32))


def as_sampled(sample: Sample) -> Record:
    """The record of a sample, with the group and the reward that the sample has now: whoever judged last is right.

    A group is the rollouts that slime started together: a question may come up twice in a batch.
    """
    record, reward = record_of(sample), sample.reward
    meta = record.meta if sample.group_index is None else replace(record.meta, group=sample.group_index)
    if meta.status not in LEFT_OUT and reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ConfigError(
                f"{record.label}: its sample has the reward {reward!r:.60}, not a number; choose one with --reward-key"
            )
        meta = replace(meta, reward=float(reward))
    return record if meta == record.meta else replace(record, meta=meta)
