"""Builds the canonical parts of a payload from messages, for all wire formats.

Requests that show a model the same give equal parts, however a client wraps, splits or orders them.

An agent sends the whole conversation with every request. Messages that a session sent before are not parsed again:
their parts are cached, and the same objects are returned.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from slime_plugin.tap.payload import Part, Reply, Text, ToolCall, ToolResult
from slime_plugin.tap.wire.fields import Field

CACHED_CONVERSATIONS = 8
"""Per session: concurrent subagents have one each."""


@dataclass(slots=True)
class _OpenReply:
    """A reply that more content may be added to."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    signature: str | None = None

    def build(self) -> Reply | None:
        """None if it is empty."""
        if not (self.texts or self.calls or self.thoughts or self.signature):
            return None
        thought = "\n".join(self.thoughts) if self.thoughts else None
        return Reply("".join(self.texts), tuple(self.calls), thought, self.signature)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Lengths of the builder's lists before a reply: later messages change nothing before it."""

    messages: int
    system: int
    parts: int
    found_tools: int


@dataclass(frozen=True, slots=True, eq=False)
class _Parsed:
    """A conversation that was parsed."""

    opening: tuple[str, ...]
    """The wire format, and system texts from outside the messages."""
    digests: list[bytes]
    """Digests of the messages."""
    checkpoints: list[_Checkpoint]
    system: list[str]
    parts: list[Part]
    found_tools: list[str]


class ParseCache:
    """The conversations that a session sent last."""

    def __init__(self) -> None:
        self._parsed: deque[_Parsed] = deque(maxlen=CACHED_CONVERSATIONS)

    def longest(self, opening: tuple[str, ...], digests: list[bytes]) -> tuple[_Parsed, list[_Checkpoint]] | None:
        """Return the conversation with the longest common prefix, and its checkpoints within that."""
        best: tuple[_Parsed, list[_Checkpoint]] | None = None
        for parsed in self._parsed:
            if parsed.opening == opening:
                same = common_prefix(parsed.digests, digests)
                shared = [point for point in parsed.checkpoints if point.messages < same]
                if shared and (best is None or shared[-1].messages > best[1][-1].messages):
                    best = parsed, shared
        return best

    def put(self, parsed: _Parsed, replaces: _Parsed | None) -> None:
        if replaces is not None:
            self._parsed.remove(replaces)
        self._parsed.append(parsed)


def common_prefix(one: list[Any], other: list[Any]) -> int:
    """Return how many leading items of two lists are equal."""
    pairs = enumerate(zip(one, other, strict=False))  # one may be longer than the other
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class PartsBuilder:
    """Takes content in order; :meth:`parts` returns it in canonical form."""

    def __init__(self, wire_format: str, cache: ParseCache | None = None) -> None:
        self.found_tools: list[str] = []
        """Names of tools that a tool search returned."""
        self._wire_format, self._cache = wire_format, cache
        self._system: list[str] = []
        self._parts: list[Part] = []
        self._ordered = 0  # parts that are in canonical order
        self._reply: _OpenReply | None = None

    def uncached(self, messages: Field) -> Iterator[Field]:
        """Iterate over the messages that are not in the cache, and add them to it."""
        if self._cache is None:
            yield from messages.each()
            return
        opening = (self._wire_format, *self._system)
        digests = [_digest(message) for message in messages.items()]
        cached = self._cache.longest(opening, digests)
        checkpoints: list[_Checkpoint] = []
        if cached is not None:
            parsed, checkpoints = cached
            last = checkpoints[-1]
            self._system, self._parts = parsed.system[: last.system], parsed.parts[: last.parts]
            self.found_tools, self._ordered = parsed.found_tools[: last.found_tools], last.parts
        start = checkpoints[-1].messages if checkpoints else 0
        for number, message in enumerate(messages.each(start), start):
            before = _Checkpoint(number, len(self._system), len(self._parts), len(self.found_tools))
            between_replies = self._reply is None
            yield message
            if between_replies and self._reply_follows(before) and before not in checkpoints[-1:]:
                checkpoints.append(before)
        self.end_reply()
        self._order_results()
        parsed = _Parsed(opening, digests, checkpoints, self._system, self._parts, self.found_tools)
        self._cache.put(parsed, None if cached is None else cached[0])

    def text(self, role: Literal["system", "user"], text: str) -> None:
        self.end_reply()
        if not text.strip():
            return
        if role == "system" and not self._parts:
            self._system.append(text)
        else:
            self._parts.append(Text(role, text))

    def result(self, call: str, text: str, error: bool = False) -> None:
        self.end_reply()
        self._parts.append(ToolResult(call, text, error))

    def reply_text(self, text: str) -> None:
        if text.strip():
            self._open_reply().texts.append(text)

    def reply_thought(self, text: str) -> None:
        if text.strip():
            self._open_reply().thoughts.append(text)

    def reply_signature(self, signature: str) -> None:
        reply = self._open_reply()
        reply.signature = reply.signature or signature or None

    def reply_call(self, call: ToolCall) -> None:
        self._open_reply().calls.append(call)

    def end_reply(self) -> None:
        if self._reply is not None and (reply := self._reply.build()) is not None:
            self._parts.append(reply)
        self._reply = None

    def parts(self) -> tuple[Part, ...]:
        self.end_reply()
        self._order_results()
        system = [Text("system", "\n\n".join(self._system))] if self._system else []
        return (*system, *self._parts)

    def _open_reply(self) -> _OpenReply:
        if self._reply is None:
            self._reply = _OpenReply()
        return self._reply

    def _reply_follows(self, point: _Checkpoint) -> bool:
        """Whether the first part after a checkpoint is a reply."""
        if len(self._parts) > point.parts:
            return isinstance(self._parts[point.parts], Reply)
        return self._reply is not None and self._reply.build() is not None

    def _order_results(self) -> None:
        """Sort the results of a reply's calls in the order of the calls; everything else keeps its position."""
        parts = self._parts
        replies = [i for i, part in enumerate(parts[self._ordered :], self._ordered) if isinstance(part, Reply)]
        for start, stop in pairwise([*replies, len(parts)]):
            reply = parts[start]
            assert isinstance(reply, Reply)
            order = {call.id: rank for rank, call in enumerate(reply.calls)}
            indexed = enumerate(parts[start:stop], start)
            results = [(i, part) for i, part in indexed if isinstance(part, ToolResult) and part.call in order]
            in_order = sorted((part for _, part in results), key=lambda part: order[part.call])
            for (i, _), part in zip(results, in_order, strict=True):
                parts[i] = part


def _digest(message: Any) -> bytes:
    """Digest of a message. Unlike ``==``, it distinguishes 1, 1.0 and True. Version 2 of the marshal format has no back
    references, so equal values give equal bytes."""
    return hashlib.blake2b(marshal.dumps(message, 2), digest_size=16).digest()
