"""All contexts of a session as one tree of blocks: a prompt is a path from the root.

A request that only appends to an earlier one ends a few nodes below it. Only its new part is rendered and looked up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slime_plugin.rollout.chat.chat import Chat
from slime_plugin.tap.blocks import Block, Renderer, Turn, meaning
from slime_plugin.tap.payload import Part, Payload, Reply, Text, ToolResult, ToolSpec
from slime_plugin.tap.wire.parts_builder import CACHED_CONVERSATIONS


@dataclass(slots=True, eq=False)
class Node:
    """A context: the blocks from the root to here."""

    id: int
    parent: Node | None
    block: Block | None
    """None for the root."""
    length: int = 0
    """Tokens from the root to here."""
    children: dict[str, Node] = field(default_factory=dict)
    """By the key of their block."""

    def path(self) -> list[Node]:
        """From the first block to this node."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def blocks(self) -> list[Block]:
        return [node.block for node in self.path() if node.block is not None]

    def last_turn(self) -> Turn | None:
        """Return the last turn on the path to this node, which is included."""
        node: Node | None = self
        while node is not None and (node.block is None or node.block.turn is None):
            node = node.parent
        return None if node is None or node.block is None else node.block.turn

    def tokens(self) -> list[int]:
        return _tokens(self.blocks())


Opening = tuple[str, tuple[ToolSpec, ...]]
"""System message, which may be empty, and tools."""


@dataclass(frozen=True, slots=True, eq=False)
class _InsertedPrompt:
    """The prompt of an earlier request, with its nodes."""

    opening: Opening
    head: Node
    """Node of the opening; the root if that is empty."""
    parts: list[Part]
    thoughts_from: int
    """Index of the first part whose thought is shown."""
    nodes: list[Node]
    """Nodes of the parts."""

    def same_nodes(self, head: Node | None, parts: list[Part], thoughts_from: int) -> int:
        """Return how many leading parts are known to have the same nodes."""
        if self.head is not head:
            return 0
        same_thoughts = self.thoughts_from == thoughts_from
        return min(self.same_parts(parts), len(parts) if same_thoughts else min(self.thoughts_from, thoughts_from))

    def same_parts(self, parts: list[Part]) -> int:
        """Return how many leading parts are the same objects: the parse cache returns known parts unchanged."""
        pairs = enumerate(zip(self.parts, parts, strict=False))  # one may be longer than the other
        return next((i for i, (one, other) in pairs if one is not other), min(len(self.parts), len(parts)))


@dataclass(frozen=True, slots=True, eq=False)
class PromptMatch:
    """The context of a request, before it is inserted."""

    opening: Opening
    head: Block | None
    parts: list[Part]
    thoughts_from: int
    extends: _InsertedPrompt | None
    """The earlier prompt with the longest common prefix."""
    nodes: list[Node]
    """Nodes of the leading parts that are in the tree already."""
    new_blocks: list[Block] = field(default_factory=list)
    """Blocks of the other parts."""

    @property
    def length(self) -> int:
        """In tokens."""
        head = 0 if self.head is None else len(self.head.tokens)
        known = self.nodes[-1].length if self.nodes else head
        return known + sum(len(block.tokens) for block in self.new_blocks)

    def blocks(self) -> list[Block]:
        known = self.nodes[-1].blocks() if self.nodes else [] if self.head is None else [self.head]
        return [*known, *self.new_blocks]

    def tokens(self) -> list[int]:
        return _tokens(self.blocks())


class _Rank(NamedTuple):
    """How well a turn fits a message at a node, the most important reason first."""

    sampled_here: bool
    sampled_here_in_thread: bool
    named_by_client: bool
    continued_here: bool
    """An earlier prompt continued it at this node."""
    used_here: bool
    """An earlier message at this node was matched with it."""
    same_question: bool
    """It was sampled after the same block."""
    same_previous_turn: bool
    number: int


