"""Why the context of a conversation was rewritten.

Two contexts are compared block by block. What was appended to the older one is growth, not a break; for everything else
the roles of the blocks tell the cause:

=================  ====================================================================================================
``compaction``     turns were removed; or tool results were, and text that is not a tool result replaces them
``prune``          tool results were replaced by other text, or removed without replacement
``template_strip``  the thoughts of earlier turns were removed
``drift``          a turn came back with another meaning, or the system message or tools changed
``unknown``        anything else
=================  ====================================================================================================

Two more causes are switches to another conversation: ``subagent`` and ``auxiliary``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from slime_plugin.recovery.turn_chains import is_silent
from slime_plugin.tap.blocks import Block

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
"""The kind of edit in the record."""

MAX_PAIRS = 50_000
"""Number of pairs of equal blocks above which they are aligned in order. Usually there are as many as blocks."""


@dataclass(frozen=True, slots=True)
class Break:
    """A rewrite of the context of a conversation."""

    cause: Cause
    removed: int
    """In tokens."""
    inserted: int
    """In tokens, without what was appended at the end."""


def explain(before: Sequence[Block], after: Sequence[Block]) -> Break:
    """Compare a context up to its last turn (``before``) with the prompt of the next (``after``)."""
    common = _common_turns(before, after)
    spans = list(_differences(before, after, common))
    if spans and spans[-1][1] == len(before):  # what is beyond the end of ``before`` is growth
        a, b, c, d = spans.pop()
        if a < b:
            spans.append((a, b, c, min(d, c + b - a)))
    changes = [(before[a:b], after[c:d]) for a, b, c, d in spans]
    growth = [len(after[j].tokens) - len(before[i].tokens) for i, j in common]  # of turns, by a thought
    return Break(
        _cause(changes, stripped=any(growth)),
        sum(_tokens(old) for old, _ in changes) - sum(tokens for tokens in growth if tokens < 0),
        sum(_tokens(new) for _, new in changes) + sum(tokens for tokens in growth if tokens > 0),
    )


def _common_turns(before: Sequence[Block], after: Sequence[Block]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence of turns."""
    index = {block.turn.id: i for i, block in enumerate(after) if block.turn is not None}
    ends: list[int] = []  # the smallest index in ``after`` that a subsequence of each length ends with
    longest: list[list[tuple[int, int]]] = []
    for i, block in enumerate(before):
        j = None if block.turn is None else index.get(block.turn.id)
        if j is not None:
            length = bisect_left(ends, j)
            pairs = [*(longest[length - 1] if length else ()), (i, j)]
            ends[length : length + 1], longest[length : length + 1] = [j], [pairs]
    return longest[-1] if longest else []


def _differences(
    before: Sequence[Block], after: Sequence[Block], common: list[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield index ranges that differ. Only blocks between the same two common turns are compared."""
    start = begin = 0
    for stop, end in [*common, (len(before), len(after))]:
        was, now = _comparable(before[start:stop], after[begin:end])
        for tag, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
            if tag != "equal":
                yield start + a, start + b, begin + c, begin + d
        start, begin = stop + 1, end + 1


def _comparable(before: Sequence[Block], after: Sequence[Block]) -> tuple[list[Hashable], list[Hashable]]:
    """Return the keys that blocks are compared by, numbered if many are equal: aligning those takes cubic time."""
    sides: list[list[Hashable]] = [[block.key for block in side] for side in (before, after)]
    was, now = (Counter(side) for side in sides)
    if sum(number * now[key] for key, number in was.items()) > MAX_PAIRS:
        for side in sides:
            seen: Counter[Hashable] = Counter()
            for i, key in enumerate(side):
                side[i] = (key, seen[key])
                seen[key] += 1
    return sides[0], sides[1]


def is_returned_summary(before: Sequence[Block], after: Sequence[Block]) -> bool:
    """Whether the last turn of a context is a summary that came back as that turn: without the message that asked for
    it, after the beginning of the context, and in place of turns."""
    if len(before) < 2 or before[-1].turn is None or before[-2].role != "user":
        return False
    index = next((i for i, block in enumerate(after) if block.turn is before[-1].turn), 0)
    kept = [block.key for block in before[:index]]
    between = before[index:-2]
    return (
        0 < index < len(before) - 2
        and kept == [block.key for block in after[:index]]
        and any(block.turn is not None for block in between)
    )


def _cause(changes: list[tuple[Sequence[Block], Sequence[Block]]], *, stripped: bool) -> Cause:
    messages = [(_without_head(old), _without_head(new)) for old, new in changes]
    # Clients omit turns without content.
    messages = [(old, new) for old, new in messages if (old or new) and not (old and all(map(_is_silent_turn, old)))]
    removed, inserted = ([block for change in messages for block in change[side]] for side in (0, 1))
    if not messages:
        is_changed = any(old or new for old, new in changes)
        return "drift" if is_changed else "template_strip" if stripped else "unknown"
    if removed and all(block.role == "tool" for block in (*removed, *inserted)):
        return "prune"
    if all(_is_reworded(old, new) for old, new in messages):
        return "drift"
    if any(block.turn is not None for block in removed):
        return "compaction"
    if any(block.role in ("tool", "assistant") for block in removed):
        return "compaction" if inserted else "prune"
    return "unknown"


def _is_reworded(old: Sequence[Block], new: Sequence[Block]) -> bool:
    """Whether an assistant message was reworded, perhaps with its results."""
    same_roles = [block.role for block in old] == [block.role for block in new][: len(old)]
    has_reply = any(block.role == "assistant" for block in old) and bool(new)
    return has_reply and same_roles and all(block.role in ("assistant", "tool") for block in new)


def _without_head(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if block.role != "head"]


def _is_silent_turn(block: Block) -> bool:
    return block.turn is not None and is_silent(block.turn)


def _tokens(blocks: Sequence[Block]) -> int:
    return sum(len(block.tokens) for block in blocks)
