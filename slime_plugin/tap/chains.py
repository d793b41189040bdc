"""Turns that continue each other.

A *chain* is a run of turns each of which was sampled in continuation of the one before: one context that only grew.
Where a turn was continued in several ways, its chain goes on with the first of them that the client made anything of,
in the thread of the turn. The other ways are chains of their own: a turn that was asked for again, a question that was
put aside, an agent that begins with what its parent knows, or the context as it was after the client had rewritten it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_plugin.tap.contexts import Contexts, Node
from slime_plugin.tap.pieces import Turn


@dataclass(eq=False)
class Chain:
    """Turns that were sampled in one context that only grew."""

    turns: list[Turn]
    forked: Turn | None = None
    """The turn that it continues in another way than the chain of that turn does."""

    @property
    def first(self) -> int:
        return self.turns[0].number

    @property
    def last(self) -> int:
        return self.turns[-1].number


@dataclass(eq=False)
class Chains:
    """The turns of a session, and how they hang together."""

    contexts: Contexts
    turns: list[Turn] = field(init=False)
    """In the order in which they were asked for."""
    chains: list[Chain] = field(init=False)
    """In the order of their first turns."""
    _ways: dict[str, list[Turn]] = field(default_factory=dict)  # what continues a turn
    _holders: dict[str, list[Turn]] = field(default_factory=dict)  # the turns whose prompt holds a turn

    def __post_init__(self) -> None:
        self.turns = sorted(self.contexts.turns, key=lambda turn: turn.number)
        before = {turn.id: self._continued(turn) for turn in self.turns}
        for turn in self.turns:
            previous = before[turn.id]
            if previous is not None:
                self._ways.setdefault(previous.id, []).append(turn)
            for other in self.held(turn):
                self._holders.setdefault(other.id, []).append(turn)
        own = {
            turn.id: [way for way in self._ways.get(turn.id, ()) if way.thread == turn.thread] for turn in self.turns
        }
        follows = {id: self._followed(ways) for id, ways in own.items() if ways}
        open_ends: dict[str, Chain] = {}  # by their last turn
        self.chains = []
        for turn in self.turns:
            previous = before[turn.id]
            goes_on = previous is not None and follows.get(previous.id) is turn
            chain = open_ends.pop(previous.id) if goes_on and previous is not None else Chain([], previous)
            if not chain.turns:
                self.chains.append(chain)
            chain.turns.append(turn)
            open_ends[turn.id] = chain

    def own_node(self, turn: Turn) -> Node:
        """Where it was sampled."""
        return self.contexts.nodes[turn.at].children[f"turn {turn.id}"]

    def held(self, turn: Turn) -> list[Turn]:
        """The turns that its prompt holds."""
        return [piece.turn for piece in self.contexts.nodes[turn.at].pieces() if piece.turn is not None]

    def last_use(self, turn: Turn) -> int:
        """The number of the last turn that was sampled with this one in sight; its own if there is none."""
        return max((other.number for other in self._holders.get(turn.id, ())), default=turn.number)

    def is_retried(self, chain: Chain) -> bool:
        """Its only turn was sampled once more in the very same context, and the client went on with the other."""
        only = chain.turns[0]
        beside = [node.piece.turn for node in self.contexts.nodes[only.at].children.values() if node.piece is not None]
        others = [turn for turn in beside if turn is not None and turn.at == only.at and turn.thread == only.thread]
        best = max(others, key=lambda turn: (self.last_use(turn), turn.number))
        return len(chain.turns) == 1 and best is not only

    def replaces(self, chain: Chain) -> bool:
        """Whether a chain that forked is the context as it was rewritten, and not something on the side: it holds what
        was said after the fork, in whatever words, goes on for longer than an aside does, or is held elsewhere."""
        first, fork = chain.turns[0], chain.forked
        assert fork is not None
        others = {id for way in self._ways[fork.id] if way is not first for id in self._growth(way)}
        path = self.contexts.nodes[first.at].path()
        since = path[path.index(self.own_node(fork)) + 1 :]
        before = [way for way in self._ways[fork.id] if way.number < first.number]
        silent = all(not way.said.text and not way.said.calls for way in before)  # clients leave such turns out
        spoken = any(node.piece is not None and node.piece.role == "assistant" for node in since)
        held = any(turn.id in others for turn in self.held(first))
        used = any(user not in chain.turns for user in self._holders.get(first.id, ()))
        return bool(before) and (held or spoken or used or silent or len(chain.turns) > 1 or bool(first.said.calls))

    def _continued(self, turn: Turn) -> Turn | None:
        """The last turn of its thread that was sampled on the way to where this one was. An agent that begins with what
        its parent knows does not continue that."""
        node: Node | None = self.contexts.nodes[turn.at]
        while node is not None and node.piece is not None:
            other = node.piece.turn
            if other is not None and other.thread == turn.thread and node is self.own_node(other):
                return other
            node = node.parent
        return None

    def _followed(self, ways: list[Turn]) -> Turn:
        for i, way in enumerate(ways):
            if not self._is_aside(way, ways[i + 1 :]):
                return way
        return ways[-1]

    def _is_aside(self, way: Turn, later: list[Turn]) -> bool:
        """The client made nothing of it: no other context holds it, and the turn was continued in another way later."""
        grown = self._growth(way)
        if not later or any(user.id not in grown for id in grown for user in self._holders.get(id, ())):
            return False
        if any(other.at == way.at and self.last_use(other) > self.last_use(way) for other in later):
            return True
        reworded = any(self._stands_in(way, other) for other in later)
        return len(grown) == 1 and bool(way.said.text) and not way.said.calls and not reworded

    def _stands_in(self, way: Turn, later: Turn) -> bool:
        """Where a turn was said, the context of a later one has other words of the assistant's."""
        path = self.contexts.nodes[later.at].path()
        place = next((i for i, node in enumerate(path) if node.id == way.at), len(path))
        after = path[place + 1].piece if place + 1 < len(path) else None
        return after is not None and after.role == "assistant"

    def _growth(self, turn: Turn) -> set[str]:
        """A turn and all that continues it."""
        grown: set[str] = set()
        todo = [turn]
        while todo:
            turn = todo.pop()
            grown.add(turn.id)
            todo += self._ways.get(turn.id, [])
        return grown
