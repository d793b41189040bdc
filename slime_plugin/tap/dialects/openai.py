"""What OpenAI's two APIs have in common: errors, models, tools that may be called."""

from __future__ import annotations

from typing import Any

from slime_plugin.errors import printable
from slime_plugin.tap.dialects.base import dump
from slime_plugin.tap.dialects.reading import Field
from slime_plugin.tap.messages import Answer, Kind, TapError, TooLongError

ERRORS: dict[Kind, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", "invalid_value"),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "slow": (408, "timeout_error", "request_timeout"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "internal": (500, "server_error", None),
    "overloaded": (503, "server_error", "overloaded"),
}


class OpenAI:
    """Base of the dialects of ``/v1/chat/completions`` and ``/v1/responses``."""

    keep_alive = b": keep-alive\n\n"
    conversation = "messages"
    """The field that has it."""

    def count(self, tokens: int) -> bytes:
        return dump({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: TapError, request: str) -> tuple[int, bytes]:
        return ERRORS[error.kind][0], dump({"error": error_object(error, self.conversation)})

    def headers(self, request: str) -> dict[str, str]:
        return {"x-request-id": request}

    def models(self, names: list[str]) -> bytes:
        return dump({"object": "list", "data": [_model(name) for name in names]})

    def model(self, name: str) -> bytes:
        return dump(_model(name))


def error_object(error: TapError, conversation: str = "messages") -> dict[str, Any]:
    """``conversation`` is the field that has it."""
    _, kind, usual = ERRORS[error.kind]
    message, param = f"{error.param}: {error}" if error.param else str(error), error.param
    if isinstance(error, TooLongError):
        message = (
            f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
            f"{error.tokens} tokens. Please reduce the length of the messages."
        )
        param = conversation
    return {"message": message, "type": kind, "param": param, "code": error.code or usual}


def may_call(choice: Field) -> bool:
    if choice.value in (None, "auto", "none"):
        return bool(choice.value != "none")
    raise choice.wrong("a call cannot be forced, nor the choice of tools narrowed: it must be 'auto' or 'none'")


def function_tool(tool: Field) -> None:
    """Refuses a tool that is not a function."""
    if (kind := tool["type"]).text() != "function":
        raise kind.wrong(f"{printable(kind.value)!r} is not served; only functions are")


def usage_details(answer: Answer) -> tuple[dict[str, int], dict[str, int]]:
    """Of the prompt and of the answer."""
    return {"cached_tokens": 0}, {"reasoning_tokens": answer.thought_tokens}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "memorywalker"}
