"""Convert what a caller or a file provides into the fields of a record, exactly or not at all.

Each converter returns its field, or the defects of the value. Nothing is rounded, wrapped or guessed: ``True`` is not
token 1, ``3.0`` is not token 3, and an id out of range is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from slime_plugin.errors import Defect
from slime_plugin.record.arrays import BoolArray, FloatArray, IntArray, View, read_only
from slime_plugin.record.meta import Edit, Meta, extra_defects

LARGEST_ID = 2**31 - 1
"""Tokens and positions are int32: the largest vocabularies in use have 2**18 entries."""
LARGEST_TOTAL = 10**8
"""Maximum positions of all views together: 100 contexts of a million tokens. A small file could claim far more."""
_WIDTH = 40
"""Characters of a value in a message."""


def as_tokens(value: object) -> IntArray | Defect:
    """Token ids as int32.

    >>> as_tokens([5, 2.5])
    Defect(field='tokens[1]', message='float 2.5 is not a token id; ids are whole numbers from 0 to 2147483647')
    """
    remedy = f"ids are whole numbers from 0 to {LARGEST_ID}"
    values = _as_list("tokens", value, {int}, "iu", "a token id", remedy)
    if isinstance(values, Defect):
        return values
    if len(values) == 0:
        return Defect("tokens", "the tape has 0 tokens; a rollout has at least its prompt")
    if not _within(values, 0, LARGEST_ID):
        bad = next(i for i, token in enumerate(values) if not 0 <= token <= LARGEST_ID)
        return Defect(f"tokens[{bad}]", f"id {_clipped(values[bad])} is out of range; {remedy}")
    return read_only(np.array(values, dtype=np.int32))


def as_flags(value: object, length: int) -> BoolArray | Defect:
    """Flags "sampled by the policy": 0, 1 or booleans, one per tape position."""
    remedy = "use 1 for a token the policy sampled, 0 for any other"
    values = _as_list("generated", value, {int, bool}, "biu", "a flag", remedy)
    if isinstance(values, Defect):
        return values
    if len(values) != length:
        return Defect("generated", f"{len(values)} flags for {length} tokens; every tape position needs exactly one")
    if not _within(values, 0, 1):
        bad = next(i for i, flag in enumerate(values) if flag not in (0, 1))
        return Defect(f"generated[{bad}]", f"{_clipped(values[bad])} is neither 0 nor 1; {remedy}")
    return read_only(np.array(values, dtype=np.bool_))


def as_logprobs(value: object, length: int) -> FloatArray | Defect:
    """Log-probabilities as float32, NaN where there is none (``null`` in JSON)."""
    remedy = "give the log-probability logged at decode time, or null for a token that was not sampled"
    values = _as_list("logprobs", value, {float, int, type(None)}, "f", "a log-probability", remedy)
    if isinstance(values, Defect):
        return values
    if not isinstance(values, np.ndarray) and int in set(map(type, values)):  # may be too large even for a float64
        bad = next((i for i, x in enumerate(values) if type(x) is int and abs(x) > 2**53), None)
        if bad is not None:
            return Defect(f"logprobs[{bad}]", f"{_clipped(values[bad])} is not a log-probability; {remedy}")
    if len(values) != length:
        return Defect("logprobs", f"{len(values)} entries for {length} tokens; {remedy}")
    wide = np.array(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    overflow = np.flatnonzero(np.isinf(narrow))
    if overflow.size:
        bad = int(overflow[0])
        return Defect(f"logprobs[{bad}]", f"{wide[bad]:g} is not finite in float32; {remedy}")
    return read_only(narrow)


def _as_list(field: str, value: Any, types: set[type], kinds: str, what: str, remedy: str) -> Any:
    """A one-dimensional array of these dtype kinds, or a list of these types; or a :class:`Defect`."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in kinds:
            return Defect(field, f"array of {value.dtype} with shape {value.shape}; {remedy}, in one dimension")
        return value
    if not isinstance(value, (list, tuple)):
        return Defect(field, f"{_described(value)} is not a list; {remedy}")
    if not set(map(type, value)) <= types:
        bad = next(i for i, item in enumerate(value) if type(item) not in types)
        return Defect(f"{field}[{bad}]", f"{_described(value[bad])} is not {what}; {remedy}")
    return value


