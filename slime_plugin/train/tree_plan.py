"""Who attends to whom in a row of tokens with parents: exact tree attention as a list of rectangles.

A **query block** is a maximal run of tokens that each follow the one before. Its queries see their own block causally
and, without any mask, the spans of the row that lead from the root to the parent of the block. A plain sequence is one
block without ancestors, and packed sequences are several: stock attention is the special case, at its stock cost.

Under context parallelism a rank computes the queries of one contiguous window of the row, with the keys of all of it.
Legend: T tokens of the row, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from slime_plugin.errors import LayoutError
from slime_plugin.record.arrays import BoolArray, IntArray, Span, join_spans, read_only, span_positions


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries ``[start, stop)`` of the row."""

    start: int
    stop: int
    ancestors: tuple[Span, ...]
    """Spans of the row before ``start`` that all its queries see, from the root down. None overlap."""

    @property
    def path(self) -> tuple[Span, ...]:
        """Ancestors and the block itself: the keys, with causality aligned to their end."""
        return join_spans((*self.ancestors, (self.start, self.stop)))


@dataclass(frozen=True)
class TreePlan:
    """The attention of the queries in one window of a row.

    In the paper's running example the row has 19 tokens in four blocks; the last one, ``y12 ans``, is
    ``QueryBlock(17, 19, ancestors=((0, 5), (8, 10), (13, 15)))``.
    """

    tokens: int
    """T, over the whole row."""
    depth: IntArray
    """[T] number of ancestors: the position id."""
    blocks: tuple[QueryBlock, ...]
    """They cover the window, in order."""
    window: Span
    """The queries of this rank, as a span of the row."""
    on_device: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of a backend per device, for all layers."""

    @cached_property
    def key_index(self) -> IntArray:
        """The keys of all blocks, one path after the other, as row indices: the gather of varlen kernels."""
        return span_positions([span for block in self.blocks for span in block.path])

    @cached_property
    def query_bounds(self) -> IntArray:
        """[blocks + 1] where each block's queries begin, relative to the window."""
        return np.array([0, *(block.stop - self.window[0] for block in self.blocks)], dtype=np.int32)

    @cached_property
    def key_bounds(self) -> IntArray:
        """[blocks + 1] where each block's keys begin in ``key_index``."""
        lengths = [sum(b - a for a, b in block.path) for block in self.blocks]
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        if bounds[-1] > np.iinfo(np.int32).max:
            raise LayoutError(
                f"the paths of {len(self.blocks):,} query blocks have {bounds[-1]:,} keys, more than 32 bits count; "
                "lower trainer.batch_tokens, or train with method=logittree"
            )
        return bounds.astype(np.int32)

    @property
    def gathers(self) -> bool:
        """False if the keys of the blocks in order are the row itself: nothing to gather."""
        return any(block.ancestors for block in self.blocks) or self.window != (0, self.tokens)

    def mask(self) -> BoolArray:
        """[window, T] whether a query sees a key; for reference backends and tests."""
        start, stop = self.window
        visible = np.zeros((stop - start, self.tokens), dtype=np.bool_)
        for block in self.blocks:
            rows = slice(block.start - start, block.stop - start)
            for a, b in block.ancestors:
                visible[rows, a:b] = True
            visible[rows, block.start : block.stop] = np.tri(block.stop - block.start, dtype=np.bool_)
        return visible


def plan_tree(parent: IntArray, window: Span | None = None) -> TreePlan:
    """Plan a row from the parents of its tokens (-1: a root), which precede their children."""
    tokens = len(parent)
    index = np.arange(tokens)
    wrong = np.flatnonzero((parent >= index) | (parent < -1))
    if wrong.size:
        at = int(wrong[0])
        raise LayoutError(f"token {at} has parent {int(parent[at])}; a parent is -1 or precedes its child")
    starts = np.flatnonzero((parent != index - 1) | (index == 0))
    stops = np.append(starts[1:], tokens)
    depth = np.empty(tokens, dtype=np.int32)
    paths: list[tuple[Span, ...]] = []  # from the root to where each run hangs
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        above = int(parent[start])
        if above < 0:
            paths.append(())
        else:
            run = int(np.searchsorted(starts, above, side="right")) - 1
            paths.append(join_spans((*paths[run], (int(starts[run]), above + 1))))
        depth[start:stop] = np.arange(stop - start) + (0 if above < 0 else depth[above] + 1)
    low, high = window or (0, tokens)
    blocks = [
        QueryBlock(max(start, low), min(stop, high), join_spans((*path, (start, max(start, low)))))
        for start, stop, path in zip(starts.tolist(), stops.tolist(), paths, strict=True)
        if start < high and stop > low
    ]
    return TreePlan(tokens, read_only(depth), tuple(blocks), (low, high))