class ContextTree:
    """The tree, and the turns in it."""

    def __init__(self, chat: Chat, *, keep_thoughts: bool = True) -> None:
        self.renderer = Renderer(chat)
        self.root = Node(0, None, None)
        self.nodes = [self.root]
        self.turns: list[Turn] = []
        self._keep_thoughts = keep_thoughts
        self._by_meaning: dict[str, list[Turn]] = {}
        self._by_id: dict[str, Turn] = {}
        self._by_node: dict[int, list[Turn]] = {}
        self._prompts: deque[_InsertedPrompt] = deque(maxlen=CACHED_CONVERSATIONS)

    def new_chars(self, payload: Payload) -> int:
        """Return an upper bound of the characters that have to be tokenized."""
        system, rest = _split_system(payload)
        known = any(prompt.opening == (system, payload.tools) for prompt in self._prompts)
        same = max((prompt.same_parts(rest) for prompt in self._prompts), default=0)
        return sum(part.size for part in rest[same:]) + (0 if known else payload.size)

    def match(self, payload: Payload, thread: str | None = None) -> PromptMatch:
        """Find the context of a request. Does not insert it: the request may be too long, or only ask for a count.

        Where two threads sampled the same text at one node, ``thread`` decides between them.
        """
        system, rest = _split_system(payload)
        head = self.renderer.head(system, payload.tools)
        thoughts_from = 0 if self._keep_thoughts else _last_question(rest) + 1
        node = self.root if head is None else self.root.children.get(head.key)
        same = [prompt.same_nodes(node, rest, thoughts_from) for prompt in self._prompts]
        longest = max(same, default=0)
        extends = self._prompts[same.index(longest)] if longest else None
        known = [] if extends is None else extends.nodes[:longest]
        match = PromptMatch((system, payload.tools), head, rest, thoughts_from, extends, known)
        node = known[-1] if known else node
        for i, part in enumerate(rest[longest:], longest):
            if isinstance(part, Text):
                block = self.renderer.text(part)
            elif isinstance(part, ToolResult):
                block = self.renderer.result(part)
            else:
                block = self._reply_block(part, node, thread, thought=i >= thoughts_from)
            node = None if node is None else node.children.get(block.key)
            if node is None:
                match.new_blocks.append(block)
            else:
                match.nodes.append(node)
        return match

    def insert(self, match: PromptMatch) -> Node:
        """Add the new blocks of a prompt; return its last node."""
        head = self.root if match.head is None else self.add(self.root, match.head)
        nodes = list(match.nodes)
        for block in match.new_blocks:
            nodes.append(self.add(nodes[-1] if nodes else head, block))
        if match.extends is not None and match.extends in self._prompts:
            self._prompts.remove(match.extends)
        self._prompts.append(_InsertedPrompt(match.opening, head, match.parts, match.thoughts_from, nodes))
        return nodes[-1] if nodes else head

    def add(self, parent: Node, block: Block) -> Node:
        node = parent.children.get(block.key)
        if node is None:
            node = Node(len(self.nodes), parent, block, parent.length + len(block.tokens))
            parent.children[block.key] = node
            self.nodes.append(node)
            self.renderer.keep(block)
        return node

    def add_turn(self, turn: Turn) -> Node:
        """Add a sampled turn below the last node of its prompt."""
        self.turns.append(turn)
        self._by_id[turn.id] = turn
        self._by_node.setdefault(turn.at, []).append(turn)
        self._by_meaning.setdefault(meaning(turn.content.text, turn.content.calls), []).append(turn)
        return self.add(self.nodes[turn.at], self.renderer.turn(turn))

    def turns_sampled_at(self, match: PromptMatch) -> int:
        """Return how many turns were sampled in exactly this context."""
        at = match.nodes[-1].id if match.nodes and not match.new_blocks else -1
        return len(self._by_node.get(at, ()))

    def turn(self, id: str) -> Turn | None:
        return self._by_id.get(id)

    def unmatched_replies(self) -> list[tuple[int, ...]]:
        """Tokens of the assistant messages that match no turn."""
        blocks = [node.block for node in self.nodes if node.block is not None and node.block.role == "assistant"]
        return list({block.key: block.tokens for block in blocks if block.turn is None}.values())

    def _reply_block(self, reply: Reply, node: Node | None, thread: str | None, *, thought: bool) -> Block:
        turn = self._turn_of(reply, node, thread)
        if turn is None:
            return self.renderer.reply(reply)
        block = self.renderer.turn(turn, thought=thought)
        if node is not None and node.children and turn.at != node.id and block.key not in node.children:
            written = self.renderer.reply(reply)  # by the client, before the policy sampled the same text
            return written if written.key in node.children else block
        return block

    def _turn_of(self, reply: Reply, node: Node | None, thread: str | None) -> Turn | None:
        """Return the turn that a message came from; of several with the same meaning, the highest-ranked."""
        if node is not None:  # the usual case, without computing a meaning
            equal = [turn for turn in self._by_node.get(node.id, ()) if _is_verbatim(reply, turn)]
            if len(equal) == 1:
                return equal[0]
        try:
            same = self._by_meaning.get(meaning(reply.text, reply.calls), [])
        except (ValueError, TypeError, RecursionError):  # no turn can have been parsed to this
            return None
        if reply.thought is not None:
            words = reply.thought.split()
            same = [turn for turn in same if (turn.content.thought or "").split() == words]
        if len(same) < 2 or node is None:
            return same[-1] if same else None
        named = {reply.signature, *(call.id.removeprefix("call_").rpartition("_")[0] for call in reply.calls)}
        children = {child.block.turn: child for child in node.children.values() if child.block is not None}

        def rank(turn: Turn) -> _Rank:
            child, prompt = children.get(turn), self.nodes[turn.at]
            here = turn.at == node.id
            return _Rank(
                sampled_here=here,
                sampled_here_in_thread=here and turn.thread == thread,
                named_by_client=turn.id in named,
                continued_here=child is not None and bool(child.children),
                used_here=child is not None,
                same_question=prompt.block is not None
                and node.block is not None
                and prompt.block.key == node.block.key,
                same_previous_turn=prompt.last_turn() is node.last_turn(),
                number=turn.number,
            )

        return max(same, key=rank)


def _tokens(blocks: Sequence[Block]) -> list[int]:
    tokens: list[int] = []
    for block in blocks:
        tokens += block.tokens  # several times as fast as itertools.chain: whole blocks are copied
    return tokens


def _split_system(payload: Payload) -> tuple[str, list[Part]]:
    """Return the system message, empty if there is none, and the other parts."""
    first, *rest = payload.parts or (Text("system", ""),)
    if isinstance(first, Text) and first.role == "system":
        return first.text, rest
    return "", [first, *rest]


def _last_question(parts: list[Part]) -> int:
    questions = (i for i in reversed(range(len(parts))) if isinstance(part := parts[i], Text) and part.role == "user")
    return next(questions, -1)


def _is_verbatim(reply: Reply, turn: Turn) -> bool:
    """Whether both are equal up to surrounding whitespace, an omitted thought and the ids of calls."""
    content = turn.content
    return (
        reply.text.strip() == content.text
        and (reply.thought is None or reply.thought.strip() == content.thought)
        and [(call.name, call.arguments) for call in reply.calls] == [(c.name, c.arguments) for c in content.calls]
    )
