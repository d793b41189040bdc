"""OpenAI's Chat Completions API: ``/v1/chat/completions``.

Thoughts are in ``reasoning_content``, as with servers of open models; ``reasoning`` is read too. They come back without
a signature: this format has no field for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugin.tap.payload import Answer, Payload, StopReason, TapError, ToolCall
from slime_plugin.tap.wire.fields import Field, require_parts
from slime_plugin.tap.wire.openai import (
    OpenAI,
    may_call,
    read_function_tools,
    refuse_response_format,
    require_function,
)
from slime_plugin.tap.wire.parts_builder import ParseCache, PartsBuilder
from slime_plugin.tap.wire.wire_format import NOTHING, dump, event, read_arguments, write_arguments

FINISH_REASONS: dict[StopReason, str] = {"stop": "stop", "calls": "tool_calls", "length": "length", "context": "length"}


class ChatCompletions(OpenAI):
    messages_field = "messages"

    def read(self, body: Mapping[str, Any], cache: ParseCache | None = None) -> Payload:
        top = Field(body)
        _refuse_unknown(top)
        builder = PartsBuilder("chat", cache)
        for message in builder.uncached(top["messages"]):
            _read_message(message, builder)
            builder.end_reply()
        limit = top["max_completion_tokens"].count()
        return Payload(
            model=top["model"].name(),
            parts=require_parts(builder.parts(), top["messages"]),
            tools=read_function_tools(top["tools"], "function"),
            max_tokens=top["max_tokens"].count() if limit is None else limit,
            stream=top["stream"].flag(),
            may_call=may_call(top["tool_choice"]),
            one_call=top["parallel_tool_calls"].value is False,
        )

    def echo(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        options = Field(body)["stream_options"]
        return {"include_usage": options.value is not None and options["include_usage"].flag()}

    def whole(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        message["refusal"] = None
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": FINISH_REASONS[answer.finish], "logprobs": None}
        return dump(_head(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)})

    def events(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> Iterator[bytes]:
        head = _head(answer, "chat.completion.chunk")
        if echo.get("include_usage"):
            head["usage"] = None

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return event(head | {"choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        if answer.thought:
            yield chunk({"reasoning_content": answer.thought})
        if answer.text:
            yield chunk({"content": answer.text})
        for index, call in enumerate(answer.calls):
            whole = _call(call)
            arguments = whole["function"]["arguments"]
            opened = whole["function"] | {"arguments": ""}
            yield chunk({"tool_calls": [{"index": index, **whole, "function": opened}]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield chunk({}, FINISH_REASONS[answer.finish])
        if echo.get("include_usage"):
            yield event(head | {"choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error_event(self, error: TapError, request_id: str) -> bytes:
        return event(self.error_body(error, request_id))


def _refuse_unknown(top: Field) -> None:
    """Refuse what cannot be honoured and must not be ignored."""
    top["n"].unset("only one answer per request is supported", 1)
    top["stop"].unset("stop strings are not supported: the policy ends its turn itself")
    top["logprobs"].unset("log-probabilities are not returned")
    top["top_logprobs"].unset("log-probabilities are not returned", 0)
    top["logit_bias"].unset("the policy's logits are not changed")
    top["modalities"].unset("answers are text", ["text"])
    top["audio"].unset("answers are text")
    if top["web_search_options"].value is not None:
        raise top["web_search_options"].wrong("web search is not supported")
    for old in ("functions", "function_call"):
        top[old].unset("use tools and tool_choice instead")
    refuse_response_format(top["response_format"])


def _read_message(message: Field, builder: PartsBuilder) -> None:
    role = message["role"]
    if role.value == "function":
        raise role.wrong("'function' is no longer a role; results have the role 'tool' and a tool_call_id")
    match role.among(["system", "developer", "user", "assistant", "tool"]):
        case "assistant":
            _read_assistant(message, builder)
        case "tool":
            builder.result(message["tool_call_id"].text(), "\n".join(_texts(message["content"])))
        case "user":
            for text in _texts(message["content"]):
                builder.text("user", text)
        case _:
            for text in _texts(message["content"]):
                builder.text("system", text)


def _texts(content: Field) -> list[str]:
    if isinstance(content.value, str):
        return [content.value]
    return [part["text"].text() for part in content.each() if part.block(["text"])]


def _read_assistant(message: Field, builder: PartsBuilder) -> None:
    message["function_call"].unset("use tool_calls instead")
    message["audio"].unset("audio is refused: the model behind this provider reads only text")
    builder.reply_thought(message["reasoning_content"].text("") or message["reasoning"].text(""))
    content = message["content"]
    if isinstance(content.value, str):
        builder.reply_text(content.value)
    elif content.value is not None:
        for part in content.each():
            kind = part.block(["text", "refusal"])
            builder.reply_text(part[kind].text())
    if message["tool_calls"].value is not None:
        for call in message["tool_calls"].each():
            require_function(call)
            function = call["function"]
            arguments = read_arguments(function["arguments"].text())
            builder.reply_call(ToolCall(call["id"].text(), function["name"].text(), arguments))


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": write_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": answer.thought_tokens},
    }
