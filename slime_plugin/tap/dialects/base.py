"""What a dialect is: one provider's words for a request, an answer and an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import orjson

from slime_plugin.tap.dialects.conversation import Memory
from slime_plugin.tap.messages import Answer, Payload, TapError

MAX_DEPTH = 64
"""Objects and lists inside each other, in a body and in the arguments of a call."""

NOTHING: Mapping[str, Any] = {}

_LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\u0085".encode(): b"\\u0085"}
"""Where clients that go by Unicode and not by the standard of events would cut a line."""


class Dialect(Protocol):
    """A wire format. It keeps no state: what it needs of the request to answer it, it is given back as ``echo``.

    What the policy would have to be steered to do is refused, as nothing here steers it: a forced tool, a stop string,
    a JSON schema. How it is sampled (temperature, top_p, top_k, seed, penalties) is the trainer's business: those are
    accepted and have no effect.
    """

    @property
    def keep_alive(self) -> bytes:
        """An event without meaning, for streams whose answer is not there yet."""
        ...

    def read(self, body: Mapping[str, Any], memory: Memory | None = None) -> Payload:
        """What it says is the same with a memory of what the session sent before and without one.

        Raises ``TapError("invalid", ...)`` with the path of the field that is wrong.
        """
        ...

    def echo(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of the request its answer shows again, so that the rest need not be kept while the policy thinks."""
        ...

    def whole(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> bytes:
        """The body of a response that is not streamed."""
        ...

    def events(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> Iterator[bytes]:
        """The same as server-sent events."""
        ...

    def count(self, tokens: int) -> bytes:
        """The body that tells how many tokens a prompt has."""
        ...

    def error(self, error: TapError, request: str) -> tuple[int, bytes]:
        """Status and body for the request with this id."""
        ...

    def error_event(self, error: TapError, request: str) -> bytes:
        """The same in a stream that has begun."""
        ...

    def headers(self, request: str) -> dict[str, str]:
        """Where this provider's clients look for the id of a request."""
        ...

    def models(self, names: list[str]) -> bytes:
        """A list of models."""
        ...

    def model(self, name: str) -> bytes:
        """One model."""
        ...


def dump(value: object) -> bytes:
    """JSON of anything a policy can say: orjson refuses wide integers and half surrogate pairs, json does not."""
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
    """Level by level: no input can exhaust the stack.

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
    """The arguments of a call, which a model wrote: the text as it stands if it is no JSON object or a bottomless one.

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
