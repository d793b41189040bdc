"""Rows of several rollouts, packed side by side into one micro-batch.

A micro-batch is one row of T tokens: the given rows one after the other, their parents shifted along, and padding up to
the multiple that parallelism needs. Padding is a chain of its own: it attends to nothing else and nothing attends to
it. What the loss needs is kept for the M predicted tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slime_plugin.errors import LayoutError
from slime_plugin.methods import Layout, Row
from slime_plugin.record.arrays import BoolArray, FloatArray, IntArray

_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Item:
    """A row of one rollout, and which of its tokens are to be predicted."""

    row: Row
    rollout: int
    """Number of the rollout in the batch."""
    predicted: IntArray
    """[m] indices of the row."""
    leaves: IntArray
    """Which of the m are diverging leaves."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row of T tokens, M of them predicted."""

    tokens: IntArray
    parent: IntArray
    position: IntArray
    visible: BoolArray | None
    """[T, T] an explicit attention mask, if the rows are of the union packing."""
    predicted: IntArray
    """[M] indices of the row."""
    leaves: IntArray
    """[D] which of the M are diverging leaves; the leaves of a rollout are in the order of its student row."""
    rollout: IntArray
    """[M] number of the rollout in the batch."""
    tape: IntArray
    """[M]"""
    rollout_logprobs: FloatArray
    """[M]"""
    weight: FloatArray
    """[M] factor of the token in the loss."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> IntArray:
        """[M] the token ids to be predicted."""
        return self.tokens[self.predicted]


def student_items(layouts: Iterable[Layout]) -> list[Item]:
    """The rows of a batch of rollouts that are trained, and their trained tokens."""
    items = []
    for rollout, layout in enumerate(layouts):
        leaves = np.concatenate([_NONE, *(teacher.student for teacher in layout.teachers)])
        for row in layout.rows:  # a layout with teachers has one
            predicted = np.flatnonzero(row.loss_mask).astype(np.int32)
            items.append(Item(row, rollout, predicted, np.searchsorted(predicted, leaves).astype(np.int32)))
    return items


def teacher_items(layouts: Iterable[Layout]) -> list[Item]:
    """The teacher rows, and in each the diverging leaves in the order of the student row."""
    return [
        Item(teacher.row, rollout, teacher.teacher, _NONE)
        for rollout, layout in enumerate(layouts)
        for teacher in layout.teachers
    ]


def pack(items: Sequence[Item], multiple: int = 1) -> MicroBatch:
    """One micro-batch of all the items, in their order."""
    if not items:
        raise LayoutError("a micro-batch needs at least one row")
    rows = [item.row for item in items]
    sizes = [len(row) for row in rows]
    predicted = [len(item.predicted) for item in items]
    starts, firsts = _starts(sizes), _starts(predicted)
    tokens = sum(sizes)
    pad = np.arange(-tokens % multiple, dtype=np.int32)
    parents = [np.where(row.parent < 0, -1, row.parent + at) for row, at in zip(rows, starts, strict=True)]
    parents.append(np.where(pad == 0, -1, pad + tokens - 1))
    return MicroBatch(
        tokens=np.concatenate([*(row.tokens for row in rows), np.zeros_like(pad)]),
        parent=np.concatenate(parents).astype(np.int32),
        position=np.concatenate([*(row.position for row in rows), pad]),
        visible=_visible(rows, starts, tokens + pad.size) if any(row.lifetimes for row in rows) else None,
        predicted=np.concatenate([item.predicted + at for item, at in zip(items, starts, strict=True)]),
        leaves=np.concatenate([item.leaves + at for item, at in zip(items, firsts, strict=True)]),
        rollout=np.repeat(np.array([item.rollout for item in items], dtype=np.int32), predicted),
        tape=np.concatenate([item.row.tape[item.predicted] for item in items]),
        rollout_logprobs=np.concatenate([item.row.rollout_logprobs[item.predicted] for item in items]),
        weight=np.concatenate([item.row.weight[item.predicted] for item in items]),
    )


def pack_within(items: Sequence[Item], budget: int, multiple: int = 1) -> list[MicroBatch]:
    """Micro-batches of at most ``budget`` tokens, padding aside, in order; a larger row gets one of its own."""
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        if not groups or len(item.row) > room:
            groups.append([])
            room = budget
        groups[-1].append(item)
        room -= len(item.row)
    return [pack(group, multiple) for group in groups]


def idle_batch(multiple: int = 1) -> MicroBatch:
    """For a replica that has nothing to train but has to take part: two tokens, none of them predicted."""
    two = np.arange(2, dtype=np.int32)
    row = Row(np.zeros_like(two), two, two - 1, two, np.zeros(2, dtype=np.bool_), np.full(2, np.nan, dtype=np.float32))
    return pack([Item(row, 0, _NONE, _NONE)], multiple)


def _starts(sizes: Sequence[int]) -> IntArray:
    """Where each of some consecutive pieces begins."""
    return (np.cumsum(sizes) - sizes).astype(np.int32)


def _visible(rows: Sequence[Row], starts: IntArray, tokens: int) -> BoolArray:
    visible = np.eye(tokens, dtype=np.bool_)  # padding sees itself
    for row, at in zip(rows, starts.tolist(), strict=True):
        if row.lifetimes is None:
            raise LayoutError("rows of the union packing cannot share a micro-batch with trees; pack them apart")
        visible[at : at + len(row), at : at + len(row)] = row.lifetimes.mask()
    return visible
