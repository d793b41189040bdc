"""Parts of a conversation from its messages, for all dialects: what is dropped, what is joined, what changes places.

Requests that show a model the same give equal parts, however a client wraps, splits or orders them.

An agent sends the whole conversation with every request. What a session sent before is not read again: its parts are
remembered, and the very same objects are given out.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from slime_plugin.tap.dialects.reading import Field
from slime_plugin.tap.messages import Call, Part, Reply, Result, Text

REMEMBERED = 8
"""Conversations of a session: agents that run side by side, each with its own."""


@dataclass(slots=True)
class _Speaking:
    """A reply of which more may come."""

    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    signature: str | None = None

    def done(self) -> Reply | None:
        """None if nothing was said."""
        if not (self.texts or self.calls or self.thoughts or self.signature):
            return None
        thought = "\n".join(self.thoughts) if self.thoughts else None
        return Reply("".join(self.texts), tuple(self.calls), thought, self.signature)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What had been read when a reply began: nothing that comes later changes any of it."""

    messages: int
    system: int
    parts: int
    found: int


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A conversation that was read."""

    opening: tuple[str, ...]
    """The dialect, and what it takes from elsewhere than the messages."""
    digests: list[bytes]
    """Of the messages."""
    marks: list[_Mark]
    system: list[str]
    parts: list[Part]
    found: list[str]


class Memory:
    """What one session sent last."""

    def __init__(self) -> None:
        self._read: deque[_Read] = deque(maxlen=REMEMBERED)

    def resume(self, opening: tuple[str, ...], digests: list[bytes]) -> tuple[_Read, list[_Mark]] | None:
        """The conversation that most of these messages were read in, with its marks up to where they part."""
        best: tuple[_Read, list[_Mark]] | None = None
        for read in self._read:
            if read.opening == opening:
                pairs = enumerate(zip(read.digests, digests, strict=False))  # one may be longer than the other
                least = min(len(read.digests), len(digests))
                same = next((i for i, (one, other) in pairs if one != other), least)
                marks = [mark for mark in read.marks if mark.messages < same]
                if marks and (best is None or marks[-1].messages > best[1][-1].messages):
                    best = read, marks
        return best

    def keep(self, read: _Read, instead: _Read | None) -> None:
        if instead is not None:
            self._read.remove(instead)
        self._read.append(read)


class Conversation:
    """Parts as they come in; :meth:`parts` gives them in canonical form."""

    def __init__(self, dialect: str, memory: Memory | None = None) -> None:
        self.found: list[str] = []
        """Tools that a search for tools has found."""
        self._dialect, self._memory = dialect, memory
        self._system: list[str] = []
        self._parts: list[Part] = []
        self._settled = 0  # parts that are in their order
        self._reply: _Speaking | None = None

    def unread(self, messages: Field) -> Iterator[Field]:
        """The messages, without those at their beginning that the session sent before."""
        if self._memory is None:
            yield from messages.each()
            return
        opening = (self._dialect, *self._system)
        digests = [_digest(message) for message in messages.items()]
        known = self._memory.resume(opening, digests)
        marks: list[_Mark] = []
        if known is not None:
            read, marks = known
            last = marks[-1]
            self._system, self._parts = read.system[: last.system], read.parts[: last.parts]
            self.found, self._settled = read.found[: last.found], last.parts
        start = marks[-1].messages if marks else 0
        for number, message in enumerate(messages.each(start), start):
            before = _Mark(number, len(self._system), len(self._parts), len(self.found))
            silent = self._reply is None
            yield message
            if silent and self._replies_since(before) and before not in marks[-1:]:
                marks.append(before)
        self.end()
        self._order()
        read = _Read(opening, digests, marks, self._system, self._parts, self.found)
        self._memory.keep(read, None if known is None else known[0])

    def said(self, role: Literal["system", "user"], text: str) -> None:
        self.end()
        if not text.strip():
            return
        if role == "system" and not self._parts:
            self._system.append(text)
        else:
            self._parts.append(Text(role, text))

    def result(self, call: str, text: str, error: bool = False) -> None:
        self.end()
        self._parts.append(Result(call, text, error))

    def replied(self, text: str) -> None:
        if text.strip():
            self._speaking().texts.append(text)

    def thought(self, text: str) -> None:
        if text.strip():
            self._speaking().thoughts.append(text)

    def signed(self, signature: str) -> None:
        """Which answer it comes from."""
        speaking = self._speaking()
        speaking.signature = speaking.signature or signature or None

    def called(self, call: Call) -> None:
        self._speaking().calls.append(call)

    def end(self) -> None:
        """The assistant's message is over."""
        if self._reply is not None and (reply := self._reply.done()) is not None:
            self._parts.append(reply)
        self._reply = None

    def parts(self) -> tuple[Part, ...]:
        self.end()
        self._order()
        system = [Text("system", "\n\n".join(self._system))] if self._system else []
        return (*system, *self._parts)

    def _speaking(self) -> _Speaking:
        if self._reply is None:
            self._reply = _Speaking()
        return self._reply

    def _replies_since(self, mark: _Mark) -> bool:
        """Whether the first that came after a mark is a reply."""
        if len(self._parts) > mark.parts:
            return isinstance(self._parts[mark.parts], Reply)
        return self._reply is not None and self._reply.done() is not None

    def _order(self) -> None:
        """Results of one reply's calls change places among themselves; everything else stays where it is."""
        parts = self._parts
        replies = [i for i, part in enumerate(parts[self._settled :], self._settled) if isinstance(part, Reply)]
        for start, stop in pairwise([*replies, len(parts)]):
            reply = parts[start]
            assert isinstance(reply, Reply)
            order = {call.id: rank for rank, call in enumerate(reply.calls)}
            answers = [
                (index, part)
                for index, part in enumerate(parts[start:stop], start)
                if isinstance(part, Result) and part.call in order
            ]
            in_order = sorted((part for _, part in answers), key=lambda part: order[part.call])
            for (index, _), part in zip(answers, in_order, strict=True):
                parts[index] = part


def _digest(message: Any) -> bytes:
    """Tells apart what Python finds equal: 1, 1.0 and True. The version of the format is one without back references,
    in which equal values are equal bytes."""
    return hashlib.blake2b(marshal.dumps(message, 2), digest_size=16).digest()
