"""Chains of turns that continue each other.

A *chain* is a run of turns each of which was sampled in continuation of the one before: one context that only grew.
Where a turn was continued several times, its chain follows the first continuation that the client used. The others are
chains of their own: a retried turn, a side request, a subagent that starts with its parent's context, or the context
after the client had rewritten it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from slime_plugin.tap.blocks import Turn
from slime_plugin.tap.context_tree import ContextTree, Node


@dataclass(eq=False)
class TurnChain:
    """Turns that were sampled in one context that only grew."""

    turns: list[Turn]
    forked: Turn | None = None
    """The turn that it branches off from, where the chain of that turn continues differently."""

    @property
    def first(self) -> int:
        return self.turns[0].number

    @property
    def last(self) -> int:
        return self.turns[-1].number


class TurnChains:
    """The turns of a session, joined into chains."""

    def __init__(self, contexts: ContextTree) -> None:
        self.contexts = contexts
        self.turns = sorted(contexts.turns, key=lambda turn: turn.number)
        """In request order."""
        self._continuations: dict[str, list[Turn]] = defaultdict(list)
        self._users: dict[str, list[Turn]] = defaultdict(list)  # the turns whose prompt shows a turn
        previous = {turn.id: self._previous(turn) for turn in self.turns}
        for turn in self.turns:
            if (before := previous[turn.id]) is not None:
                self._continuations[before.id].append(turn)
            for shown in self.shown_to(turn):
                self._users[shown.id].append(turn)
        self.chains = self._join(previous)
        """In the order of their first turns."""

    def own_node(self, turn: Turn) -> Node:
        """Return the node of a turn where it was sampled."""
        return self.contexts.nodes[turn.at].children[f"turn {turn.id}"]

    def shown_to(self, turn: Turn) -> list[Turn]:
        """Return the turns in the prompt of a turn."""
        return [block.turn for block in self.contexts.nodes[turn.at].blocks() if block.turn is not None]

    def is_retried(self, chain: TurnChain) -> bool:
        """Whether its only turn was sampled once more in the same context, and the client used the other."""
        only = chain.turns[0]
        siblings = [
            node.block.turn for node in self.contexts.nodes[only.at].children.values() if node.block is not None
        ]
        samples = [turn for turn in siblings if turn is not None and turn.at == only.at and turn.thread == only.thread]
        best = max(samples, key=lambda turn: (self._last_use(turn), turn.number))
        return len(chain.turns) == 1 and best is not only

    def replaces(self, chain: TurnChain) -> bool:
        """Whether a chain that forked is the same conversation with its context rewritten, and not a side request."""
        first, fork = chain.turns[0], chain.forked
        assert fork is not None
        earlier = [turn for turn in self._continuations[fork.id] if turn.number < first.number]
        if not earlier:
            return False
        return (
            self.shows_replies_after(first, fork)
            or self.is_used_outside(chain)
            or all(map(is_silent, earlier))
            or len(chain.turns) > 1
            or bool(first.content.calls)
        )

    def shows_replies_after(self, turn: Turn, fork: Turn) -> bool:
        """Whether its prompt has assistant messages after the fork, which may match no turn."""
        path = self.contexts.nodes[turn.at].path()
        since = path[path.index(self.own_node(fork)) + 1 :]
        return any(node.block is not None and node.block.role == "assistant" for node in since)

    def is_used_outside(self, chain: TurnChain) -> bool:
        return any(user not in chain.turns for user in self._users[chain.turns[0].id])

    def _join(self, previous: dict[str, Turn | None]) -> list[TurnChain]:
        followed_by = {turn.id: self._followed(turn) for turn in self.turns}
        chains: list[TurnChain] = []
        open_ends: dict[str, TurnChain] = {}  # by their last turn
        for turn in self.turns:
            before = previous[turn.id]
            if before is not None and followed_by[before.id] is turn:
                chain = open_ends.pop(before.id)
            else:
                chains.append(chain := TurnChain([], before))
            chain.turns.append(turn)
            open_ends[turn.id] = chain
        return chains

    def _previous(self, turn: Turn) -> Turn | None:
        """Return the last turn of its thread on the path to it, where that was sampled. A subagent that starts with its
        parent's context does not continue the parent."""
        node: Node | None = self.contexts.nodes[turn.at]
        while node is not None and node.block is not None:
            other = node.block.turn
            if other is not None and other.thread == turn.thread and node is self.own_node(other):
                return other
            node = node.parent
        return None

    def _followed(self, turn: Turn) -> Turn | None:
        """Return the continuation that its chain follows."""
        others = self._continuations[turn.id]
        used = (other for i, other in enumerate(others) if not self.is_unused(other, others[i + 1 :]))
        return next(used, others[-1] if others else None)

    def is_unused(self, turn: Turn, later: Sequence[Turn]) -> bool:
        """Whether the client did not use a continuation: no other context shows it, and a later one took over."""
        branch = self._descendants(turn)
        if not later or any(user.id not in branch for id in branch for user in self._users[id]):
            return False
        if any(other.at == turn.at and self._last_use(other) > self._last_use(turn) for other in later):
            return True
        is_text = bool(turn.content.text) and not turn.content.calls
        return len(branch) == 1 and is_text and not any(self.has_reply_in_place_of(turn, other) for other in later)

    def has_reply_in_place_of(self, turn: Turn, later: Turn) -> bool:
        """Whether the prompt of a later turn has another assistant message where a turn was sampled."""
        path = self.contexts.nodes[later.at].path()
        index = next((i for i, node in enumerate(path) if node.id == turn.at), len(path))
        after = path[index + 1].block if index + 1 < len(path) else None
        return after is not None and after.role == "assistant"

    def _last_use(self, turn: Turn) -> int:
        """Return the number of the last turn whose prompt shows this turn; its own if there is none."""
        return max((user.number for user in self._users[turn.id]), default=turn.number)

    def _descendants(self, turn: Turn) -> set[str]:
        """Return the ids of a turn and of all turns that continue it."""
        found: set[str] = set()
        todo = [turn]
        while todo:
            turn = todo.pop()
            found.add(turn.id)
            todo += self._continuations[turn.id]
        return found


def is_silent(turn: Turn) -> bool:
    """Whether a turn has neither text nor calls: clients omit such turns."""
    return not turn.content.text and not turn.content.calls
