"""Why a context does not go on where the one before it ended.

Two contexts of one conversation are compared piece by piece. What was put behind the older one is growth, not a break;
of everything else the roles say what happened:

=================  ====================================================================================================
``compaction``     turns left; or tool results did, and text that is none stands in their place
``prune``          tool results were replaced by other text, or left without anything in their place
``template_strip``  the thoughts of earlier turns were taken out
``drift``          a turn came back as something that does not mean the same, or the system message or tools changed
``unknown``        anything else
=================  ====================================================================================================

Two more causes are no breaks of one conversation: with ``subagent`` and ``auxiliary`` another one goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from slime_plugin.tap.pieces import Piece

Cause = Literal["compaction", "prune", "template_strip", "drift", "subagent", "auxiliary", "unknown"]

EDIT_KINDS: dict[Cause, str] = {
    "compaction": "compact",
    "prune": "prune",
    "template_strip": "prune",
    "drift": "unknown",
    "subagent": "switch",
    "auxiliary": "switch",
    "unknown": "unknown",
}
"""The kind of edit that a record calls each."""

MOST_PAIRS = 50_000
"""Pairs of equal pieces in two contexts, up to which they are compared with care. Usually there are as many as
pieces."""


@dataclass(frozen=True, slots=True)
class Break:
    """What happened to the context of a conversation."""

    cause: Cause
    removed: int
    """Tokens that left."""
    inserted: int
    """Tokens that came, other than at the end."""


def explain(before: Sequence[Piece], after: Sequence[Piece]) -> Break:
    """``before`` is the context that the last turn ended, ``after`` the prompt of the next."""
    common = _common_turns(before, after)
    spans = list(_differences(before, after, common))
    if spans and spans[-1][1] == len(before):  # what is beyond the end of the older one is growth
        a, b, c, d = spans.pop()
        if a < b:
            spans.append((a, b, c, min(d, c + b - a)))
    changes = [(before[a:b], after[c:d]) for a, b, c, d in spans]
    other = [len(after[j].tokens) - len(before[i].tokens) for i, j in common]  # turns without their thoughts, or with
    return Break(
        _cause(changes, stripped=any(other)),
        sum(_tokens(gone) for gone, _ in changes) - sum(more for more in other if more < 0),
        sum(_tokens(new) for _, new in changes) + sum(more for more in other if more > 0),
    )


def _common_turns(before: Sequence[Piece], after: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where both contexts have the same turns: as many of them as come in the same order."""
    places = {piece.turn.id: i for i, piece in enumerate(after) if piece.turn is not None}
    ends: list[int] = []  # the smallest place that a row of each length ends with
    rows: list[list[tuple[int, int]]] = []
    for i, piece in enumerate(before):
        place = None if piece.turn is None else places.get(piece.turn.id)
        if place is not None:
            length = bisect_left(ends, place)
            row = [*(rows[length - 1] if length else ()), (i, place)]
            ends[length : length + 1], rows[length : length + 1] = [place], [row]
    return rows[-1] if rows else []


def _differences(
    before: Sequence[Piece], after: Sequence[Piece], common: list[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Where they differ, on either side. A turn is itself wherever it is: what stands between two of them is compared
    with what stands between the same two."""
    start = begin = 0
    for stop, end in [*common, (len(before), len(after))]:
        was, now = _comparable(before[start:stop], after[begin:end])
        for tag, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
            if tag != "equal":
                yield start + a, start + b, begin + c, begin + d
        start, begin = stop + 1, end + 1


def _comparable(before: Sequence[Piece], after: Sequence[Piece]) -> tuple[list[Hashable], list[Hashable]]:
    """What pieces are compared by. Finding out which of many equal pieces is which takes cubic time: then the first is
    the first, and so on."""
    sides: list[list[Hashable]] = [[piece.key for piece in side] for side in (before, after)]
    was, now = (Counter(side) for side in sides)
    if sum(number * now[key] for key, number in was.items()) > MOST_PAIRS:
        for side in sides:
            seen: Counter[Hashable] = Counter()
            for i, key in enumerate(side):
                side[i] = (key, seen[key])
                seen[key] += 1
    return sides[0], sides[1]


def stands_for_the_rest(before: Sequence[Piece], after: Sequence[Piece]) -> bool:
    """Whether the last turn of a context is a summary that came back: without what asked for it, behind what the
    context began with, and in place of turns."""
    if len(before) < 2 or before[-1].turn is None or before[-2].role != "user":
        return False
    place = next((i for i, piece in enumerate(after) if piece.turn is before[-1].turn), 0)
    kept = [piece.key for piece in before[:place]]
    between = before[place:-2]
    return (
        0 < place < len(before) - 2
        and kept == [piece.key for piece in after[:place]]
        and any(piece.turn is not None for piece in between)
    )


def _cause(changes: list[tuple[Sequence[Piece], Sequence[Piece]]], *, stripped: bool) -> Cause:
    everything = [piece for change in changes for side in change for piece in side]
    said = [(_without_head(was), _without_head(now)) for was, now in changes]
    # A turn that said nothing is left out by clients; what stands in its place was said next.
    said = [(was, now) for was, now in said if (was or now) and not (was and all(map(_is_silent, was)))]
    gone, new = ([piece for change in said for piece in change[side]] for side in (0, 1))
    if not said:
        return "drift" if everything else "template_strip" if stripped else "unknown"
    if gone and all(piece.role == "tool" for piece in (*gone, *new)):
        return "prune"
    if all(_drifted(was, now) for was, now in said):
        return "drift"
    if any(piece.turn is not None for piece in gone):
        return "compaction"
    if any(piece.role in ("tool", "assistant") for piece in gone):
        return "compaction" if new else "prune"
    return "unknown"


def _drifted(was: Sequence[Piece], now: Sequence[Piece]) -> bool:
    """A turn stands there in other words, with its results perhaps."""
    same_roles = [piece.role for piece in was] == [piece.role for piece in now][: len(was)]
    in_words = any(piece.role == "assistant" for piece in was) and bool(now)
    return in_words and same_roles and all(piece.role in ("assistant", "tool") for piece in now)


def _without_head(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.role != "head"]


def _is_silent(piece: Piece) -> bool:
    return piece.turn is not None and not piece.turn.said.text and not piece.turn.said.calls


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)
