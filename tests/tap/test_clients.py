"""The providers' own clients against the server, over a real socket: what agents are built on must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import MessageParam, ToolParam
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputParam

from slime_plugin.tap.limits import ServerSettings
from slime_plugin.tap.payload import Answer, ClientRequest, Reply, TapError, Text, ToolCall, TooLongError, ToolResult
from tests.tap.http import MODEL, TOKEN, Policy, Serving, saying, serving

LS = ToolCall("c1", "ls", {"path": "/tmp", "depth": 2})
CAT = ToolCall("c2", "cat", {"files": ["a", "é"]})
TURN = saying("I look.", LS, CAT, thought="Where is it?")
LS_TOOL: ToolParam = {
    "name": "ls",
    "description": "Lists.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
LS_FUNCTION: dict[str, Any] = {"name": "ls", "parameters": LS_TOOL["input_schema"]}
HI: MessageParam = {"role": "user", "content": "hi"}
HELLO: ChatCompletionMessageParam = {"role": "user", "content": "hi"}


class Stage:
    """A server whose policy a test can exchange, with both clients."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key=TOKEN, max_retries=0)
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0)

    def plays(self, policy: Policy | Answer) -> None:
        self.server.rollout.policy = (lambda ask: policy) if isinstance(policy, Answer) else policy

    @property
    def last(self) -> ClientRequest:
        return self.server.rollout.asked[-1]


@pytest.fixture(scope="module")
def house() -> Iterator[Stage]:
    with serving(settings=ServerSettings(heartbeat_s=0.05)) as server:
        stage = Stage(server)
        with stage.anthropic, stage.openai:
            yield stage


@pytest.fixture
def stage(house: Stage) -> Stage:
    house.plays(TURN)
    house.server.rollout.asked.clear()
    return house


def slowly(answer: Answer | TapError) -> Policy:
    """After a few signs of life."""

    async def policy(ask: ClientRequest) -> Answer:
        await asyncio.sleep(0.2)
        if isinstance(answer, TapError):
            raise answer
        return answer

    return policy


def fails(error: Exception) -> Policy:
    def policy(ask: ClientRequest) -> Answer:
        raise error

    return policy


def in_turn(*policies: Policy) -> Policy:
    left = list(policies)

    def policy(ask: ClientRequest) -> Answer | Awaitable[Answer]:
        return left.pop(0)(ask)

    return policy


