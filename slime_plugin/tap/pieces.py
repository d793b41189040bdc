"""What a context is made of: pieces, each rendered once, and turns, which are never rendered.

A message that comes back is the turn it came from if it *means* the same: the same words, the same tools called with
the same arguments. How a client wrote that down (the order of keys, 5000.0 or 5000, spaces, the case of a tool's name)
says nothing, and neither does a thought that it left out. Such a message contributes the very ids that were sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from slime_plugin.bridge.calls import split_calls, split_thought
from slime_plugin.bridge.chat.base import Chat, encodable
from slime_plugin.bridge.engine.base import Generation
from slime_plugin.bridge.messages import Message
from slime_plugin.tap.messages import Call, Finish, Reply, Result, Text, ToolSpec

Role = Literal["head", "system", "user", "tool", "assistant"]
Purpose = Literal["", "summary", "auxiliary"]
"""Of a turn that is no part of a conversation itself."""
DEEPEST = 64
"""Nesting of the arguments of a call. What a policy samples may be nested so deep that no client could read it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a turn says to whoever reads it."""

    text: str
    calls: tuple[Call, ...]
    thought: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the policy sampled, once."""

    id: str
    number: int
    """Counts the turns of a session in the order in which they were asked for."""
    at: int
    """The node that its prompt ends with."""
    generation: Generation
    said: Said
    thread: str
    """Of which of the client's conversations it is; the same words may be said in several."""
    finish: Finish = "stop"
    digest: str = ""
    """Of the request."""
    tools: bool = True
    """The policy was told of tools. Titles and some summaries are asked for without."""
    purpose: Purpose = ""
    """What its client says it is for, where it says so."""

    @property
    def sampled(self) -> int:
        return len(self.generation.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One block of a context."""

    key: str
    """The same for what shows a model the same."""
    role: Role
    tokens: tuple[int, ...]
    turn: Turn | None = None
    """The turn whose ids these are; None if they were rendered from text."""
    thought: bool = True
    """False for a turn whose thought was taken out."""


def key_of(role: Role, content: bytes) -> str:
    return hashlib.blake2b(role.encode() + b"\0" + content, digest_size=16).hexdigest()


def head_key(system: str, tools: Sequence[ToolSpec]) -> str:
    schemas = orjson.dumps([tool.to_json() for tool in tools], option=orjson.OPT_SORT_KEYS)
    return key_of("head", encodable(system).encode() + b"\0" + schemas)


def meaning(text: str, calls: Iterable[Call]) -> str:
    """What two messages have in common that say the same.

    >>> one = meaning("Look.\\n", [Call("1", "Read", {"path": "a", "limit": 5.0})])
    >>> one == meaning(" Look.", [Call("2", "read", {"limit": 5, "path": "a"})])
    True
    """
    parts: list[Any] = [" ".join(encodable(text).split())]
    parts += [[call.name.casefold(), _plain(call.arguments)] for call in calls]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def _plain(value: Any, depth: int = 0) -> Any:
    """The value with numbers as JavaScript has them: all of them floats."""
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return {encodable(str(key)): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else str(value)
    return value


def read_turn(text: str, id: str, *, most_calls: int | None) -> Said:
    """What a sampled text says. Calls that no client could be told of stay text; what is called beyond ``most_calls``
    is not told of at all."""
    thought, rest = split_thought(text)
    spoken, found = (rest, []) if most_calls == 0 else split_calls(rest)
    calls = tuple(Call(f"call_{id}_{i}", call.name, call.arguments) for i, call in enumerate(found[:most_calls]))
    try:
        meaning("", calls)
        orjson.dumps([[call.name, call.arguments] for call in calls])
    except (ValueError, TypeError, RecursionError, OverflowError):  # too deep, too large, half a surrogate pair
        spoken, calls = rest, ()
    return Said(spoken.strip(), calls, None if thought is None else thought.strip())


def written(reply: Reply) -> str:
    """A message of the assistant's as the policy would have written it."""
    thought = f"<think>\n{reply.thought}\n</think>\n\n" if reply.thought else ""
    calls = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
    lines = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return thought + "\n".join([reply.text] * bool(reply.text) + lines)


def thought_length(chat: Chat, sampled: Sequence[int]) -> int:
    """How many of the sampled tokens are the thought, its end included, and the space behind it."""
    low, high = 0, len(sampled)
    while low < high:  # the fewest tokens in which the thought has ended
        middle = (low + high) // 2
        low, high = (low, middle) if "</think>" in chat.text(sampled[:middle]) else (middle + 1, high)
    while low < len(sampled) and sampled[low] not in chat.stop_ids and not chat.text(sampled[low : low + 1]).strip():
        low += 1
    return low


class Renderer:
    """Makes pieces of messages. What is kept is not rendered again."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._tokens: dict[str, tuple[int, ...]] = {}  # by key

    def head(self, system: str, tools: Sequence[ToolSpec]) -> Piece | None:
        """The system message with the tools; None if there is neither."""
        if not system and not tools:
            return None
        key = head_key(system, tools)
        return Piece(key, "head", self._once(key, lambda: self.chat.head(system, tools)))

    def text(self, part: Text) -> Piece:
        key = key_of(part.role, encodable(part.text).encode())
        return Piece(key, part.role, self._once(key, lambda: self.chat.render(Message(part.role, part.text))))

    def result(self, part: Result) -> Piece:
        key = key_of("tool", encodable(part.text).encode())
        return Piece(key, "tool", self._once(key, lambda: self.chat.render(Message("tool", part.text))))

    def reply(self, part: Reply) -> Piece:
        """A message that no turn of ours could be found for."""
        words = written(part)
        key = key_of("assistant", encodable(words).encode())
        return Piece(key, "assistant", self._once(key, lambda: self.chat.reply(words)))

    def turn(self, turn: Turn, *, thought: bool = True) -> Piece:
        sampled = turn.generation.tokens
        if thought or turn.said.thought is None:
            tokens = (*self.chat.open_turn(), *sampled, *self.chat.close_turn(sampled))
            return Piece(f"turn {turn.id}", "assistant", tokens, turn)
        rest = sampled[thought_length(self.chat, sampled) :]
        tokens = (*self.chat.open_turn(), *rest, *self.chat.close_turn(rest))
        return Piece(f"turn {turn.id} without thought", "assistant", tokens, turn, thought=False)

    def keep(self, piece: Piece) -> None:
        """Remember the tokens of a piece that has its place."""
        if piece.turn is None:
            self._tokens[piece.key] = piece.tokens

    def known(self, key: str) -> tuple[int, ...] | None:
        """The tokens of a piece that was kept."""
        return self._tokens.get(key)

    def _once(self, key: str, render: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        tokens = self._tokens.get(key)
        return tuple(render()) if tokens is None else tokens
