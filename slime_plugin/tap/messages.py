"""A request as the tap reads it and an answer as it gives it, whatever the dialect on the wire.

Only what a model can see is here. How it was wrapped (a string or a list of blocks, cache marks, the order of keys) is
gone, so two requests that show a model the same are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_plugin.errors import MemoryWalkerError

Kind = Literal["invalid", "authentication", "not_found", "too_large", "too_long", "slow", "overloaded", "internal"]
"""What is wrong with a request; each dialect has its own words and status for it."""


class TapError(MemoryWalkerError):
    """A request that is answered with an error, in the dialect of whoever sent it."""

    def __init__(self, kind: Kind, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.param = param
        """The field that is wrong, as a path such as ``messages[2].content``."""
        self.code = code
        """A word by which clients of one provider know what to do about it."""


class TooLongError(TapError):
    """A context that does not fit. Agents read the numbers out of the message and compact."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__("too_long", f"the context has {tokens} tokens, at most {limit} fit")
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True, slots=True)
class Text:
    """What anyone but the policy said: one block of it."""

    role: Literal["system", "user"]
    text: str

    @property
    def size(self) -> int:
        """In characters, as of all parts."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool gave."""

    call: str
    """Id of the call it answers."""
    text: str
    error: bool = False

    @property
    def size(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """A string if it is not a JSON object, as it stands."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant message that comes back."""

    text: str
    calls: tuple[Call, ...] = ()
    thought: str | None = None
    """None if it was left out."""
    signature: str | None = None
    """What the answer it comes from was signed with: :attr:`Answer.id`."""

    @property
    def size(self) -> int:
        return len(self.text) + len(self.thought or "") + sum(len(repr(call.arguments)) for call in self.calls)


Part = Text | Result | Reply


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the policy may call, as a function schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """A JSON schema."""

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Payload:
    """One request."""

    model: str
    parts: tuple[Part, ...]
    """The conversation in order, without blocks of nothing but space. Results of parallel calls are in the order of
    their calls. The system message is the first part, if there is one."""
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    may_call: bool = True
    """False if the policy is told not to call a tool: then what looks like a call is text."""
    one_call: bool = False
    """The client takes one call at a time: it is told of the first, and of no other."""
    size: int = field(default=0, compare=False)
    """Bytes of the body it came in."""


Finish = Literal["stop", "calls", "length", "context"]
"""It was done; it calls tools; it may say no more; the context is full."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said to a request."""

    id: str
    """Of the turn; unique in the tap."""
    model: str
    """As the client named it."""
    text: str
    calls: tuple[Call, ...]
    thought: str | None
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    thought_tokens: int = 0
    """How many of the sampled tokens are the thought."""
    created: int = 0
    """Unix time in seconds."""
