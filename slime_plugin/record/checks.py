"""All invariants of a record, each with a message that names the place, both numbers and the remedy.

First the parts must be sound on their own (types, lengths, ranges); only then is it asked whether they tell one
possible history. The history checks, in words:

* every tape position is in some view, and positions first appear in tape order;
* nothing was edited before view 0, so it is the beginning of the tape, in order;
* a sampled token was appended: in the view of its layer it stands after every older token of that layer and before
  every newer one, and something precedes it, or no distribution could have produced it;
* two neighbouring views differ by an edit: a view that merely extends the one before with new tokens is the same
  layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_plugin.errors import Defect
from slime_plugin.record.arrays import LARGEST_ID, BoolArray, IntArray
from slime_plugin.record.labels import Edit, Meta, extra_defects

if TYPE_CHECKING:
    from slime_plugin.record.schema import Record, View

LARGEST_TOTAL = 10**8
"""Most positions of all views together: 100 live contexts of a million tokens. A small file could claim far more."""
LARGEST_LOGPROB = 1e-3
"""A log-probability is at most 0; engines that work in low precision overshoot by a rounding error, not by more."""


def as_meta(value: object) -> Meta | Defect:
    if isinstance(value, Mapping):
        value = Meta.from_json(value)
    if not isinstance(value, Meta):
        return Defect("meta", f"{type(value).__name__} is not an object; give {{}} if nothing is known")
    return next(value.defects(), value)


def as_extra(value: object, taken: tuple[str, ...]) -> dict[str, Any] | Defect:
    if not isinstance(value, Mapping):
        return Defect("extra", f"{type(value).__name__} is not an object; give further fields by name")
    return next(extra_defects("record", value, taken), dict(value))


def as_edits(value: object) -> tuple[Edit, ...] | Defect:
    if not isinstance(value, list | tuple):
        return Defect("edits", f"{type(value).__name__} is not a list; give one object per edit")
    edits = []
    for k, edit in enumerate(value):
        if isinstance(edit, Mapping):
            edit = Edit.from_json(edit)
        if not isinstance(edit, Edit):
            return Defect(f"edits[{k}]", f'{type(edit).__name__} is not an object; give {{"kind": ..., "author": ...}}')
        for defect in edit.defects(f"edits[{k}]"):
            return defect
        edits.append(edit)
    return tuple(edits)


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
                f"[{spans[first][0]}, {spans[first][1]}) holds already; a position stands at most once in a view",
            )
        views.append(tuple(spans))
    if total > LARGEST_TOTAL:
        return Defect("views", f"hold {total} positions together, at most {LARGEST_TOTAL} are read; this is no rollout")
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


def find_defects(record: Record) -> list[Defect]:
    """What is wrong with how the parts fit together, as far as the parts are there: the rest was refused already."""
    found: list[Defect] = []
    if _has(record, "generated", "logprobs"):
        found.extend(_logprob_defects(record))
    if _has(record, "views", "edits"):
        found.extend(_edit_count_defects(record))
    if _has(record, "tokens", "generated", "views"):
        found.extend(_history_defects(record))
    return found


def _has(record: Record, *fields: str) -> bool:
    return all(hasattr(record, field) for field in fields)


def _logprob_defects(record: Record) -> Iterator[Defect]:
    given = ~np.isnan(record.logprobs)
    missing = np.flatnonzero(record.generated & ~given)
    if missing.size:
        yield Defect(
            f"logprobs[{missing[0]}]",
            f"none for a generated token ({missing.size} of {int(record.generated.sum())} generated tokens have none); "
            "the engine must return log-probabilities on every turn - ask for them again, or drop the rollout",
        )
    spurious = np.flatnonzero(given & ~record.generated)
    if spurious.size:
        p = int(spurious[0])
        yield Defect(
            f"logprobs[{p}]",
            f"{record.logprobs[p]:g} for a token that was not generated ({spurious.size} such); give null there",
        )
    high = np.flatnonzero(given & (np.nan_to_num(record.logprobs) > LARGEST_LOGPROB))
    if high.size:
        p = int(high[0])
        yield Defect(
            f"logprobs[{p}]",
            f"{record.logprobs[p]:g} is above 0 ({high.size} such); give natural log-probabilities, not probabilities",
        )


def _edit_count_defects(record: Record) -> Iterator[Defect]:
    if len(record.edits) != len(record.views) - 1:
        yield Defect(
            "edits",
            f"{len(record.edits)} edits for {len(record.views)} views; there is one edit between each view and the "
            f"next, so {len(record.views)} views take {len(record.views) - 1}",
        )


def _history_defects(record: Record) -> Iterator[Defect]:
    length = len(record)
    born = np.full(length, -1, dtype=np.int32)  # [L] the first view that holds the position
    seen = 0  # how many tape positions have appeared so far
    before: IntArray | None = None
    for k in range(len(record.views)):
        view = record.view_positions(k)
        fresh = born[view] < 0
        new = view[fresh]
        born[new] = k
        yield from _order_defects(record, k, view, fresh)
        if before is not None and np.array_equal(view[: before.size], before) and fresh[before.size :].all():
            yield Defect(
                f"views[{k}]",
                f"only extends view {k - 1} ({before.size} positions) by {view.size - before.size} new ones: "
                "nothing was edited, so both are one layer; give the longer view once",
            )
        seen += new.size
        before = view
    if seen < length:
        unseen = np.flatnonzero(born < 0)
        yield Defect(
            f"tokens[{unseen[0]}]",
            f"never visible: {unseen.size} of {length} tape positions are in none of the {len(record.views)} views; "
            "add them to the view of the layer in which they were live, or take them off the tape",
        )
    elif (np.diff(born) < 0).any():
        p = int(np.flatnonzero(np.diff(born) < 0)[0])
        yield Defect(
            f"tokens[{p}]",
            f"position {p} first appears in view {born[p]}, position {p + 1} already in view {born[p + 1]}; "
            "the tape is in order of first appearance",
        )


def _order_defects(record: Record, k: int, view: IntArray, fresh: BoolArray) -> Iterator[Defect]:
    """The new tokens of view k: sampled ones were appended, in the order of the tape."""
    new = view[fresh]
    if new.size == 0:
        return
    sampled = record.generated[new]
    if record.generated[view[0]] and fresh[0]:
        yield Defect(
            f"views[{k}]",
            f"generated position {view[0]} is the first of its view: 0 tokens precede it, so no distribution produced "
            "it; a live context starts with at least 1 token that was not sampled there",
        )
    must_be_in_order = sampled if k else np.ones_like(sampled)
    highest_so_far = np.maximum.accumulate(new)
    lowest_from_here = np.minimum.accumulate(new[::-1])[::-1]
    wrong = np.flatnonzero(must_be_in_order & ((highest_so_far != new) | (lowest_from_here != new)))
    if wrong.size:
        i = int(wrong[0])
        p = int(new[i])
        other = int(highest_so_far[i] if highest_so_far[i] != p else lowest_from_here[i])
        side = "after" if other > p else "before"
        reason = (
            "a sampled token is appended, so in the view of its layer the tape order of new tokens is their order"
            if record.generated[p]
            else "nothing was edited before view 0, so it is the beginning of the tape, in order"
        )
        yield Defect(f"views[{k}]", f"position {p} stands {side} position {other}; {reason}")
