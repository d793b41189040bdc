"""Check that the fields of a record describe a possible rollout. Each is valid on its own already (:mod:`.parts`).

* Sampled tokens have a log-probability, the others have none.
* There is one edit between each view and the next.
* Every tape position is in some view, and positions first appear in tape order.
* Nothing was edited before view 0, so it is the beginning of the tape, in order.
* A sampled token was appended: in the view of its layer it is after every older token of that layer and before
  every newer one, and at least one token precedes it.
* A view does more than extend the view before it with new tokens: that would be the same layer.
* Token weights in the metadata apply to disjoint spans of the tape, in order.
* Untrained tokens in the metadata have a cause and a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from slime_plugin.errors import Defect, printable
from slime_plugin.record.arrays import BoolArray, FloatArray, IntArray, View, span_positions
from slime_plugin.record.meta import Edit, Meta
from slime_plugin.record.rollout_report import UNTRAINED, WEIGHTS

LARGEST_LOGPROB = 1e-3
"""Engines in low precision exceed 0 by a rounding error, not by more."""

LARGEST_WEIGHT = 1e18
"""The product of a larger weight and a loss overflows float32."""


def logprob_defects(generated: BoolArray, logprobs: FloatArray) -> Iterator[Defect]:
    given = ~np.isnan(logprobs)
    if (given == generated).all() and not (logprobs > LARGEST_LOGPROB).any():
        return
    missing, spurious, high = (
        np.flatnonzero(mask) for mask in (generated & ~given, given & ~generated, logprobs > LARGEST_LOGPROB)
    )
    if missing.size:
        yield Defect(
            f"logprobs[{missing[0]}]",
            f"none for a sampled token ({missing.size} of {int(generated.sum())} sampled tokens have none); "
            "the engine must return log-probabilities on every turn - ask for them again, or drop the rollout",
        )
    for found, problem in (
        (spurious, "for a token that was not sampled ({} such); give null there"),
        (high, "is above 0 ({} such); give natural log-probabilities, not probabilities"),
    ):
        if found.size:
            yield Defect(f"logprobs[{found[0]}]", f"{logprobs[found[0]]:g} {problem.format(found.size)}")


def edit_defects(views: tuple[View, ...], edits: tuple[Edit, ...]) -> Iterator[Defect]:
    if len(edits) != len(views) - 1:
        yield Defect(
            "edits",
            f"{len(edits)} edits for {len(views)} views; there is one edit between each view and the "
            f"next, so {len(views)} views take {len(views) - 1}",
        )


def history_defects(generated: BoolArray, views: tuple[View, ...]) -> Iterator[Defect]:
    length = generated.size
    born = np.full(length, -1, dtype=np.int32)  # [L] the first view that holds the position
    seen = 0  # how many tape positions have appeared so far
    before: IntArray | None = None
    for k, spans in enumerate(views):
        view = span_positions(spans)
        if k == 0 and len(spans) == 1 and spans[0][0] == 0 and not generated[0]:  # the usual case
            born[: view.size], seen, before = 0, view.size, view
            continue
        fresh = born[view] < 0
        new = view[fresh]
        born[new] = k
        yield from _order_defects(generated, k, view, fresh)
        if before is not None and _begins_with(view, before) and fresh[before.size :].all():
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
            f"never visible: {unseen.size} of {length} tape positions are in none of the {len(views)} views; "
            "add them to the view of the layer in which they were live, or take them off the tape",
        )
    elif (born[1:] < born[:-1]).any():
        p = int(np.flatnonzero(np.diff(born) < 0)[0])
        yield Defect(
            f"tokens[{p}]",
            f"position {p} first appears in view {born[p]}, position {p + 1} already in view {born[p + 1]}; "
            "the tape is in order of first appearance",
        )


def _begins_with(view: IntArray, before: IntArray) -> bool:
    last = before.size - 1
    # The first comparison decides almost always.
    return view.size > last and view[last] == before[last] and bool((view[: last + 1] == before).all())


def _order_defects(generated: BoolArray, k: int, view: IntArray, fresh: BoolArray) -> Iterator[Defect]:
    """The new tokens of view k: sampled ones were appended, in the order of the tape."""
    new = view[fresh]
    if new.size == 0:
        return
    sampled = generated[new]
    if generated[view[0]] and fresh[0]:
        yield Defect(
            f"views[{k}]",
            f"sampled position {view[0]} is the first of its view: 0 tokens precede it, so no distribution produced "
            "it; a live context starts with at least 1 token that was not sampled there",
        )
    if (new[1:] > new[:-1]).all():
        return
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
            if generated[p]
            else "nothing was edited before view 0, so it is the beginning of the tape, in order"
        )
        yield Defect(f"views[{k}]", f"position {p} is {side} position {other}; {reason}")


def weight_defects(meta: Meta, length: int) -> Iterator[Defect]:
    """
    >>> list(weight_defects(Meta(extra={"weights": [[0, 2, 0.5], [2, 9, 0]]}), 4))[0].field
    'meta.weights[1]'
    """
    if WEIGHTS not in meta.extra:
        return
    entries = meta.extra[WEIGHTS]
    if not isinstance(entries, list | tuple):
        what = f"{type(entries).__name__} is not a list; give [[start, stop, weight], ...]"
        yield Defect(f"meta.{WEIGHTS}", f"{what}, or leave it out if every token counts 1")
        return
    end = 0
    for i, entry in enumerate(entries):
        problem = _weight_problem(entry, end, length)
        if problem is not None:
            yield Defect(f"meta.{WEIGHTS}[{i}]", problem)
            return
        end = entry[1]


def _weight_problem(entry: Any, end: int, length: int) -> str | None:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        return f"{entry!r:.40} is not a span with its weight; give [start, stop, weight]"
    start, stop, weight = entry
    if type(start) is not int or type(stop) is not int:
        return f"start {start!r:.20} and stop {stop!r:.20} must be whole numbers; give tape positions [start, stop)"
    span = f"span [{start!r:.20}, {stop!r:.20})"
    if not 0 <= start < stop <= length:
        return f"{span} is not on the tape of {length} tokens; give positions with 0 <= start < stop <= {length}"
    if start < end:
        return f"{span} begins before {end}, where the one before it ends; give spans in order, none overlapping"
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= LARGEST_WEIGHT:
        return (
            f"weight {weight!r:.40} of {span} is not a number from 0 to {LARGEST_WEIGHT:g}; give the factor of its "
            "tokens in the loss (default 1)"
        )
    return None


def untrained_defects(meta: Meta) -> Iterator[Defect]:
    """
    >>> list(untrained_defects(Meta(extra={"untrained": {"cancelled": 3, "retry": -1}})))[0].field
    'meta.untrained.retry'
    """
    causes = meta.extra.get(UNTRAINED, {})
    if not isinstance(causes, Mapping):
        what = f"{type(causes).__name__} is not an object; give {{cause: number of tokens}}"
        yield Defect(f"meta.{UNTRAINED}", f"{what}, or leave it out if everything that was sampled is on the tape")
        return
    for cause, number in causes.items():
        if type(number) is not int or number < 0:
            yield Defect(
                f"meta.{UNTRAINED}.{printable(cause, 40)}",
                f"{number!r:.40} is not a number of tokens; give a whole number of at least 0",
            )
            return
