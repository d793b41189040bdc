"""The base class of wire formats: one provider's form of a request, an answer and an error."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import orjson

from slime_plugin.tap.payload import Answer, ErrorKind, Payload, TapError
from slime_plugin.tap.wire.parts_builder import ParseCache

MAX_DEPTH = 64
"""Nesting of the JSON in a body, and in the arguments of a call."""

NOTHING: Mapping[str, Any] = {}

_LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\u0085".encode(): b"\\u0085"}
"""Characters at which clients that follow Unicode instead of the SSE standard would split a line."""


class WireFormat(ABC):
    """A wire format. It keeps no state: what an answer repeats of its request is passed to it as ``echo``.

    Fields that would constrain the policy are refused: a forced tool, a stop string, a JSON schema. Sampling parameters
    (temperature, top_p, top_k, seed, penalties) are accepted and have no effect: the trainer sets them.
    """

    statuses: ClassVar[Mapping[ErrorKind, int]]
    request_id_header: ClassVar[str]
    keep_alive: ClassVar[bytes]
    """An empty event, for streams that wait for their answer."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], cache: ParseCache | None = None) -> Payload:
        """Raises ``TapError("invalid", ...)`` with the path of the field that is wrong. A cache changes no result."""

    def echo(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the answer repeats of the request."""
        return NOTHING

    @abstractmethod
    def whole(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> bytes:
        """The body of a response that is not streamed."""

    @abstractmethod
    def events(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> Iterator[bytes]:
        """The same as server-sent events."""

    @abstractmethod
    def count(self, tokens: int) -> bytes:
        """The body of a response that counts the tokens of a prompt."""

    @abstractmethod
    def error_body(self, error: TapError, request_id: str) -> dict[str, Any]: ...

    @abstractmethod
    def error_event(self, error: TapError, request_id: str) -> bytes:
        """An error in a stream that has started."""

    @abstractmethod
    def models(self, names: list[str]) -> bytes:
        """A list of models."""

    @abstractmethod
    def model(self, name: str) -> bytes: ...

    def error(self, error: TapError, request_id: str) -> tuple[int, bytes]:
        """Status and body."""
        return self.statuses[error.kind], dump(self.error_body(error, request_id))

    def headers(self, request_id: str) -> dict[str, str]:
        return {self.request_id_header: request_id}


def dump(value: object) -> bytes:
    """JSON of anything a policy can write: orjson refuses wide integers and lone surrogates, json does not."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    text = dump(data)
    for line_end, escaped in _LINE_ENDS.items():
        text = text.replace(line_end, escaped)
    return head + b"data: " + text + b"\n\n"


def too_deep(value: object, limit: int = MAX_DEPTH) -> bool:
    """Whether objects and lists are nested deeper. Iterates level by level, so no input can exhaust the stack.

    >>> too_deep([[1]], limit=2), too_deep([[1], {"a": [1]}], limit=2)
    (False, True)
    """
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    while level:
        if limit == 0:
            return True
        limit -= 1
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return False


def read_arguments(text: str) -> Mapping[str, Any] | str:
    """Parse the arguments of a call; return the text itself if it is no JSON object or nested too deep.

    >>> read_arguments('{"a": 1.0}'), read_arguments("[1]"), read_arguments('{"a": ')
    ({'a': 1.0}, '[1]', '{"a": ')
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) and not too_deep(value) else text


def write_arguments(arguments: Mapping[str, Any] | str) -> str:
    """The inverse of :func:`read_arguments`, up to spacing."""
    return arguments if isinstance(arguments, str) else dump(arguments).decode()
