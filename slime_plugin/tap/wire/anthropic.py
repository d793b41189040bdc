"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``.

Ignored, because no model sees them: cache marks, metadata, thinking budgets, betas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugin.errors import printable
from slime_plugin.tap.payload import (
    Answer,
    ErrorKind,
    Payload,
    Reply,
    StopReason,
    TapError,
    ToolCall,
    TooLongError,
    ToolSpec,
)
from slime_plugin.tap.wire.fields import Field, distinct, read_tool, require_parts
from slime_plugin.tap.wire.parts_builder import ParseCache, PartsBuilder
from slime_plugin.tap.wire.wire_format import NOTHING, WireFormat, dump, event, write_arguments

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Start of a system block that the provider removes before its model sees it; it changes between requests."""
INVALID_JSON = "INVALID_JSON"
"""Key under which arguments that are no JSON object are sent: an input is always an object here."""

STOP_REASONS: dict[StopReason, str] = {
    "stop": "end_turn",
    "calls": "tool_use",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
}
ERRORS: dict[ErrorKind, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "authentication": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "slow": (408, "timeout_error"),
    "too_large": (413, "request_too_large"),
    "internal": (500, "api_error"),
    "overloaded": (529, "overloaded_error"),
}


class Anthropic(WireFormat):
    statuses = {kind: status for kind, (status, _) in ERRORS.items()}  # noqa: RUF012
    request_id_header = "request-id"
    keep_alive = event({"type": "ping"}, "ping")

    def read(self, body: Mapping[str, Any], cache: ParseCache | None = None) -> Payload:
        top = Field(body)
        _refuse_unknown(top)
        builder = PartsBuilder("anthropic", cache)
        for text in _texts(top["system"]):
            builder.text("system", text)
        for message in builder.uncached(top["messages"]):
            _read_message(message, builder)
            builder.end_reply()
        parts = require_parts(builder.parts(), top["messages"])
        if isinstance(parts[-1], Reply):
            raise top["messages"].wrong("the last one is the assistant's; a conversation must end with a user message")
        choice = top["tool_choice"]
        return Payload(
            model=top["model"].name(),
            parts=parts,
            tools=_read_tools(top["tools"], builder.found_tools),
            max_tokens=top["max_tokens"].count(),
            stream=top["stream"].flag(),
            may_call=_may_call(choice),
            one_call=choice.value is not None and choice["disable_parallel_tool_use"].flag(),
        )

    def whole(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> bytes:
        stop = STOP_REASONS[answer.finish]
        return dump(_message(answer, content=list(_blocks(answer)), stop_reason=stop, usage=_usage(answer)))

    def events(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> Iterator[bytes]:
        usage = _usage(answer)
        start = _message(answer, content=[], stop_reason=None, usage=usage | {"output_tokens": 1})
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(answer)):
            yield from _block_events(index, block)
        stop = {"stop_reason": STOP_REASONS[answer.finish], "stop_sequence": None}
        yield _event("message_delta", delta=stop, usage=usage)
        yield _event("message_stop")

    def count(self, tokens: int) -> bytes:
        return dump({"input_tokens": tokens})

    def error_body(self, error: TapError, request_id: str) -> dict[str, Any]:
        message = f"{error.param}: {error}" if error.param else str(error)
        if isinstance(error, TooLongError):
            message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
        body: dict[str, Any] = {"type": ERRORS[error.kind][1], "message": message}
        if error.code is not None:
            body["details"] = {"error_code": error.code}
        return {"type": "error", "error": body, "request_id": request_id}

    def error_event(self, error: TapError, request_id: str) -> bytes:
        return event(self.error_body(error, request_id), "error")

    def models(self, names: list[str]) -> bytes:
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return dump({"data": [_model(name) for name in names], "has_more": False, **ends})

    def model(self, name: str) -> bytes:
        return dump(_model(name))


def _refuse_unknown(top: Field) -> None:
    """Refuse what cannot be honoured and must not be ignored."""
    if top["thread"].value is not None:
        why = "no state is kept between requests; send the whole conversation"
        raise TapError("invalid", why, "thread", "thread_unsupported_request")
    top["compaction"].unset("the client edits the context; ask for a summary in a message")
    if top["context_management"].value is not None and top["context_management"]["edits"].value is not None:
        for edit in top["context_management"]["edits"].each():
            kept = edit["type"].text().startswith("clear_thinking_") and edit["keep"].value == "all"
            if not kept:
                raise edit["type"].wrong("the client edits the context; the only edit accepted is to keep all thoughts")
    top["stop_sequences"].unset("stop sequences are not supported: the policy ends its turn itself")
    top["output_format"].unset("answers in a given format are not supported: the policy is not constrained")
    if top["output_config"].value is not None:
        top["output_config"]["format"].unset(
            "answers in a given format are not supported: the policy is not constrained"
        )
    top["mcp_servers"].unset("MCP servers are not supported; offer their tools as custom tools")
    top["container"].unset("containers are not supported")


def _may_call(choice: Field) -> bool:
    if choice.value is None:
        return True
    kind = choice["type"].among(["auto", "none", "any", "tool"])
    if kind in ("any", "tool"):
        raise choice["type"].wrong(f"{kind!r} is not supported: the policy is not forced to call; use 'auto' or 'none'")
    return kind == "auto"


def _read_tools(tools: Field, found: list[str]) -> tuple[ToolSpec, ...]:
    """Read the tools, without deferred ones that no tool search has found: the provider hides those from its model."""
    if tools.value is None:
        return ()
    specs = []
    for tool in tools.each():
        if (kind := tool["type"]).value not in (None, "custom"):
            raise kind.wrong(
                f"{printable(kind.text())!r} is a tool that runs at the provider; only custom tools are served"
            )
        tool["input_schema"].mapping()
        specs.append((tool, read_tool(tool, "input_schema")))
    known = set(found)
    kept = [(tool, spec) for tool, spec in specs if tool["defer_loading"].value is not True or spec.name in known]
    return tuple(distinct(tools, kept))


def _texts(content: Field) -> Iterator[str]:
    """The texts of a string or a list of text blocks."""
    if content.value is None:
        return
    if isinstance(content.value, str):
        texts = [content.value]
    else:
        texts = [block["text"].text() for block in content.each() if block.block(["text"])]
    yield from (text for text in texts if not text.startswith(BILLING_PREFIX))


def _read_message(message: Field, builder: PartsBuilder) -> None:
    role = message["role"].among(["user", "assistant", "system"])
    content = message["content"]
    if role == "system":
        message["clear_at"].unset("messages are not removed; leave them out of later requests instead")
        for text in _texts(content):
            builder.text("system", text)
        return
    if isinstance(content.value, str):
        if role == "user":
            builder.text("user", content.value)
        else:
            builder.reply_text(content.value)
        return
    for block in content.each():
        if role == "assistant":
            _read_assistant(block, builder)
        elif block.block(["text", "tool_result"]) == "text":
            builder.text("user", block["text"].text())
        else:
            text = "\n".join(_result_texts(block["content"], builder))
            builder.result(block["tool_use_id"].text(), text, block["is_error"].flag())


def _result_texts(content: Field, builder: PartsBuilder) -> Iterator[str]:
    if content.value is None:
        return
    if isinstance(content.value, str):
        yield content.value
        return
    for block in content.each():
        if block.block(["text", "tool_reference"]) == "text":
            yield block["text"].text()
        else:
            builder.found_tools.append(name := block["tool_name"].text())
            yield f"Tool found: {name}"


def _read_assistant(block: Field, builder: PartsBuilder) -> None:
    kind = block["type"].value
    if isinstance(kind, str) and (
        kind == "server_tool_use" or kind.startswith("mcp_") or kind.endswith("_tool_result")
    ):
        raise block["type"].wrong(
            f"{printable(kind)!r} comes from a tool that runs at the provider; there are none here"
        )
    match block.block(["text", "thinking", "redacted_thinking", "tool_use"]):
        case "text":
            builder.reply_text(block["text"].text())
        case "thinking":
            builder.reply_thought(block["thinking"].text())
            builder.reply_signature(block["signature"].text(""))
        case "tool_use":
            arguments = block["input"].mapping()
            raw = arguments.get(INVALID_JSON)
            verbatim = raw if len(arguments) == 1 and isinstance(raw, str) else None
            name = block["name"].text()
            builder.reply_call(ToolCall(block["id"].text(), name, arguments if verbatim is None else verbatim))


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.thought:
        yield {"type": "thinking", "thinking": answer.thought, "signature": answer.id}
    if answer.text:
        yield {"type": "text", "text": answer.text}
    for call in answer.calls:
        arguments = {INVALID_JSON: call.arguments} if isinstance(call.arguments, str) else call.arguments
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    deltas: list[dict[str, str]]
    match block["type"]:
        case "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "text":
            empty = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        case _:
            empty = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": write_arguments(block["input"])}]
    yield _event("content_block_start", index=index, content_block=empty)
    for delta in deltas:
        yield _event("content_block_delta", index=index, delta=delta)
    yield _event("content_block_stop", index=index)


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def _message(answer: Answer, **fields: object) -> dict[str, Any]:
    head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}
    return {**head, "stop_sequence": None, **fields}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"thinking_tokens": answer.thought_tokens},
    }


def _model(name: str) -> dict[str, Any]:
    born = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": name, "display_name": name, "created_at": born, "lifecycle": "active"}
