"""Answers, out and back again: what is said comes back as it was, in one piece or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.tap.payload import Answer, Reply, ToolCall
from slime_plugin.tap.wire import WIRE_FORMATS
from slime_plugin.tap.wire.wire_format import read_arguments
from tests.tap.http import saying

ANTHROPIC, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
HI = {"role": "user", "content": "hi"}

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
objects = st.dictionaries(
    st.text().filter(lambda key: key != "INVALID_JSON"),
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
    ),
    max_size=4,
)
arguments = objects | st.text().filter(lambda words: isinstance(read_arguments(words), str))


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    names = draw(st.lists(st.text(min_size=1), max_size=3))
    calls = tuple(ToolCall(f"c{index}", name, draw(arguments)) for index, name in enumerate(names))
    thought = draw(st.none() | st.text())
    return saying(draw(st.text()), *calls, thought=thought, finish=draw(st.sampled_from(["stop", "calls", "length"])))


def replayed(path: str, body: dict[str, Any]) -> list[Any]:
    """As a client that keeps what it got sends it again."""
    match path:
        case "/v1/messages":
            return [{"role": "assistant", "content": body["content"]}]
        case "/v1/chat/completions":
            return [body["choices"][0]["message"]]
        case _:
            return list(body["output"])


@pytest.mark.parametrize("path", WIRE_FORMATS)
@given(answer=answers())
def test_what_is_said_comes_back(path: str, answer: Answer) -> None:
    body = json.loads(WIRE_FORMATS[path].whole(answer))
    key = "input" if path == RESPONSES else "messages"
    parts = WIRE_FORMATS[path].read({"model": "m", key: [HI, *replayed(path, body), HI]}).parts[1:-1]
    text = answer.text if answer.text.strip() else ""
    thought = answer.thought if answer.thought and answer.thought.strip() else None
    if not (text or answer.calls or thought) and not parts:
        return
    (reply,) = parts
    assert isinstance(reply, Reply)
    assert (reply.text, reply.calls, reply.thought) == (text, answer.calls, thought)
    assert reply.signature in ((None,) if path == CHAT else (answer.id, None))
    if thought and path != CHAT:
        assert reply.signature == answer.id


def events(stream: Iterable[bytes]) -> list[tuple[str | None, Any]]:
    """Name and data of every event, by the rules of the HTML standard as far as they are used."""
    found = []
    for chunk in b"".join(stream).decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in chunk.split("\n"))
        data = lines["data"]
        found.append((lines.get("event"), None if data == "[DONE]" else json.loads(data)))
    return found


def gather_anthropic(stream: list[tuple[str | None, Any]]) -> Any:
    message: Any = None
    unparsed: dict[int, str] = {}
    for name, data in stream:
        assert name == data["type"]
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"])
            case "content_block_delta":
                delta, target = data["delta"], message["content"][data["index"]]
                kind = delta.pop("type")
                if kind == "input_json_delta":
                    unparsed[data["index"]] = unparsed.get(data["index"], "") + delta["partial_json"]
                else:
                    ((key, value),) = delta.items()
                    assert kind == f"{key}_delta"
                    target[key] += value
            case "content_block_stop":
                if data["index"] in unparsed:
                    message["content"][data["index"]]["input"] = json.loads(unparsed[data["index"]])
            case "message_delta":
                message |= data["delta"]
                message["usage"] |= data["usage"]
    assert stream[-1][0] == "message_stop"
    return message


def gather_chat(stream: list[tuple[str | None, Any]]) -> Any:
    assert stream[-1] == (None, None)
    message: dict[str, Any] = {"content": "", "refusal": None}
    whole: dict[str, Any] = {}
    finish = None
    for name, chunk in stream[:-1]:
        assert name is None
        whole |= {key: chunk[key] for key in ("id", "created", "model", "usage")}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("role", "content", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", []):
                index = call.pop("index")
                calls = message.setdefault("tool_calls", [])
                if index == len(calls):
                    calls.append(call)
                else:
                    calls[index]["function"]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"]
    if not message["content"] and "tool_calls" in message:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return whole | {"object": "chat.completion", "choices": [choice]}


def gather_responses(stream: list[tuple[str | None, Any]]) -> Any:
    """The last event has it all; what the others add up to must be the same."""
    items: list[Any] = []
    for number, (name, data) in enumerate(stream):
        assert (name, number) == (data["type"], data["sequence_number"])
        kind = data["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert data["output_index"] == len(items)
            items.append(data["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(data["part"])
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += data["delta"]
        elif kind.endswith(".delta"):
            items[-1]["content"][data["content_index"]]["text"] += data["delta"]
        elif kind == "output_item.done":
            items[-1]["status"] = data["item"]["status"]
            assert items[-1] == data["item"]
        if "item_id" in data:
            assert data["item_id"] == items[-1]["id"]
    last = stream[-1][1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return last["response"]


GATHER = {ANTHROPIC: gather_anthropic, CHAT: gather_chat, RESPONSES: gather_responses}


@pytest.mark.parametrize("path", WIRE_FORMATS)
@given(answer=answers())
def test_a_stream_says_what_a_whole_answer_says(path: str, answer: Answer) -> None:
    wire_format = WIRE_FORMATS[path]
    echo = {"include_usage": True} if path == CHAT else {}
    assert GATHER[path](events(wire_format.events(answer, echo))) == json.loads(wire_format.whole(answer, echo))


@pytest.mark.parametrize("path", WIRE_FORMATS)
def test_anything_a_policy_says_can_be_sent(path: str) -> None:
    """Also numbers and characters that are no JSON to orjson."""
    answer = saying("half \ud83d", ToolCall("c", "f", {"n": 10**40, "x": float("inf")}), ToolCall("d", "f", '{"a": '))
    assert WIRE_FORMATS[path].whole(answer)
    assert list(WIRE_FORMATS[path].events(answer))
