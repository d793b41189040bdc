"""Array types of records and of what is derived from them. Arrays that are shared are read-only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

Span = tuple[int, int]
"""Tape positions ``[start, stop)``."""
View = tuple[Span, ...]
"""A live context: spans of the tape, in context order."""


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Mark the array as read-only, since derived arrays share its memory, and return it."""
    array.flags.writeable = False
    return array


def span_positions(spans: Sequence[Span]) -> IntArray:
    """The positions of the spans, one after the other.

    >>> span_positions([(4, 6), (0, 2)]).tolist()
    [4, 5, 0, 1]
    """
    if len(spans) == 1:
        return np.arange(*spans[0], dtype=np.int32)
    bounds = np.array(spans, dtype=np.int32).reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    offsets = np.cumsum(lengths) - lengths
    positions: IntArray = np.arange(lengths.sum(), dtype=np.int32)
    positions += np.repeat(bounds[:, 0] - offsets.astype(np.int32), lengths)
    return positions


def join_spans(spans: Iterable[Span]) -> View:
    """Drop empty spans and merge adjacent ones.

    >>> join_spans([(0, 2), (2, 5), (5, 5), (7, 8)])
    ((0, 5), (7, 8))
    """
    joined: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def equal_spans(values: NDArray[Any]) -> list[Span]:
    """The maximal spans of equal values.

    >>> equal_spans(np.array([3, 3, 1]))
    [(0, 2), (2, 3)]
    """
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), values.size]
    return list(pairwise(edges)) if values.size else []


def true_spans(flags: BoolArray) -> list[Span]:
    """The maximal spans in which all flags are set."""
    return [(start, stop) for start, stop in equal_spans(flags) if flags[start]]


def to_json_floats(array: FloatArray) -> list[float | None]:
    """Floats with the fewest digits that parse to the same float32; None for NaN.

    >>> to_json_floats(np.array([-0.1, np.nan], dtype=np.float32))
    [-0.1, None]
    """
    return [None if text == "nan" else float(text) for text in array.astype(np.str_).tolist()]
