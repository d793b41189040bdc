"""OpenAI's Responses API: ``/v1/responses``, without stored state: a request holds the whole conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugin.tap.payload import Answer, Payload, TapError, ToolCall
from slime_plugin.tap.wire.fields import Field, require_parts
from slime_plugin.tap.wire.openai import OpenAI, may_call, read_function_tools, refuse_response_format
from slime_plugin.tap.wire.parts_builder import ParseCache, PartsBuilder
from slime_plugin.tap.wire.wire_format import NOTHING, dump, event, read_arguments, write_arguments

ECHOED = ("instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "metadata", "reasoning")
MAX_ECHOED_BYTES = 2**16
"""For each of these fields: every answer repeats them, and a stream three times."""
ITEM_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""Order of the items of one answer. An item of a lower rank starts the next answer."""


class Responses(OpenAI):
    messages_field = "input"

    def read(self, body: Mapping[str, Any], cache: ParseCache | None = None) -> Payload:
        top = Field(body)
        _refuse_unknown(top)
        builder = PartsBuilder("responses", cache)
        builder.text("system", top["instructions"].text(""))
        if isinstance(top["input"].value, str):
            builder.text("user", top["input"].value)
        else:
            _read_items(builder.uncached(top["input"]), builder)
        return Payload(
            model=top["model"].name(),
            parts=require_parts(builder.parts(), top["input"]),
            tools=read_function_tools(top["tools"]),
            max_tokens=top["max_output_tokens"].count(),
            stream=top["stream"].flag(),
            may_call=may_call(top["tool_choice"]),
            one_call=top["parallel_tool_calls"].value is False,
        )

    def echo(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        shown = {key: body[key] for key in ECHOED if body.get(key) is not None}
        return {key: value for key, value in shown.items() if len(dump(value)) <= MAX_ECHOED_BYTES}

    def whole(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> bytes:
        return dump(_finished(answer, echo))

    def events(self, answer: Answer, echo: Mapping[str, Any] = NOTHING) -> Iterator[bytes]:
        finished = _finished(answer, echo)
        opened = finished | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        stream: list[dict[str, Any]] = [
            {"type": "response.created", "response": opened},
            {"type": "response.in_progress", "response": opened},
        ]
        for index, item in enumerate(finished["output"]):
            stream += [fields | {"output_index": index} for fields in _item_events(item)]
        stream.append({"type": f"response.{finished['status']}", "response": finished})
        for number, fields in enumerate(stream):
            yield event(fields | {"sequence_number": number}, fields["type"])

    def error_event(self, error: TapError, request_id: str) -> bytes:
        fields = self.error_body(error, request_id)["error"]
        return event({**fields, "type": "error", "sequence_number": 0, "error": fields}, "error")


def _refuse_unknown(top: Field) -> None:
    """Refuse what cannot be honoured and must not be ignored."""
    for key in ("previous_response_id", "conversation", "prompt"):
        top[key].unset("no state is kept between requests; send the whole conversation as input")
    top["background"].unset("background responses are not supported")
    top["top_logprobs"].unset("log-probabilities are not returned", 0)
    top["truncation"].unset("contexts are not truncated; one that is too long is refused", "disabled")
    top["context_management"].unset("the client edits the context")
    if top["include"].value is not None:
        for wanted in top["include"].each():
            if wanted.text() == "message.output_text.logprobs":
                raise wanted.wrong("log-probabilities are not returned")
    if top["text"].value is not None:
        refuse_response_format(top["text"]["format"])


def _read_items(items: Iterator[Field], builder: PartsBuilder) -> None:
    last = -1  # rank of the previous item in ITEM_ORDER, if it is the assistant's
    for item in items:
        if item["type"].value == "item_reference":
            raise item["type"].wrong("no state is kept between requests; set store to false, and send items whole")
        kind = "message" if item["type"].value is None else item.block([*ITEM_ORDER, "function_call_output"])
        role = item["role"].among(["system", "developer", "user", "assistant"]) if kind == "message" else None
        if kind == "function_call_output":
            builder.result(item["call_id"].text(), "\n".join(_texts(item["output"], ["input_text", "output_text"])))
            last = -1
        elif role is not None and role != "assistant":
            for text in _texts(item["content"], ["input_text", "output_text", "text"]):
                builder.text("user" if role == "user" else "system", text)
            last = -1
        else:
            rank = ITEM_ORDER[kind]
            if rank < last or rank == last < ITEM_ORDER["function_call"]:
                builder.end_reply()
            _read_reply_item(item, kind, builder)
            last = rank
    builder.end_reply()


def _read_reply_item(item: Field, kind: str, builder: PartsBuilder) -> None:
    """An item of an answer. Its id says which answer it comes from, if the client kept it."""
    prefix, _, signature = item["id"].text("").partition("_")
    if prefix in ("rs", "msg", "fc"):
        builder.reply_signature(signature.rpartition("_")[0] if prefix == "fc" else signature)
    match kind:
        case "reasoning":
            parts = [part for key in ("content", "summary") if item[key].value for part in item[key].each()]
            kinds = [part.block(["reasoning_text", "summary_text", "text"]) for part in parts]
            texts = [part["text"].text() for part, kind in zip(parts, kinds, strict=True) if kind == kinds[0]]
            builder.reply_thought("\n".join(texts))
            builder.reply_signature(item["encrypted_content"].text(""))
        case "message":
            for text in _texts(item["content"], ["output_text", "input_text", "text", "refusal"]):
                builder.reply_text(text)
        case _:
            arguments = read_arguments(item["arguments"].text())
            builder.reply_call(ToolCall(item["call_id"].text(), item["name"].text(), arguments))


def _texts(content: Field, kinds: list[str]) -> list[str]:
    if isinstance(content.value, str):
        return [content.value]
    return [part["refusal" if part.block(kinds) == "refusal" else "text"].text() for part in content.each()]


def _finished(answer: Answer, echo: Mapping[str, Any]) -> dict[str, Any]:
    cut = answer.finish in ("length", "context")
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": _items(answer, "incomplete" if cut else "completed"),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        **echo,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def _items(answer: Answer, last: str) -> list[dict[str, Any]]:
    """The output items of an answer; ``last`` is the status of the last one."""
    items: list[dict[str, Any]] = []
    if answer.thought:
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": answer.thought}]
        head = {"type": "reasoning", "id": f"rs_{answer.id}", "status": "completed"}
        items.append({**head, "summary": [], "content": content, "encrypted_content": answer.id})
    if answer.text:
        content = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{answer.id}", "status": "completed"}
        items.append({**head, "role": "assistant", "content": content})
    for index, call in enumerate(answer.calls):
        head = {"type": "function_call", "id": f"fc_{answer.id}_{index}", "status": "completed"}
        arguments = write_arguments(call.arguments)
        items.append({**head, "call_id": call.id, "name": call.name, "arguments": arguments})
    if items:
        items[-1]["status"] = last
    return items


def _item_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an item, without the numbers that all events of a stream have."""
    where = {"item_id": item["id"]}
    opened = item | {"status": "in_progress"}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "item": opened | {"arguments": ""}}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **where, **done}
    else:
        yield {"type": "response.output_item.added", "item": opened | {"content": []}}
        where["content_index"] = 0
        (part,) = item["content"]
        kind = f"response.{part['type']}"
        probabilities: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **where, "part": part | {"text": ""}}
        yield {"type": f"{kind}.delta", **where, "delta": part["text"], **probabilities}
        yield {"type": f"{kind}.done", **where, "text": part["text"], **probabilities}
        yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "item": item}
