"""The blocks of a context: messages, each rendered once, and turns, which keep the ids that were sampled.

An assistant message is matched with a turn by *meaning*: the same words, and the same tools called with the same
arguments. Serialization (the order of keys, 5000.0 or 5000, spaces, the case of a tool's name) makes no difference, nor
does a thought that the client left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from slime_plugin.rollout.chat.chat import Chat, encodable
from slime_plugin.rollout.engine.engine import Generation
from slime_plugin.rollout.messages import Message, split_thought
from slime_plugin.rollout.tool_calls import split_calls
from slime_plugin.tap.payload import Purpose, Reply, StopReason, Text, ToolCall, ToolResult, ToolSpec
from slime_plugin.tap.wire.wire_format import MAX_DEPTH

BlockRole = Literal["head", "system", "user", "tool", "assistant"]


@dataclass(frozen=True, slots=True)
class TurnContent:
    """A sampled turn as text and calls."""

    text: str
    calls: tuple[ToolCall, ...]
    thought: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of the policy."""

    id: str
    number: int
    """Index by request order in the session."""
    at: int
    """Id of the last node of its prompt."""
    generation: Generation
    content: TurnContent
    thread: str
    """Thread of the request; several threads may sample the same text."""
    finish: StopReason = "stop"
    digest: str = ""
    """Digest of the request."""
    tools: bool = True
    """Whether the request offered tools. Requests for titles and some summaries do not."""
    purpose: Purpose = ""
    """As stated by the client."""

    @property
    def sampled(self) -> int:
        return len(self.generation.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A rendered part of a context."""

    key: str
    """Blocks of the same content have the same key."""
    role: BlockRole
    tokens: tuple[int, ...]
    turn: Turn | None = None
    """The turn that sampled these tokens; None if they were rendered from text."""
    thought: bool = True
    """False for a turn whose thought was removed."""


def key_of(role: BlockRole, content: bytes) -> str:
    return hashlib.blake2b(role.encode() + b"\0" + content, digest_size=16).hexdigest()


def head_key(system: str, tools: Sequence[ToolSpec]) -> str:
    schemas = orjson.dumps([tool.to_json() for tool in tools], option=orjson.OPT_SORT_KEYS)
    return key_of("head", encodable(system).encode() + b"\0" + schemas)


def meaning(text: str, calls: Iterable[ToolCall]) -> str:
    """Return a key that messages of the same meaning share.

    >>> one = meaning("Look.\\n", [ToolCall("1", "Read", {"path": "a", "limit": 5.0})])
    >>> one == meaning(" Look.", [ToolCall("2", "read", {"limit": 5, "path": "a"})])
    True
    """
    parts: list[Any] = [" ".join(encodable(text).split())]
    parts += [[call.name.casefold(), _normalized(call.arguments)] for call in calls]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def _normalized(value: Any, depth: int = 0) -> Any:
    """Return the value with all numbers as floats, as in JavaScript."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {encodable(str(key)): _normalized(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalized(item, depth + 1) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else str(value)
    return value


def parse_turn(text: str, id: str, *, max_calls: int | None) -> TurnContent:
    """Split a sampled text. Calls that cannot be serialized stay text; calls beyond ``max_calls`` are dropped."""
    thought, after_thought = split_thought(text, opened=True)
    rest, found = (after_thought, []) if max_calls == 0 else split_calls(after_thought)
    calls = tuple(ToolCall(f"call_{id}_{i}", call.name, call.arguments) for i, call in enumerate(found[:max_calls]))
    try:
        meaning("", calls)
        orjson.dumps([[call.name, call.arguments] for call in calls])
    except (ValueError, TypeError, RecursionError, OverflowError):  # too deep, too large, a lone surrogate
        rest, calls = after_thought, ()
    return TurnContent(rest.strip(), calls, None if thought is None else thought.strip())


def as_sampled_text(reply: Reply) -> str:
    """Render an assistant message as the policy would have written it."""
    thought = f"<think>\n{reply.thought}\n</think>\n\n" if reply.thought else ""
    calls = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
    lines = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return thought + "\n".join([reply.text] * bool(reply.text) + lines)


def thought_length(chat: Chat, sampled: Sequence[int]) -> int:
    """Return how many of the sampled tokens are the thought, its closing tag and the whitespace after it."""
    low, high = 0, len(sampled)
    while low < high:  # the fewest tokens in which the thought has ended
        middle = (low + high) // 2
        low, high = (low, middle) if "</think>" in chat.text(sampled[:middle]) else (middle + 1, high)
    while low < len(sampled) and sampled[low] not in chat.stop_ids and not chat.text(sampled[low : low + 1]).strip():
        low += 1
    return low


class Renderer:
    """Renders messages to blocks; blocks that were inserted into the tree are cached."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._tokens: dict[str, tuple[int, ...]] = {}  # by key

    def head(self, system: str, tools: Sequence[ToolSpec]) -> Block | None:
        """The system message with the tools; None if there is neither."""
        if not system and not tools:
            return None
        key = head_key(system, tools)
        return Block(key, "head", self._cached(key, lambda: self.chat.head(system, tools)))

    def text(self, part: Text) -> Block:
        key = key_of(part.role, encodable(part.text).encode())
        return Block(key, part.role, self._cached(key, lambda: self.chat.render(Message(part.role, part.text))))

    def result(self, part: ToolResult) -> Block:
        key = key_of("tool", encodable(part.text).encode())
        return Block(key, "tool", self._cached(key, lambda: self.chat.render(Message("tool", part.text))))

    def reply(self, part: Reply) -> Block:
        """An assistant message that matches no turn."""
        words = as_sampled_text(part)
        key = key_of("assistant", encodable(words).encode())
        return Block(key, "assistant", self._cached(key, lambda: self.chat.reply(words)))

    def turn(self, turn: Turn, *, thought: bool = True) -> Block:
        sampled = turn.generation.tokens
        if thought or turn.content.thought is None:
            tokens = (*self.chat.open_turn(), *sampled, *self.chat.close_turn(sampled))
            return Block(f"turn {turn.id}", "assistant", tokens, turn)
        rest = sampled[thought_length(self.chat, sampled) :]
        tokens = (*self.chat.open_turn(), *rest, *self.chat.close_turn(rest))
        return Block(f"turn {turn.id} without thought", "assistant", tokens, turn, thought=False)

    def keep(self, block: Block) -> None:
        """Cache the tokens of a block that was inserted into the tree."""
        if block.turn is None:
            self._tokens[block.key] = block.tokens

    def known(self, key: str) -> tuple[int, ...] | None:
        """Return the cached tokens of a block."""
        return self._tokens.get(key)

    def _cached(self, key: str, render: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        tokens = self._tokens.get(key)
        return tuple(render()) if tokens is None else tokens
