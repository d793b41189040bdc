"""All contexts of a session as one tree of pieces: a request is a path in it.

A request that only appends to an earlier one ends a few nodes below it. Only what is new in it is rendered and looked
up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slime_plugin.bridge.chat.base import Chat
from slime_plugin.tap.dialects.conversation import REMEMBERED
from slime_plugin.tap.messages import Part, Payload, Reply, Result, Text, ToolSpec
from slime_plugin.tap.pieces import Piece, Renderer, Turn, meaning


@dataclass(slots=True, eq=False)
class Node:
    """A context: the pieces on the way to it."""

    id: int
    parent: Node | None
    piece: Piece | None
    """None for the root."""
    length: int = 0
    """Tokens on the way to it."""
    children: dict[str, Node] = field(default_factory=dict)
    """By the key of their piece."""

    def path(self) -> list[Node]:
        """From the first piece to this."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def pieces(self) -> list[Piece]:
        return [node.piece for node in self.path() if node.piece is not None]

    def last_turn(self) -> Turn | None:
        """On the way to it, and itself included."""
        node: Node | None = self
        while node is not None and (node.piece is None or node.piece.turn is None):
            node = node.parent
        return None if node is None or node.piece is None else node.piece.turn

    def tokens(self) -> list[int]:
        return _tokens(self.pieces())


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A request that has its place."""

    begins: tuple[str, tuple[ToolSpec, ...]]
    """Its system message and its tools."""
    top: Node
    """Of its head."""
    parts: list[Part]
    thoughts: int
    """Replies from here on have their thoughts."""
    nodes: list[Node]
    """Of its parts."""

    def same(self, top: Node | None, parts: list[Part], thoughts: int) -> int:
        """How many parts at the beginning have the same nodes for sure: they are the very same objects."""
        if self.top is not top:
            return 0
        most = len(self.parts) if self.thoughts == thoughts else min(self.thoughts, thoughts)
        return min(most, self.common(parts))

    def common(self, parts: list[Part]) -> int:
        """How many parts at the beginning are the very same objects."""
        pairs = enumerate(zip(self.parts, parts, strict=False))  # one may be longer than the other
        return next((i for i, (one, other) in pairs if one is not other), min(len(self.parts), len(parts)))


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The context of a request, before it has its place."""

    begins: tuple[str, tuple[ToolSpec, ...]]
    """Its system message and its tools."""
    head: Piece | None
    parts: list[Part]
    thoughts: int
    extends: _Placed | None
    """The earlier request that it has the longest beginning in common with."""
    nodes: list[Node]
    """Of the first of its parts, which are there already."""
    fresh: list[Piece] = field(default_factory=list)
    """Of the others."""

    @property
    def length(self) -> int:
        """Tokens."""
        head = 0 if self.head is None else len(self.head.tokens)
        known = self.nodes[-1].length if self.nodes else head
        return known + sum(len(piece.tokens) for piece in self.fresh)

    def pieces(self) -> list[Piece]:
        begun = self.nodes[-1].pieces() if self.nodes else [] if self.head is None else [self.head]
        return [*begun, *self.fresh]

    def tokens(self) -> list[int]:
        return _tokens(self.pieces())


