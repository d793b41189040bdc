"""A client's request and its answer, independent of the wire format.

They hold only what a model can see. The form (a string or a list of blocks, cache marks, the order of keys) is dropped,
so two requests that show a model the same content are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_plugin.errors import MemoryWalkerError

ErrorKind = Literal["invalid", "authentication", "not_found", "too_large", "too_long", "slow", "overloaded", "internal"]
"""What is wrong with a request; each wire format maps it to its own error type and status."""


class TapError(MemoryWalkerError):
    """A request that is answered with an error, in the wire format of its client."""

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.param = param
        """Path of the field that is wrong, such as ``messages[2].content``."""
        self.code = code
        """Error code that clients of one provider act on."""


class TooLongError(TapError):
    """A context that does not fit. Agents read the numbers out of the message and compact."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__("too_long", f"the context has {tokens} tokens, at most {limit} fit")
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True, slots=True)
class Text:
    """One block of text that the policy did not write."""

    role: Literal["system", "user"]
    text: str

    @property
    def size(self) -> int:
        """In characters."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The output of a tool."""

    call: str
    """Id of the call it answers."""
    text: str
    error: bool = False

    @property
    def size(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call with the id by which a client answers it."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """The raw string if it is not a JSON object."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant message in a request."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    thought: str | None = None
    """None if the client left it out."""
    signature: str | None = None
    """:attr:`Answer.id` of the answer it comes from, where the wire format carries it."""

    @property
    def size(self) -> int:
        return len(self.text) + len(self.thought or "") + sum(len(repr(call.arguments)) for call in self.calls)


Part = Text | ToolResult | Reply


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
    """The content of one request."""

    model: str
    parts: tuple[Part, ...]
    """The messages in order, without blank blocks. Results of parallel calls are in the order of their calls. The
    system message, if there is one, is the first part."""
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    may_call: bool = True
    """False if tool calls are switched off: what looks like a call is then text."""
    one_call: bool = False
    """The client takes one call per turn: only the first is returned."""
    size: int = field(default=0, compare=False)
    """Bytes of its body."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A payload with what identifies its request."""

    payload: Payload
    digest: str
    """Digest of path and body: the same for a retry."""
    headers: Mapping[str, str]
    """Names in lower case."""


Purpose = Literal["", "summary", "auxiliary"]
"""Purpose of a turn that is not part of a conversation."""


@dataclass(frozen=True, slots=True)
class Thread:
    """Which conversation a request belongs to, as far as its headers tell.

    A thread without a name is the only one of its session.
    """

    name: str = ""
    parent: str | None = None
    """The thread that started this one, if it is a subagent's; None if a user did."""
    purpose: Purpose = ""
    """Purpose of the request."""


ThreadOf = Callable[[Mapping[str, str]], Thread]
"""Reads the thread of a request from its headers, whose names are in lower case. Drivers define it."""

StopReason = Literal["stop", "calls", "length", "context"]
"""Why a turn ended: end of turn; tool calls; the turn's token limit; the context is full."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's turn as a client gets it."""

    id: str
    """Id of the turn; unique in the tap."""
    model: str
    """As requested by the client."""
    text: str
    calls: tuple[ToolCall, ...]
    thought: str | None
    finish: StopReason
    prompt_tokens: int
    sampled_tokens: int
    thought_tokens: int = 0
    """Number of sampled tokens that belong to the thought."""
    created: int = 0
    """Unix time in seconds."""
