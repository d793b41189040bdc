"""What the trainer sees: rows of tokens, each with the token it follows.

A plain sequence is the row whose parent is ``i - 1``; a tree is a row whose parents are not. The position id of a
token is its depth under its root, and its loss, if it has one, is the log-probability of the token given the path
that ends at its parent. Legend: N tokens of a row, L tape tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from slime_plugin.record import Record
from slime_plugin.record.arrays import BoolArray, FloatArray, IntArray, read_only
from slime_plugin.tree import Trie


class Visible(Protocol):
    """An attention mask that is not a tree, in a form that is smaller than the mask."""

    def mask(self) -> BoolArray:
        """[N, N] whether query i sees key j."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What ``memorywalker layout --json`` adds to the row."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One training input of N tokens. Its arrays are read-only: copy what is to be changed."""

    tokens: IntArray
    tape: IntArray
    """[N] tape position of each token."""
    parent: IntArray
    """[N] index of the token it follows; -1 for a root."""
    position: IntArray
    """[N] position id: depth under the root."""
    loss_mask: BoolArray
    """[N] the token is trained, here and in no other row of the rollout."""
    rollout_logprobs: FloatArray
    """[N] as logged at decode time; NaN where there is no loss."""
    weight: FloatArray
    """[N] token weight (:func:`token_weights`); 1 where there is no loss."""
    visible: Visible | None = None
    """The attention mask, of a method that is only scored; None: each token sees its path from the root."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A row without loss or gradient whose predictions are the targets at the student's diverging leaves."""

    row: Row
    student: IntArray
    """[D] index of each leaf in the student row."""
    teacher: IntArray
    """[D] index of the same tape token in this row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything one rollout contributes to a training step."""

    method: str
    rows: tuple[Row, ...]
    teachers: tuple[Teacher, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained, by cause. Every sampled token is either trained once or counted here."""
    off_context: int | None = 0
    """Trained tokens that are conditioned on something else than what they were sampled under. None where the visible
    tokens are right and their hidden states are not."""

    @classmethod
    def all_lost(cls, method: str, record: Record, cause: str) -> Layout:
        """Of a rollout that is not trained: all its sampled tokens are lost to one cause."""
        return cls(method, (), lost={cause: record.sampled} if record.sampled else {})

    @property
    def tokens(self) -> int:
        """Tokens to compute with gradient."""
        return sum(len(row) for row in self.rows)

    @property
    def teacher_tokens(self) -> int:
        """Tokens to compute without gradient."""
        return sum(len(teacher.row) for teacher in self.teachers)

    @property
    def trained(self) -> int:
        return sum(int(row.loss_mask.sum()) for row in self.rows)


def idle_row(record: Record) -> Row:
    """The first token twice, without loss: for a rollout with nothing to train that has to be in the batch."""
    return chain_row(record, np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.bool_))


def token_weights(record: Record) -> FloatArray:
    """[L] factor of everything a tape token contributes to the loss; 1 where ``meta.weights`` says nothing.

    The number of trained tokens that a rollout is averaged over stays the same: a token of weight 0 is still counted.

    >>> halved = {"weights": [[1, 2, 0.5]]}
    >>> token_weights(Record([7, 8, 9], [0, 1, 1], [None, -0.5, -0.25], [[(0, 3)]], meta=halved)).tolist()
    [1.0, 0.5, 1.0]
    """
    weights = np.ones(len(record), dtype=np.float32)
    for start, stop, weight in record.meta.report.weights:  # checked when the record was made
        weights[start:stop] = weight
    return read_only(weights)


def chain_row(record: Record, tape: IntArray, loss_mask: BoolArray) -> Row:
    """A plain sequence: each token follows the one before."""
    position = np.arange(tape.size, dtype=np.int32)
    return make_row(record, tape, position - 1, position, loss_mask)


def trie_row(record: Record, trie: Trie, *, trained: bool = True) -> Row:
    """A prefix tree in depth-first order; without loss if it is not ``trained``."""
    return make_row(record, trie.tape, trie.parent, trie.depth, trie.trained & trained)


def forest_row(record: Record, chains: Sequence[Row]) -> Row:
    """Chains side by side in one row: positions restart at each, and none sees another."""
    return make_row(
        record,
        np.concatenate([chain.tape for chain in chains]),
        join_parents([chain.parent for chain in chains]),
        np.concatenate([chain.position for chain in chains]),
        np.concatenate([chain.loss_mask for chain in chains]),
    )


def join_parents(rows: Sequence[IntArray]) -> IntArray:
    """[sum N] parents of rows one after the other, from those within each row.

    >>> join_parents([np.array([-1, 0, 0]), np.array([-1, 0])]).tolist()
    [-1, 0, 0, -1, 3]
    """
    starts = np.cumsum([0, *map(len, rows)])[:-1]
    parts = [np.where(row < 0, -1, row + start) for row, start in zip(rows, starts, strict=True)]
    return np.concatenate(parts).astype(np.int32)


def make_row(
    record: Record,
    tape: IntArray,
    parent: IntArray,
    position: IntArray,
    loss_mask: BoolArray,
    visible: Visible | None = None,
) -> Row:
    """The columns of a row as in :class:`Row`; the others follow from the record."""
    logprobs = np.where(loss_mask, record.logprobs[tape], np.float32(np.nan))
    weight = np.where(loss_mask, token_weights(record)[tape], np.float32(1))
    row = Row(record.tokens[tape], tape, parent, position, loss_mask, logprobs, weight, visible)
    for column in (row.tokens, tape, parent, position, loss_mask, logprobs, weight):
        read_only(column)
    return row