class TestAnthropic:
    def ask(self, stage: Stage, stream: bool, **fields: Any) -> Any:
        body: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [HI], **fields}
        if not stream:
            return stage.anthropic.messages.create(**body)
        with stage.anthropic.messages.stream(**body) as events:
            return events.get_final_message()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_turn(self, stage: Stage, stream: bool) -> None:
        message = self.ask(stage, stream, tools=[LS_TOOL])
        thought, text, *calls = message.content
        assert (thought.type, thought.thinking, thought.signature) == ("thinking", "Where is it?", "t1")
        assert (text.type, text.text) == ("text", "I look.")
        assert [(call.id, call.name, call.input) for call in calls] == [(c.id, c.name, c.arguments) for c in (LS, CAT)]
        assert (message.stop_reason, message.model) == ("tool_use", MODEL)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (100, 20)
        assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
        payload = stage.last.payload
        assert (payload.model, payload.max_tokens, payload.stream) == ("m", 50, stream)
        assert [tool.to_json()["function"]["parameters"] for tool in payload.tools] == [LS_TOOL["input_schema"]]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("finish", "reason"),
        [("stop", "end_turn"), ("length", "max_tokens"), ("context", "model_context_window_exceeded")],
    )
    def test_why_it_stopped(self, stage: Stage, stream: bool, finish: Any, reason: str) -> None:
        stage.plays(saying("so", finish=finish))
        assert self.ask(stage, stream).stop_reason == reason

    def test_a_conversation(self, stage: Stage) -> None:
        """What the client gives back is what it was given."""
        turn = self.ask(stage, stream=True)
        results = [{"type": "tool_result", "tool_use_id": call, "content": call} for call in ("c2", "c1")]
        replayed = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in turn.content]}
        messages = [HI, replayed, {"role": "user", "content": results}, {"role": "system", "content": "Be quick."}]
        self.ask(stage, stream=False, messages=messages, system="Be good.")
        assert stage.last.payload.parts == (
            Text("system", "Be good."),
            Text("user", "hi"),
            Reply("I look.", (LS, CAT), "Where is it?", "t1"),
            ToolResult("c1", "c1"),
            ToolResult("c2", "c2"),
            Text("system", "Be quick."),
        )

    def test_it_waits(self, stage: Stage) -> None:
        stage.plays(slowly(TURN))
        assert self.ask(stage, stream=True).stop_reason == "tool_use"

    def test_an_error_after_signs_of_life(self, stage: Stage) -> None:
        stage.plays(slowly(TapError("overloaded", "busy")))
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            self.ask(stage, stream=True)

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_runner_of_tools_sends_everything(self, stage: Stage, stream: bool) -> None:
        """It would rather leave the conversation with the provider; told that it cannot, it sends the whole of it."""

        @anthropic.beta_tool
        def ls(path: str, depth: int) -> str:
            """Lists."""
            return f"{path} at {depth}"

        stage.plays(in_turn(lambda ask: saying("I look.", LS), lambda ask: saying("Found.")))
        runner: Any = stage.anthropic.beta.messages.tool_runner(
            model="m", max_tokens=50, messages=[{"role": "user", "content": "hi"}], tools=[ls], stream=stream
        )
        *_, last = [answer.get_final_message() if stream else answer for answer in runner]
        assert last.content[0].text == "Found."
        assert stage.last.payload.parts == (
            Text("user", "hi"),
            Reply("I look.", (LS,), None, None),
            ToolResult("c1", "/tmp at 2"),
        )

    def test_count(self, stage: Stage) -> None:
        assert stage.anthropic.messages.count_tokens(model="m", messages=[HI], system="123").input_tokens == 5

    def test_models(self, stage: Stage) -> None:
        assert [model.id for model in stage.anthropic.models.list()] == [MODEL]
        model = stage.anthropic.models.retrieve(MODEL)
        assert (model.display_name, model.lifecycle) == (MODEL, "active")
        with pytest.raises(anthropic.NotFoundError):
            stage.anthropic.models.retrieve("another")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("error", "expected", "message"),
        [
            (TapError("invalid", "no"), anthropic.BadRequestError, "invalid_request_error"),
            (TooLongError(9, 5), anthropic.BadRequestError, "prompt is too long: 9 tokens > 5 maximum"),
            (TapError("authentication", "no"), anthropic.AuthenticationError, "authentication_error"),
            (TapError("overloaded", "no"), anthropic.InternalServerError, "overloaded_error"),
            (TapError("slow", "no"), anthropic.APIStatusError, "408"),
            (TapError("internal", "no"), anthropic.InternalServerError, "api_error"),
        ],
    )
    def test_errors(self, stage: Stage, stream: bool, error: TapError, expected: Any, message: str) -> None:
        stage.plays(fails(error))
        with pytest.raises(expected, match=message) as caught:
            self.ask(stage, stream)
        assert caught.value.request_id.startswith("req_")

    def test_a_bug_is_not_told(self, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
        stage.plays(fails(RuntimeError("secret")))
        with pytest.raises(anthropic.InternalServerError) as caught:
            self.ask(stage, stream=True)
        assert "secret" not in str(caught.value)
        assert "RuntimeError: secret" in caplog.text

    def test_wrong_token(self, stage: Stage) -> None:
        with (
            anthropic.Anthropic(base_url=stage.server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(model="m", max_tokens=1, messages=[HI])
        assert not stage.server.rollout.asked

    def test_bearer_token(self, stage: Stage) -> None:
        with anthropic.Anthropic(base_url=stage.server.url, auth_token=TOKEN) as client:
            assert client.messages.create(model="m", max_tokens=1, messages=[HI]).role == "assistant"

    def test_overload_is_tried_again(self, stage: Stage) -> None:
        stage.plays(in_turn(fails(TapError("overloaded", "busy")), lambda ask: TURN))
        client = stage.anthropic.with_options(max_retries=1)
        assert client.messages.create(model="m", max_tokens=1, messages=[HI]).stop_reason == "tool_use"
        first, second = stage.server.rollout.asked
        assert first.digest == second.digest

    def test_images_are_refused(self, stage: Stage) -> None:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type: image"):
            self.ask(stage, stream=False, messages=[{"role": "user", "content": [image]}])

    def test_async(self, stage: Stage) -> None:
        async def ask() -> Any:
            async with (
                anthropic.AsyncAnthropic(base_url=stage.server.url, api_key=TOKEN) as client,
                client.messages.stream(model="m", max_tokens=1, messages=[HI]) as events,
            ):
                return await events.get_final_message()

        assert asyncio.run(ask()).stop_reason == "tool_use"


class TestChat:
    def ask(self, stage: Stage, stream: bool, **fields: Any) -> Any:
        body: dict[str, Any] = {"model": "m", "messages": [HELLO], **fields}
        if not stream:
            return stage.openai.chat.completions.create(**body)
        with stage.openai.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
            return events.get_final_completion()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_turn(self, stage: Stage, stream: bool) -> None:
        completion = self.ask(
            stage, stream, tools=[{"type": "function", "function": LS_FUNCTION}], max_completion_tokens=50
        )
        (choice,) = completion.choices
        assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "Where is it?")
        names = [(call.id, call.function.name) for call in choice.message.tool_calls]
        assert names == [("c1", "ls"), ("c2", "cat")]
        assert choice.message.tool_calls[1].function.arguments == '{"files":["a","é"]}'
        assert (choice.finish_reason, completion.id) == ("tool_calls", "chatcmpl-t1")
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 20, 120)
        assert usage.completion_tokens_details.reasoning_tokens == 5
        assert (stage.last.payload.max_tokens, len(stage.last.payload.tools)) == (50, 1)

    def test_no_usage_unless_asked(self, stage: Stage) -> None:
        chunks = list(stage.openai.chat.completions.create(model="m", messages=[HELLO], stream=True))
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)

    @pytest.mark.parametrize("stream", [False, True])
    def test_why_it_stopped(self, stage: Stage, stream: bool) -> None:
        stage.plays(saying("so"))
        assert self.ask(stage, stream).choices[0].finish_reason == "stop"
        stage.plays(saying("so", finish="length"))
        assert stage.openai.chat.completions.create(model="m", messages=[HELLO]).choices[0].finish_reason == "length"

    def test_a_conversation(self, stage: Stage) -> None:
        turn = self.ask(stage, stream=True).choices[0].message.model_dump(exclude_none=True)
        results = [{"role": "tool", "tool_call_id": call, "content": call} for call in ("c2", "c1")]
        system = [{"role": "developer", "content": "Be good."}, {"role": "system", "content": "Be quick."}]
        self.ask(stage, stream=False, messages=[*system, HELLO, turn, *results, system[1]])
        assert stage.last.payload.parts == (
            Text("system", "Be good.\n\nBe quick."),
            Text("user", "hi"),
            Reply("I look.", (LS, CAT), "Where is it?"),
            ToolResult("c1", "c1"),
            ToolResult("c2", "c2"),
            Text("system", "Be quick."),
        )

    def test_it_waits(self, stage: Stage) -> None:
        stage.plays(slowly(TURN))
        assert self.ask(stage, stream=True).choices[0].finish_reason == "tool_calls"

    def test_an_error_after_signs_of_life(self, stage: Stage) -> None:
        stage.plays(slowly(TooLongError(9, 5)))
        with pytest.raises(openai.APIError, match="maximum context length is 5 tokens"):
            self.ask(stage, stream=True)

    def test_models(self, stage: Stage) -> None:
        assert [model.id for model in stage.openai.models.list()] == [MODEL]
        assert stage.openai.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError):
            stage.openai.models.retrieve("another")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("error", "expected", "code"),
        [
            (TapError("invalid", "no"), openai.BadRequestError, "invalid_value"),
            (TooLongError(9, 5), openai.BadRequestError, "context_length_exceeded"),
            (TapError("authentication", "no"), openai.AuthenticationError, "invalid_api_key"),
            (TapError("overloaded", "no"), openai.InternalServerError, "overloaded"),
            (TapError("slow", "no"), openai.APIStatusError, "request_timeout"),
            (TapError("internal", "no"), openai.InternalServerError, None),
        ],
    )
    def test_errors(self, stage: Stage, stream: bool, error: TapError, expected: Any, code: str | None) -> None:
        stage.plays(fails(error))
        with pytest.raises(expected) as caught:
            self.ask(stage, stream)
        assert caught.value.code == code
        assert caught.value.request_id.startswith("req_")

    def test_wrong_token(self, stage: Stage) -> None:
        with (
            openai.OpenAI(base_url=f"{stage.server.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(model="m", messages=[HELLO])

    def test_overload_is_tried_again(self, stage: Stage) -> None:
        stage.plays(in_turn(fails(TapError("overloaded", "busy")), lambda ask: TURN))
        client = stage.openai.with_options(max_retries=1)
        assert client.chat.completions.create(model="m", messages=[HELLO]).id == "chatcmpl-t1"

    def test_images_are_refused(self, stage: Stage) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError, match="image_url blocks are refused") as caught:
            self.ask(stage, stream=False, messages=[{"role": "user", "content": [image]}])
        assert caught.value.param == "messages[0].content[0].type"


class TestResponses:
    def ask(self, stage: Stage, stream: bool, **fields: Any) -> Any:
        body: dict[str, Any] = {"model": "m", "input": "hi", **fields}
        if not stream:
            return stage.openai.responses.create(**body)
        with stage.openai.responses.stream(**body) as events:
            return events.get_final_response()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_turn(self, stage: Stage, stream: bool) -> None:
        response = self.ask(stage, stream, instructions="Be good.", tools=[{"type": "function", **LS_FUNCTION}])
        reasoning, message, *calls = response.output
        assert reasoning.content[0].text == "Where is it?"
        assert (message.content[0].text, response.output_text) == ("I look.", "I look.")
        assert [(call.call_id, call.name) for call in calls] == [("c1", "ls"), ("c2", "cat")]
        assert calls[0].arguments == '{"path":"/tmp","depth":2}'
        assert (response.status, response.instructions, len(response.tools)) == ("completed", "Be good.", 1)
        assert (response.usage.input_tokens, response.usage.output_tokens) == (100, 20)
        assert response.usage.output_tokens_details.reasoning_tokens == 5
        assert stage.last.payload.parts == (Text("system", "Be good."), Text("user", "hi"))

    def test_count(self, stage: Stage) -> None:
        assert stage.openai.responses.input_tokens.count(model="m", input="hi", instructions="123").input_tokens == 5

    def test_events_are_numbered(self, stage: Stage) -> None:
        with stage.openai.responses.create(model="m", input="hi", stream=True) as events:
            numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(numbers)))

    @pytest.mark.parametrize("stream", [False, True])
    def test_cut(self, stage: Stage, stream: bool) -> None:
        stage.plays(saying("so", finish="length"))
        if stream:
            with stage.openai.responses.create(model="m", input="hi", stream=True) as events:
                *_, last = events
            assert last.type == "response.incomplete"
            response = last.response
        else:
            response = stage.openai.responses.create(model="m", input="hi")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_conversation(self, stage: Stage, kept: bool) -> None:
        """With or without the ids of items, of which a client that stores nothing should send none."""
        turn = [item.model_dump(exclude_none=True) for item in self.ask(stage, stream=False).output]
        for item in turn:
            if not kept:
                del item["id"]
        results = [{"type": "function_call_output", "call_id": call, "output": call} for call in ("c2", "c1")]
        # The client's own model_dump gives plain dicts, which are not of the type that it takes.
        conversation: ResponseInputParam = [{"role": "user", "content": "hi"}, *turn, *results]  # type: ignore[list-item]
        stage.openai.responses.create(model="m", input=conversation)
        assert stage.last.payload.parts == (
            Text("user", "hi"),
            Reply("I look.", (LS, CAT), "Where is it?", "t1"),
            ToolResult("c1", "c1"),
            ToolResult("c2", "c2"),
        )

    def test_an_error_after_signs_of_life(self, stage: Stage) -> None:
        stage.plays(slowly(TapError("overloaded", "busy")))
        with pytest.raises(openai.APIError, match="busy"):
            self.ask(stage, stream=True)

    def test_nothing_is_kept(self, stage: Stage) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            self.ask(stage, stream=False, previous_response_id="resp_t1")
        assert caught.value.param == "previous_response_id"

    def test_async(self, stage: Stage) -> None:
        async def ask() -> Any:
            async with openai.AsyncOpenAI(base_url=f"{stage.server.url}/v1", api_key=TOKEN) as client:
                return await client.responses.create(model="m", input="hi")

        assert asyncio.run(ask()).output_text == "I look."