class Contexts:
    """The tree, and what the policy said in it."""

    def __init__(self, chat: Chat, *, keep_thoughts: bool = True) -> None:
        self.renderer = Renderer(chat)
        self.root = Node(0, None, None)
        self.nodes = [self.root]
        self.turns: list[Turn] = []
        self._keep_thoughts = keep_thoughts
        self._meant: dict[str, list[Turn]] = {}
        self._by_id: dict[str, Turn] = {}
        self._sampled_at: dict[int, list[Turn]] = {}
        self._placed: deque[_Placed] = deque(maxlen=REMEMBERED)

    def news(self, payload: Payload) -> int:
        """How much of a request has to be tokenised, in characters, if not less."""
        system, rest = _split(payload)
        known = any(placed.begins == (system, payload.tools) for placed in self._placed)
        same = max((placed.common(rest) for placed in self._placed), default=0)
        return sum(part.size for part in rest[same:]) + (0 if known else payload.size)

    def find(self, payload: Payload, thread: str | None = None) -> Found:
        """The context of a request. Nothing of it is kept: it may be too long, or only be counted. Where two threads
        have said the same in the same place, it matters which of them asks."""
        system, rest = _split(payload)
        head = self.renderer.head(system, payload.tools)
        thoughts = 0 if self._keep_thoughts else _last_question(rest) + 1
        top = self.root if head is None else self.root.children.get(head.key)
        extends, same = self._placed_before(top, rest, thoughts)
        known = [] if extends is None else extends.nodes[:same]
        found = Found((system, payload.tools), head, rest, thoughts, extends, known)
        node = found.nodes[-1] if found.nodes else top
        for i, part in enumerate(rest[same:], same):
            if isinstance(part, Text):
                piece = self.renderer.text(part)
            elif isinstance(part, Result):
                piece = self.renderer.result(part)
            else:
                piece = self._came_back(part, node, thread, thought=i >= thoughts)
            node = None if node is None else node.children.get(piece.key)
            if node is None:
                found.fresh.append(piece)
            else:
                found.nodes.append(node)
        return found

    def place(self, found: Found) -> Node:
        """The node of a context. Pieces that were not there are there now."""
        top = self.root if found.head is None else self.add(self.root, found.head)
        nodes = list(found.nodes)
        for piece in found.fresh:
            nodes.append(self.add(nodes[-1] if nodes else top, piece))
        if found.extends is not None and found.extends in self._placed:
            self._placed.remove(found.extends)
        self._placed.append(_Placed(found.begins, top, found.parts, found.thoughts, nodes))
        return nodes[-1] if nodes else top

    def _placed_before(self, top: Node | None, parts: list[Part], thoughts: int) -> tuple[_Placed | None, int]:
        """The earlier request that has the longest beginning in common with these parts, and how many that are."""
        found, longest = None, 0
        for placed in self._placed:
            same = placed.same(top, parts, thoughts)
            if same > longest:
                found, longest = placed, same
        return found, longest

    def add(self, parent: Node, piece: Piece) -> Node:
        node = parent.children.get(piece.key)
        if node is None:
            node = Node(len(self.nodes), parent, piece, parent.length + len(piece.tokens))
            parent.children[piece.key] = node
            self.nodes.append(node)
            self.renderer.keep(piece)
        return node

    def add_turn(self, turn: Turn) -> Node:
        """What was sampled under the context of a node."""
        self.turns.append(turn)
        self._by_id[turn.id] = turn
        self._sampled_at.setdefault(turn.at, []).append(turn)
        self._meant.setdefault(meaning(turn.said.text, turn.said.calls), []).append(turn)
        return self.add(self.nodes[turn.at], self.renderer.turn(turn))

    def asked_at(self, found: Found) -> int:
        """How often the policy has spoken in this very context."""
        at = found.nodes[-1].id if found.nodes and not found.fresh else -1
        return len(self._sampled_at.get(at, ()))

    def turn(self, id: str) -> Turn | None:
        return self._by_id.get(id)

    def _came_back(self, reply: Reply, node: Node | None, thread: str | None, *, thought: bool) -> Piece:
        turn = self._find(reply, node, thread)
        if turn is None:
            return self.renderer.reply(reply)
        came = self.renderer.turn(turn, thought=thought)
        if node is not None and node.children and turn.at != node.id and came.key not in node.children:
            made_up = self.renderer.reply(reply)  # by the client, before the policy came to say the same
            return made_up if made_up.key in node.children else came
        return came

    def _find(self, reply: Reply, node: Node | None, thread: str | None) -> Turn | None:
        """The turn that a message is. Of several that mean the same: one that was sampled here, in this thread; that
        the client names; that it has gone on with here before, or that was taken for it here before; that was said to
        the same words, after the same turn; and of these the last."""
        if node is not None:  # the usual case, without looking for a meaning
            equal = [turn for turn in self._sampled_at.get(node.id, ()) if _equal(reply, turn)]
            if len(equal) == 1:
                return equal[0]
        try:
            same = self._meant.get(meaning(reply.text, reply.calls), [])
        except (ValueError, TypeError, RecursionError):  # what no policy of ours can have said
            return None
        if reply.thought is not None:
            words = reply.thought.split()
            same = [turn for turn in same if (turn.said.thought or "").split() == words]
        if len(same) < 2 or node is None:
            return same[-1] if same else None
        named = {reply.signature, *(call.id.removeprefix("call_").rpartition("_")[0] for call in reply.calls)}
        children = {child.piece.turn: child for child in node.children.values() if child.piece is not None}

        def fits(turn: Turn) -> tuple[int | bool, ...]:
            child, own = children.get(turn), self.nodes[turn.at]
            return (
                turn.at == node.id,
                turn.at == node.id and turn.thread == thread,
                turn.id in named,
                child is not None and bool(child.children),
                child is not None,
                own.piece is not None and node.piece is not None and own.piece.key == node.piece.key,
                own.last_turn() is node.last_turn(),
                turn.number,
            )

        return max(same, key=fits)

    def rendered_again(self) -> list[tuple[int, ...]]:
        """Tokens of the messages of the assistant's that no turn was found for."""
        found = [node.piece for node in self.nodes if node.piece is not None and node.piece.role == "assistant"]
        return list({piece.key: piece.tokens for piece in found if piece.turn is None}.values())


def _tokens(pieces: list[Piece]) -> list[int]:
    tokens: list[int] = []
    for piece in pieces:
        tokens.extend(piece.tokens)
    return tokens


def _split(payload: Payload) -> tuple[str, list[Part]]:
    """The system message, which is empty if there is none, and the rest."""
    first, *rest = payload.parts or (Text("system", ""),)
    if isinstance(first, Text) and first.role == "system":
        return first.text, rest
    return "", [first, *rest]


def _last_question(parts: list[Part]) -> int:
    questions = (i for i in reversed(range(len(parts))) if isinstance(part := parts[i], Text) and part.role == "user")
    return next(questions, -1)


def _equal(reply: Reply, turn: Turn) -> bool:
    """To the letter, but for a thought that was left out and the ids of calls."""
    said = turn.said
    return (
        reply.text.strip() == said.text
        and (reply.thought is None or reply.thought.strip() == said.thought)
        and [(call.name, call.arguments) for call in reply.calls] == [(c.name, c.arguments) for c in said.calls]
    )
