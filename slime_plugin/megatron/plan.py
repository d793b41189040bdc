"""Who attends to whom in a row of tokens with parents: exact tree attention as a list of rectangles.

A **segment** is a maximal run of tokens that each follow the one before. Its queries see their own segment causally
and, without any mask, the spans of the row that lead from the root to where the segment hangs. A plain sequence is one
segment without ancestors, and packed sequences are several: stock attention is the special case, at its stock cost.

Under context parallelism a rank computes the queries of one contiguous window of the row, with the keys of all of it.
Legend: T tokens of the row, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from slime_plugin.errors import LayoutError
from slime_plugin.record.arrays import BoolArray, IntArray, Span, read_only, span_positions


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries ``[start, stop)`` of the row."""

    start: int
    stop: int
    ancestors: tuple[Span, ...]
    """Spans of the row before ``start`` that all its queries see, from the root down. None overlap."""

    @property
    def path(self) -> tuple[Span, ...]:
        """Ancestors and the segment itself: the keys, with causality aligned to their end."""
        return join_spans((*self.ancestors, (self.start, self.stop)))


@dataclass(frozen=True)
class TreePlan:
    """The attention of the queries in one window of a row.

    In the paper's running example the row has 19 tokens in four segments; the last one, ``y12 ans``, is
    ``Segment(17, 19, ancestors=((0, 5), (8, 10), (13, 15)))``.
    """

    tokens: int
    """T, over the whole row."""
    depth: IntArray
    """[T] number of ancestors: the position id."""
    segments: tuple[Segment, ...]
    """They cover the window, in order."""
    window: Span
    """The queries of this rank, as a span of the row."""
    on_device: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a backend made of the plan for a device; every layer asks for it again."""

    @cached_property
    def key_index(self) -> IntArray:
        """The keys of all segments, one path after the other, as row indices: the gather of varlen kernels."""
        return span_positions([span for segment in self.segments for span in segment.path])

    @cached_property
    def query_bounds(self) -> IntArray:
        """[segments + 1] where each segment's queries begin, counted within the window."""
        return np.array([0, *(s.stop - self.window[0] for s in self.segments)], dtype=np.int32)

    @cached_property
    def key_bounds(self) -> IntArray:
        """[segments + 1] where each segment's keys begin in ``key_index``."""
        lengths = [sum(b - a for a, b in s.path) for s in self.segments]
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    @property
    def gathers(self) -> bool:
        """False if the keys of the segments, put in a row, are the row itself: nothing to gather."""
        return any(s.ancestors for s in self.segments) or self.window != (0, self.tokens)

    @property
    def pairs(self) -> int:
        """Query-key pairs to compute: the attention bound of any exact method."""
        start, stop = self.window
        return int(self.depth[start:stop].sum(dtype=np.int64)) + stop - start

    def mask(self) -> BoolArray:
        """[window, T] whether a query sees a key; for reference backends and tests."""
        start, stop = self.window
        visible = np.zeros((stop - start, self.tokens), dtype=np.bool_)
        for s in self.segments:
            rows = slice(s.start - start, s.stop - start)
            for a, b in s.ancestors:
                visible[rows, a:b] = True
            visible[rows, s.start : s.stop] = np.tri(s.stop - s.start, dtype=np.bool_)
        return visible


def plan_tree(parent: IntArray, window: Span | None = None) -> TreePlan:
    """The plan of a row from the parents of its tokens (-1: a root), which stand before their children."""
    tokens = len(parent)
    index = np.arange(tokens)
    wrong = np.flatnonzero((parent >= index) | (parent < -1))
    if wrong.size:
        at = int(wrong[0])
        raise LayoutError(f"token {at} has parent {int(parent[at])}; a parent is -1 or stands before its child")
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
    segments = [
        Segment(max(start, low), min(stop, high), join_spans((*path, (start, max(start, low)))))
        for start, stop, path in zip(starts.tolist(), stops.tolist(), paths, strict=True)
        if start < high and stop > low
    ]
    return TreePlan(tokens, read_only(depth), tuple(segments), (low, high))


def join_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same positions in the same order, without empty spans, neighbours in one."""
    joined: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
