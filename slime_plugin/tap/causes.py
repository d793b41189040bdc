"""Why a context does not go on where the one before it ended.

Two contexts of one conversation are compared piece by piece. What was put behind the older one is growth, not a break;
of everything else the roles say what happened:

=================  ====================================================================================================
``compaction``     turns or tool results left, and text stands in their place, or the turn that sums them up
``prune``          tool results were replaced by other text, or left without anything in their place
``template_strip``  the thoughts of earlier turns were taken out
``drift``          a turn came back as something that does not mean the same, or the system message or tools changed
``unknown``        anything else
=================  ====================================================================================================

Three more causes are not breaks of one conversation: ``subagent`` and ``auxiliary``, where another one goes on, and
``retry``, where a turn was sampled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from slime_plugin.tap.pieces import Piece

Cause = Literal["compaction", "prune", "template_strip", "drift", "subagent", "auxiliary", "retry", "unknown"]

EDIT_KINDS: dict[Cause, str] = {
    "compaction": "compact",
    "prune": "prune",
    "template_strip": "prune",
    "drift": "unknown",
    "subagent": "switch",
    "auxiliary": "switch",
    "retry": "switch",
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
    was, now = _comparable(before, after)
    changes = [op for op in SequenceMatcher(None, was, now, autojunk=False).get_opcodes() if op[0] != "equal"]
    if changes and changes[-1][2] == len(before):  # what is beyond the end of the older one is growth
        tag, a, b, c, d = changes.pop()
        if a < b:
            changes.append((tag, a, b, c, min(d, c + b - a)))
    removed = [piece for _, start, stop, _, _ in changes for piece in before[start:stop]]
    inserted = [piece for _, _, _, start, stop in changes for piece in after[start:stop]]
    pairs = [(before[a:b], after[c:d]) for _, a, b, c, d in changes]
    cause: Cause = "compaction" if stands_for_the_rest(before, after) else _cause(pairs, removed, inserted)
    return Break(cause, _tokens(removed), _tokens(inserted))


def _comparable(before: Sequence[Piece], after: Sequence[Piece]) -> tuple[list[Hashable], list[Hashable]]:
    """What the pieces are compared by. Finding out which of many equal pieces is which takes cubic time: then the
    first is the first, and so on."""
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


def _cause(pairs: list[tuple[Sequence[Piece], Sequence[Piece]]], gone: list[Piece], new: list[Piece]) -> Cause:
    heads = [piece for piece in (*gone, *new) if piece.role == "head"]
    gone, new = ([piece for piece in side if piece.role != "head"] for side in (gone, new))
    if not gone and not new:
        return "drift" if heads else "unknown"
    if new and all(piece.turn is not None and not piece.thought for piece in new) and len(new) == len(gone):
        return "template_strip"
    if all(piece.role == "tool" for piece in gone) and all(piece.role == "tool" for piece in new) and gone:
        return "prune"
    if all(_drifted(was, now) for was, now in pairs):
        return "drift"
    said = [piece for piece in gone if piece.turn is not None or piece.role in ("tool", "assistant")]
    if said:
        return "compaction" if new else "prune"
    return "unknown"


def _drifted(was: Sequence[Piece], now: Sequence[Piece]) -> bool:
    """A turn stands there in other words, with its results perhaps; or a turn that said nothing was left out."""
    was, now = ([piece for piece in side if piece.role != "head"] for side in (was, now))
    turns = [piece for piece in was if piece.turn is not None]
    if not now:
        return bool(turns) and all(
            not piece.turn.said.text and not piece.turn.said.calls for piece in was if piece.turn
        )
    same_roles = [piece.role for piece in was] == [piece.role for piece in now][: len(was)]
    return bool(turns) and same_roles and all(piece.role in ("assistant", "tool") for piece in now)


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)
