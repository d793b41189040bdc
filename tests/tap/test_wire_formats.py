"""Reading wire formats: what looks different and shows a model the same is read the same, the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from pydantic import TypeAdapter

from slime_plugin.tap.payload import Payload, Reply, StopReason, TapError, Text, ToolCall, TooLongError, ToolResult
from slime_plugin.tap.wire import WIRE_FORMATS
from slime_plugin.tap.wire.wire_format import dump, event, read_arguments, too_deep
from tests.tap.http import saying

ANTHROPIC, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "ls", "input_schema": {"type": "object"}}


def read(path: str, *conversation: Any, **fields: Any) -> Payload:
    key = "input" if path == RESPONSES else "messages"
    return WIRE_FORMATS[path].read({"model": "m", key: list(conversation), **fields})


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return block("text", text=words, **fields)


def said(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


USE = block("tool_use", id="c1", name="ls", input={"a": 1, "b": [2]})
USE_2 = block("tool_use", id="c2", name="ls", input={})
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1,"b":[2]}'}}
CALL_2 = {"id": "c2", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
ITEM = block("function_call", call_id="c1", name="ls", arguments='{"a":1,"b":[2]}')
ITEM_2 = block("function_call", call_id="c2", name="ls", arguments="{}")
LS, LS_2 = ToolCall("c1", "ls", {"a": 1, "b": [2]}), ToolCall("c2", "ls", {})


def result(call: str, content: Any, **fields: Any) -> dict[str, Any]:
    return block("tool_result", tool_use_id=call, content=content, **fields)


def output(call: str, content: Any) -> dict[str, Any]:
    return block("function_call_output", call_id=call, output=content)


def tool(call: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


class TestTheSame:
    """Pairs of conversations that a model cannot tell apart."""

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([said("user", text("hi", cache_control={"type": "ephemeral"}))], [HI]),
            ([said("user", text(" \n"), text("hi"))], [HI]),
            ([HI, said("assistant", text("\n\n"), USE)], [HI, said("assistant", USE)]),
            ([HI, said("assistant", text(" "))], [HI]),
            ([HI, said("assistant")], [HI]),
            (
                [HI, said("assistant", block("redacted_thinking", data="x"), text("a"))],
                [HI, said("assistant", text("a"))],
            ),
            ([HI, said("assistant", text("a"))], [HI, {"role": "assistant", "content": "a"}]),
            ([HI, said("system", text("s", cache_control=None))], [HI, {"role": "system", "content": "s"}]),
            ([said("user", result("c1", "r"))], [said("user", result("c1", [text("r")], is_error=False))]),
            ([said("user", result("c1", ""))], [said("user", result("c1", []))]),
            (
                [said("assistant", USE, USE_2), said("user", result("c2", "2"), text("and"), result("c1", "1"))],
                [said("assistant", USE, USE_2), said("user", result("c1", "1"), text("and"), result("c2", "2"))],
            ),
            (
                [said("assistant", block("tool_use", name="ls", input={"b": [2], "a": 1.0}, id="c1"))],
                [said("assistant", USE)],
            ),
        ],
    )
    def test_anthropic(self, one: list[Any], other: list[Any]) -> None:
        assert read(ANTHROPIC, *one, HI) == read(ANTHROPIC, *other, HI)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([said("user", text("hi"), text("  "))], [HI]),
            ([HI, {"role": "assistant", "content": None}], [HI]),
            ([HI, {"role": "assistant", "content": "", "tool_calls": []}], [HI]),
            (
                [HI, {"role": "assistant", "content": "a", "reasoning": "t"}],
                [HI, {"role": "assistant", "content": [text("a")], "reasoning_content": "t"}],
            ),
            (
                [{"role": "assistant", "tool_calls": [CALL]}],
                [
                    {
                        "role": "assistant",
                        "content": "\n",
                        "tool_calls": [
                            CALL | {"function": {"name": "ls", "arguments": '{ "b" : [2], "a": 1.0 }', "extra": 1}}
                        ],
                    }
                ],
            ),
            (
                [{"role": "assistant", "tool_calls": [CALL, CALL_2]}, tool("c2", "2"), tool("c1", "1")],
                [{"role": "assistant", "tool_calls": [CALL, CALL_2]}, tool("c1", [text("1")]), tool("c2", "2")],
            ),
            ([{"role": "developer", "content": "s"}, HI], [{"role": "system", "content": [text("s")]}, HI]),
        ],
    )
    def test_chat(self, one: list[Any], other: list[Any]) -> None:
        assert read(CHAT, *one) == read(CHAT, *other)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([said("user", block("input_text", text="hi"))], [HI]),
            ([block("message", **HI)], [HI]),
            (
                [HI, ITEM, ITEM_2, output("c2", "2"), output("c1", "1")],
                [HI, ITEM, ITEM_2, output("c1", "1"), output("c2", "2")],
            ),
            ([HI, output("c1", [block("input_text", text="1")])], [HI, output("c1", "1")]),
            (
                [HI, said("assistant", block("output_text", text="a", annotations=[])), ITEM],
                [HI, {"role": "assistant", "content": "a"}, ITEM | {"arguments": '{"b": [2], "a": 1}'}],
            ),
        ],
    )
    def test_responses(self, one: list[Any], other: list[Any]) -> None:
        assert read(RESPONSES, *one) == read(RESPONSES, *other)


class TestParts:
    def test_system_of_anthropic(self) -> None:
        noise = text("x-anthropic-billing-header: v=1")
        payload = read(
            ANTHROPIC, said("system", text("c")), HI, said("system", text("d")), system=[noise, text("a"), text("b")]
        )
        assert payload.parts == (Text("system", "a\n\nb\n\nc"), Text("user", "hi"), Text("system", "d"))

    def test_system_of_chat(self) -> None:
        system = [{"role": role, "content": role} for role in ("system", "developer")]
        assert read(CHAT, *system, HI).parts == (Text("system", "system\n\ndeveloper"), Text("user", "hi"))

    def test_blocks_of_users_stay_apart(self) -> None:
        assert read(ANTHROPIC, said("user", text("a"), text("b")), HI).parts == tuple(
            Text("user", t) for t in ("a", "b", "hi")
        )

    def test_messages_of_the_assistant_stay_apart(self) -> None:
        a, b = ({"role": "assistant", "content": c} for c in "ab")
        for path in WIRE_FORMATS:
            assert read(path, HI, a, b, HI).parts[1:-1] == (Reply("a"), Reply("b"))

    def test_items_of_one_answer_are_one_reply(self) -> None:
        thought = block("reasoning", summary=[block("summary_text", text="t")])
        again = block(
            "reasoning", content=[block("reasoning_text", text="u")], summary=[block("summary_text", text="t")]
        )
        answer = said("assistant", block("output_text", text="a"))
        parts = read(RESPONSES, HI, thought, answer, ITEM, ITEM_2, again, answer).parts
        assert parts[1:] == (Reply("a", (LS, LS_2), "t"), Reply("a", (), "u"))

    def test_signature_without_thought(self) -> None:
        """Claude Code asks for thoughts to be omitted; the signature still says which turn it was."""
        parts = read(ANTHROPIC, HI, said("assistant", block("thinking", thinking="", signature="t1"), USE), HI).parts
        assert parts[1] == Reply("", (LS,), None, "t1")

    def test_failed_result(self) -> None:
        assert read(ANTHROPIC, said("user", result("c", "no", is_error=True))).parts == (ToolResult("c", "no", True),)

    def test_deferred_tools(self) -> None:
        """A tool is shown once a search has found it."""
        tools = [TOOL, TOOL | {"name": "rm", "defer_loading": True}]
        found = said("user", result("c1", [block("tool_reference", tool_name="rm")]))
        assert [spec.name for spec in read(ANTHROPIC, HI, tools=tools).tools] == ["ls"]
        payload = read(ANTHROPIC, found, tools=tools)
        assert [spec.name for spec in payload.tools] == ["ls", "rm"]
        assert payload.parts == (ToolResult("c1", "Tool found: rm"),)

    def test_tools_need_no_parameters(self) -> None:
        (spec,) = read(CHAT, HI, tools=[{"type": "function", "function": {"name": "ls"}}]).tools
        assert (spec.description, spec.parameters) == ("", {"type": "object", "properties": {}})

    @pytest.mark.parametrize("path", WIRE_FORMATS)
    def test_told_not_to_call(self, path: str) -> None:
        none: Any = {"type": "none"} if path == ANTHROPIC else "none"
        auto: Any = {"type": "auto", "disable_parallel_tool_use": True} if path == ANTHROPIC else "auto"
        assert not read(path, HI, tool_choice=none).may_call
        one = read(path, HI, tool_choice=auto, parallel_tool_calls=False)
        assert (one.may_call, one.one_call) == (True, True)
        assert not read(path, HI, parallel_tool_calls=True).one_call

    @pytest.mark.parametrize("path", WIRE_FORMATS)
    def test_how_to_sample_is_not_for_clients(self, path: str) -> None:
        assert read(path, HI, temperature=0.3, top_p=0.5, top_k=3, seed=1) == read(path, HI)


class TestRefused:
    @pytest.mark.parametrize(
        ("path", "fields", "param"),
        [
            (ANTHROPIC, {"stop_sequences": ["x"]}, "stop_sequences"),
            (ANTHROPIC, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
            (ANTHROPIC, {"tool_choice": {"type": "any"}}, "tool_choice.type"),
            (ANTHROPIC, {"tool_choice": {"type": "tool", "name": "ls"}}, "tool_choice.type"),
            (ANTHROPIC, {"tools": [block("web_search_20250305", name="web_search")]}, "tools[0].type"),
            (ANTHROPIC, {"tools": [TOOL, TOOL]}, "tools[1].name"),
            (ANTHROPIC, {"tools": [{"name": "ls"}]}, "tools[0].input_schema"),
            (ANTHROPIC, {"mcp_servers": [{}]}, "mcp_servers"),
            (ANTHROPIC, {"max_tokens": 0}, "max_tokens"),
            (ANTHROPIC, {"max_tokens": True}, "max_tokens"),
            (ANTHROPIC, {"stream": "yes"}, "stream"),
            (ANTHROPIC, {"system": [block("image")]}, "system[0].type"),
            (ANTHROPIC, {"system": 1}, "system"),
            (ANTHROPIC, {"model": None}, "model"),
            (ANTHROPIC, {"messages": "hi"}, "messages"),
            (ANTHROPIC, {"messages": []}, "messages"),
            (ANTHROPIC, {"messages": [said("user", text(" "))]}, "messages"),
            (ANTHROPIC, {"messages": [HI, "hi"]}, "messages[1]"),
            (ANTHROPIC, {"messages": [HI, said("assistant", text("I"))]}, "messages"),
            (ANTHROPIC, {"messages": [HI, said("system", text("s")) | {"clear_at": "x"}]}, "messages[1].clear_at"),
            (ANTHROPIC, {"thread": {"type": "create"}}, "thread"),
            (ANTHROPIC, {"compaction": {"type": "summarize"}}, "compaction"),
            (
                ANTHROPIC,
                {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
                "context_management.edits[0].type",
            ),
            (ANTHROPIC, {"messages": [{"role": "tool"}]}, "messages[0].role"),
            (ANTHROPIC, {"messages": [HI, HI, said("user", block("picture"))]}, "messages[2].content[0].type"),
            (ANTHROPIC, {"messages": [said("user", block("document"))]}, "messages[0].content[0].type"),
            (ANTHROPIC, {"messages": [said("assistant", block("server_tool_use"))]}, "messages[0].content[0].type"),
            (
                ANTHROPIC,
                {"messages": [said("user", result("c", [block("image")]))]},
                "messages[0].content[0].content[0].type",
            ),
            (ANTHROPIC, {"messages": [said("user", USE)]}, "messages[0].content[0].type"),
            (ANTHROPIC, {"messages": [said("assistant", USE | {"input": 1})]}, "messages[0].content[0].input"),
            (CHAT, {"n": 2}, "n"),
            (CHAT, {"stop": "x"}, "stop"),
            (CHAT, {"logprobs": True}, "logprobs"),
            (CHAT, {"top_logprobs": 3}, "top_logprobs"),
            (CHAT, {"response_format": {"type": "json_object"}}, "response_format.type"),
            (CHAT, {"tool_choice": "required"}, "tool_choice"),
            (CHAT, {"tool_choice": {"type": "function", "function": {"name": "ls"}}}, "tool_choice"),
            (CHAT, {"functions": [{}]}, "functions"),
            (CHAT, {"web_search_options": {}}, "web_search_options"),
            (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type"),
            (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
            (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
            (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
            (CHAT, {"messages": [said("user", block("input_audio"))]}, "messages[0].content[0].type"),
            (
                CHAT,
                {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
                "messages[0].tool_calls[0].type",
            ),
            (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
            (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
            (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.type"),
            (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include[0]"),
            (RESPONSES, {"background": True}, "background"),
            (RESPONSES, {"truncation": "auto"}, "truncation"),
            (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
            (RESPONSES, {"input": [block("item_reference", id="x")]}, "input[0].type"),
            (RESPONSES, {"input": [said("user", block("input_image"))]}, "input[0].content[0].type"),
            (RESPONSES, {"input": [block("function_call", name="ls", arguments="{}")]}, "input[0].call_id"),
        ],
    )
    def test_where(self, path: str, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(TapError) as caught:
            read(path, HI, **fields)
        assert (caught.value.kind, caught.value.param) == ("invalid", param)

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            (ANTHROPIC, {"stop_sequences": [], "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
            (ANTHROPIC, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
            (CHAT, {"n": 1, "stop": None, "logprobs": False, "response_format": {"type": "text"}, "tools": []}),
            (
                RESPONSES,
                {"store": True, "text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"]},
            ),
        ],
    )
    def test_not(self, path: str, fields: dict[str, Any]) -> None:
        assert read(path, HI, **fields) == read(path, HI)


def test_what_clients_of_threads_look_for() -> None:
    with pytest.raises(TapError) as caught:
        read(ANTHROPIC, HI, thread={"type": "continue", "previous_message_id": "msg_1"})
    status, body = WIRE_FORMATS[ANTHROPIC].error(caught.value, "req_1")
    assert (status, json.loads(body)["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


def test_lines_of_events_end_where_the_standard_ends_them() -> None:
    words = "one\u2028two\u2029three\u0085four\nfive\rsix"
    raw = event({"text": words})
    assert json.loads(raw.removeprefix(b"data: ")) == {"text": words}
    assert raw.decode().splitlines() == raw.decode().split("\n")[:-1]


def test_too_long_in_the_words_agents_look_for() -> None:
    error = TooLongError(205_000, 200_000)
    status, body = WIRE_FORMATS[ANTHROPIC].error(error, "req_1")
    assert (status, json.loads(body)) == (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "prompt is too long: 205000 tokens > 200000 maximum",
            },
            "request_id": "req_1",
        },
    )
    status, body = WIRE_FORMATS[CHAT].error(error, "req_1")
    told = json.loads(body)["error"]
    assert (status, told["code"]) == (400, "context_length_exceeded")
    assert (
        "maximum context length is 200000 tokens. However, your messages resulted in 205000 tokens" in told["message"]
    )


def test_depth_is_measured_without_depth() -> None:
    deep: Any = []
    for _ in range(10**5):
        deep = [deep]
    assert too_deep(deep)
    assert not too_deep({"a": [{}]}, limit=3)
    assert too_deep({"a": [{}]}, limit=2)
    assert read_arguments("[" * 10**5) == "[" * 10**5
    deep_arguments = '{"a":' * 100 + "1" + "}" * 100
    assert read_arguments(deep_arguments) == deep_arguments
    assert dump({"a": 1}) == b'{"a":1}'


OFFICIAL: dict[str, tuple[Any, Any]] = {
    ANTHROPIC: (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    CHAT: (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    RESPONSES: (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
}


@pytest.mark.parametrize("finish", ["stop", "calls", "length", "context"])
@pytest.mark.parametrize("path", WIRE_FORMATS)
def test_answers_are_of_the_types_of_the_official_packages(path: str, finish: StopReason) -> None:
    """Validated: the clients themselves take whatever comes."""
    answer = saying("I look.", LS, LS_2, thought="Where?", finish=finish)
    whole, events = (TypeAdapter(kind) for kind in OFFICIAL[path])
    whole.validate_json(WIRE_FORMATS[path].whole(answer))
    stream = b"".join(WIRE_FORMATS[path].events(answer)).decode()
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    for text in data:
        if text != "[DONE]":
            events.validate_json(text)
    assert len(data) > 5