def as_views(value: object, length: int) -> tuple[View, ...] | Defect:
    """Views whose spans are pairs of positions on a tape of ``length`` tokens, none reversed, none overlapping."""
    if not isinstance(value, list | tuple):
        return Defect("views", f"{type(value).__name__} is not a list; give one list of spans per layer")
    if not value:
        return Defect("views", "0 views; a rollout has at least one live context")
    views, total = [], 0
    for k, view in enumerate(value):
        if not isinstance(view, list | tuple):
            return Defect(f"views[{k}]", f"{type(view).__name__} is not a list; give spans [[start, stop], ...]")
        if not view:
            return Defect(f"views[{k}]", "0 spans; a live context holds at least one token")
        spans = []
        for i, span in enumerate(view):
            defect = _span_defect(span, length)
            if defect:
                return Defect(f"views[{k}][{i}]", defect)
            spans.append((int(span[0]), int(span[1])))
        total += sum(stop - start for start, stop in spans)
        overlap = _overlap(spans)
        if overlap:
            first, second, position = overlap
            return Defect(
                f"views[{k}][{second}]",
                f"span [{spans[second][0]}, {spans[second][1]}) repeats tape position {position}, which span {first} "
                f"[{spans[first][0]}, {spans[first][1]}) holds already; a position occurs at most once in a view",
            )
        views.append(tuple(spans))
    if total > LARGEST_TOTAL:
        return Defect("views", f"hold {total} positions in all; the maximum is {LARGEST_TOTAL}")
    return tuple(views)


def _span_defect(span: Any, length: int) -> str | None:
    if not isinstance(span, list | tuple) or len(span) != 2:
        return "not a pair; give [start, stop]"
    if any(isinstance(x, bool) or not isinstance(x, int | np.integer) for x in span):
        return "start and stop must be whole numbers; give tape positions [start, stop)"
    start, stop = span
    if max(abs(start), abs(stop)) > LARGEST_ID:
        return f"start or stop is beyond {LARGEST_ID}, on a tape of {length} tokens; give tape positions"
    if start < 0:
        return f"span [{start}, {stop}) starts before the tape; positions count from 0"
    if start >= stop:
        shape = "empty" if start == stop else "reversed"
        return f"span [{start}, {stop}) is {shape}: start {start} must be less than stop {stop}"
    if stop > length:
        return f"span [{start}, {stop}) ends after the tape of {length} tokens; stop is exclusive, at most {length}"
    return None


def _overlap(spans: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    """The first two spans that share a position, in view order, and that position."""
    by_start = sorted(range(len(spans)), key=spans.__getitem__)
    for a, b in pairwise(by_start):
        if spans[a][1] > spans[b][0]:
            return min(a, b), max(a, b), spans[b][0]
    return None


def as_edits(value: object) -> tuple[Edit, ...] | list[Defect]:
    if not isinstance(value, list | tuple):
        return [Defect("edits", f"{type(value).__name__} is not a list; give one object per edit")]
    edits: list[Edit] = []
    found: list[Defect] = []
    for k, edit in enumerate(value):
        if isinstance(edit, Mapping):
            edit = Edit.from_json(edit)
        if isinstance(edit, Edit):
            edits.append(edit)
            found.extend(edit.defects(f"edits[{k}]"))
        else:
            what = f'{type(edit).__name__} is not an object; give {{"kind": ..., "author": ...}}'
            found.append(Defect(f"edits[{k}]", what))
    return found or tuple(edits)


def as_meta(value: object) -> Meta | list[Defect]:
    if isinstance(value, Mapping):
        value = Meta.from_json(value)
    if not isinstance(value, Meta):
        return [Defect("meta", f"{type(value).__name__} is not an object; give {{}} if nothing is known")]
    return list(value.defects()) or value


def as_extra(value: object, taken: tuple[str, ...]) -> dict[str, Any] | list[Defect]:
    """Further top-level fields, which must not be those in ``taken``."""
    if not isinstance(value, Mapping):
        return [Defect("extra", f"{type(value).__name__} is not an object; give further fields by name")]
    return list(extra_defects("record", value, taken)) or dict(value)


def _within(values: Any, low: int, high: int) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "b" or bool(values.min() >= low and values.max() <= high)
    return bool(min(values) >= low and max(values) <= high)


def _described(value: object) -> str:
    return "null" if value is None else f"{type(value).__name__} {_clipped(value)}"


def _clipped(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**_WIDTH:  # repr of a huge int may itself be refused by Python
        return f"a number with about {int(value.bit_length() * 0.30103)} digits"
    text = repr(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
