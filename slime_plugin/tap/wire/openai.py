"""What OpenAI's two APIs share: errors, models, function tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from slime_plugin.errors import printable
from slime_plugin.tap.payload import ErrorKind, TapError, TooLongError, ToolSpec
from slime_plugin.tap.wire.fields import Field, distinct, read_tool
from slime_plugin.tap.wire.wire_format import WireFormat, dump

ERRORS: dict[ErrorKind, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", "invalid_value"),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "slow": (408, "timeout_error", "request_timeout"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "internal": (500, "server_error", None),
    "overloaded": (503, "server_error", "overloaded"),
}


class OpenAI(WireFormat):
    """Base of the formats of ``/v1/chat/completions`` and ``/v1/responses``."""

    statuses = {kind: status for kind, (status, _, _) in ERRORS.items()}  # noqa: RUF012
    request_id_header = "x-request-id"
    keep_alive = b": keep-alive\n\n"
    messages_field: ClassVar[str]
    """The field that holds the conversation."""

    def count(self, tokens: int) -> bytes:
        return dump({"object": "response.input_tokens", "input_tokens": tokens})

    def error_body(self, error: TapError, request_id: str) -> dict[str, Any]:
        _, kind, usual = ERRORS[error.kind]
        message, param = f"{error.param}: {error}" if error.param else str(error), error.param
        if isinstance(error, TooLongError):
            message = (
                f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
                f"{error.tokens} tokens. Please reduce the length of the messages."
            )
            param = self.messages_field
        return {"error": {"message": message, "type": kind, "param": param, "code": error.code or usual}}

    def models(self, names: list[str]) -> bytes:
        return dump({"object": "list", "data": [_model(name) for name in names]})

    def model(self, name: str) -> bytes:
        return dump(_model(name))


def may_call(choice: Field) -> bool:
    if choice.value in (None, "auto", "none"):
        return bool(choice.value != "none")
    raise choice.wrong("the policy is not forced to call a tool; use 'auto' or 'none'")


def read_function_tools(tools: Field, key: str | None = None) -> tuple[ToolSpec, ...]:
    """``key`` is the field of a tool that holds its function; without it, the tool is the function."""
    return tuple(distinct(tools, _functions(tools, key))) if tools.value is not None else ()


def _functions(tools: Field, key: str | None) -> Iterable[tuple[Field, ToolSpec]]:
    for tool in tools.each():
        require_function(tool)
        function = tool if key is None else tool[key]
        yield function, read_tool(function, "parameters")


def require_function(tool: Field) -> None:
    if (kind := tool["type"]).text() != "function":
        raise kind.wrong(f"{printable(kind.value)!r} is not supported; only functions are")


def refuse_response_format(choice: Field) -> None:
    if choice.value is not None and (kind := choice["type"]).text() != "text":
        raise kind.wrong("answers in a given format are not supported: the policy is not constrained")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "memorywalker"}
