"""Many rollouts at once on one server: none of them sees anything of another.

What the engine says is a digest of its session and of the prompt it was sent. Each client works out what that must be
from the prompt as it would write it itself, so one wrong token anywhere in a conversation changes every later answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from slime_plugin.config.rollout import Rollout
from slime_plugin.record import Meta, Record
from slime_plugin.recovery.conversations import find_conversations
from slime_plugin.recovery.recover import recover
from slime_plugin.rollout.chat import Chat, ChatML
from slime_plugin.rollout.engine.engine import Generation, Request
from slime_plugin.rollout.messages import Message
from slime_plugin.tap.limits import ServerSettings
from slime_plugin.tap.payload import ToolSpec
from slime_plugin.tap.server import TapServer
from slime_plugin.tap.tap import Tap
from slime_plugin.tap.tap_session import TapSession
from slime_plugin.tree import Trajectory, branches_of
from tests.conftest import ROOT
from tests.tap.engines import sampled, spell
from tests.tap.http import MODEL
from tests.tap.test_round_trip import gather_anthropic, gather_chat

ANTHROPIC, CHAT = "/v1/messages", "/v1/chat/completions"
TURNS = 20
CONNECTIONS = 128
"""Of all clients. Both ends of each are in this process, beside one log of each session: far below 1024 files."""
SYSTEM = "Note what you see."
QUESTION = "What do you see?"
NOTE = ToolSpec("note", "Notes it.", {"type": "object", "properties": {"seen": {"type": "string"}}})
LIMITS = Rollout(turns=TURNS, context_tokens=10**6)


@dataclass(frozen=True)
class Words:
    """What is said under a prompt in a session, and nowhere else."""

    thought: str | None
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    seconds: float
    """That it takes to say it: answers overtake each other."""

    @classmethod
    def of(cls, session: str, prompt: list[int]) -> Words:
        told = session.encode() + b"\0" + np.array(prompt, dtype=np.int64).tobytes()
        seen = hashlib.blake2b(told, digest_size=8).hexdigest()
        choice = int(seen, 16)
        calls: list[tuple[str, dict[str, Any]]] = [
            ("note", {"seen": seen, "of": len(prompt)}),
            ("note", {"seen": seen[::-1], "by": session}),
        ]
        thought = f"{seen[:4]}?" if choice % 3 else None
        return cls(thought, f"I am {session}.", calls[: 1 + choice % 2], choice % 7 / 1000)

    def tokens(self, chat: Chat) -> tuple[int, ...]:
        return sampled(chat, spell(self.text, self.calls, self.thought))


class Telltale:
    """One engine for all sessions. It answers the first turn of any only when ``together`` of them wait for it."""

    def __init__(self, chat: Chat, together: int) -> None:
        self.chat = chat
        self.begun = asyncio.Barrier(together)
        self.prompts: dict[str, list[list[int]]] = defaultdict(list)
        """That it was sent, by session."""

    async def generate(self, request: Request) -> Generation:
        prompt = list(request.prompt)
        self.prompts[request.rollout].append(prompt)
        if len(self.prompts[request.rollout]) == 1:
            await self.begun.wait()
        words = Words.of(request.rollout, prompt)
        await asyncio.sleep(words.seconds)
        tokens = words.tokens(self.chat)
        return Generation(tokens, logprobs_of(tokens), "stop", (("7", len(tokens)),))


def logprobs_of(tokens: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(-(token % 97 + 1) / 100 for token in tokens)


@dataclass
class Client:
    """An agent: it asks, calls the tools it is told to call, and asks again with what they gave."""

    session: str
    token: str
    chat: Chat
    http: aiohttp.ClientSession
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """As this client would write it."""

    async def run(self) -> None:
        self.prompt = self.chat.prompt(SYSTEM, QUESTION, [NOTE])
        for _ in range(TURNS):
            asked = [*self.prompt, *self.chat.open_turn()]
            words = Words.of(self.session, asked)
            tokens = words.tokens(self.chat)
            calls = await self.ask(words, len(asked), len(tokens))
            results = {id: f"{self.session} noted {arguments['seen']}" for id, arguments in calls}
            self.answer(results)
            self.prompt = [*asked, *tokens, *self.chat.close_turn(tokens)]
            for text in results.values():
                self.prompt += self.chat.render(Message("tool", text))

    async def ask(self, words: Words, prompt: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
        """The calls that come back, by id, once everything else that came with them is right."""
        raise NotImplementedError

    def answer(self, results: dict[str, str]) -> None:
        raise NotImplementedError

    async def post(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> list[tuple[str | None, Any]]:
        """The events of a stream."""
        async with self.http.post(path, json={"model": MODEL, "stream": True, **body}, headers=headers) as response:
            raw = (await response.read()).decode()
            assert response.status == 200, raw
        found = []
        for event in raw.split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in event.split("\n"))
            if "data" in fields and fields.get("event") != "ping":  # else it is a sign of life
                found.append((fields.get("event"), None if fields["data"] == "[DONE]" else json.loads(fields["data"])))
        return found


class AnthropicClient(Client):
    """Sends back what it got, as it is."""

    async def ask(self, words: Words, prompt: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
        self.messages = self.messages or [{"role": "user", "content": QUESTION}]
        tool = {"name": NOTE.name, "description": NOTE.description, "input_schema": NOTE.parameters}
        body = {"max_tokens": 1000, "system": SYSTEM, "tools": [tool], "messages": self.messages}
        answer = gather_anthropic(await self.post(ANTHROPIC, {"x-api-key": self.token}, body))
        *said, text = [block for block in answer["content"] if block["type"] != "tool_use"]
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert [block["thinking"] for block in said] == [words.thought] * (words.thought is not None)
        assert text == {"type": "text", "text": words.text}
        assert [(call["name"], call["input"]) for call in calls] == words.calls
        assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (prompt, tokens)
        self.messages.append({"role": "assistant", "content": answer["content"]})
        return [(call["id"], call["input"]) for call in calls]

    def answer(self, results: dict[str, str]) -> None:
        content = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results.items()]
        self.messages.append({"role": "user", "content": content})


class ChatClient(Client):
    """Forgets thoughts and writes arguments in its own way."""

    async def ask(self, words: Words, prompt: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
        start = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        self.messages = self.messages or start
        tool = NOTE.to_json()
        body = {"tools": [tool], "messages": self.messages, "stream_options": {"include_usage": True}}
        whole = gather_chat(await self.post(CHAT, {"authorization": f"Bearer {self.token}"}, body))
        answer = whole["choices"][0]["message"]
        calls = [(call, json.loads(call["function"]["arguments"])) for call in answer["tool_calls"]]
        assert (answer.pop("reasoning_content", None), answer["content"]) == (words.thought, words.text)
        assert [(call["function"]["name"], arguments) for call, arguments in calls] == words.calls
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (prompt, tokens)
        for call, arguments in calls:
            call["function"]["arguments"] = json.dumps(arguments, indent=1, sort_keys=True)
        self.messages.append(answer)
        return [(call["id"], arguments) for call, arguments in calls]

    def answer(self, results: dict[str, str]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results.items()]


def record_of(session: TapSession) -> Record:
    recovered = recover(session.contexts, session.parents, session.lost, {})
    assert "untrained" not in recovered.report.to_json()
    assert recovered.report.to_json()["retokenised"] == {"messages": 0, "tokens": 0}
    return recovered.record(Meta(id=session.id, extra=recovered.report.to_json()))


def check(session: TapSession, prompts: list[list[int]], chat: Chat) -> Record:
    """Its record trains all that was sampled, under the prompts that the engine was sent, and nothing else."""
    assert len(session.turns) == len(prompts) == TURNS
    assert (session.lost, session.retries, session.ending) == ({}, 0, None)
    (line,) = find_conversations(session.contexts, session.parents).all
    (chain,) = line.chains
    assert chain.turns == session.turns
    record = record_of(session)
    assert len(record.views) == 1
    (branch,) = branches_of(Trajectory.of(record))
    tokens, logprobs = record.tokens[branch.tape].tolist(), record.logprobs[branch.tape].tolist()
    trained = np.zeros(len(branch), dtype=bool)
    for prompt in prompts:
        said = Words.of(session.id, prompt).tokens(chat)
        start, stop = len(prompt), len(prompt) + len(said)
        assert tokens[:stop] == [*prompt, *said]
        assert logprobs[start:stop] == pytest.approx(logprobs_of(said))
        trained[start:stop] = True
    assert branch.trained.tolist() == trained.tolist()
    assert int(record.generated.sum()) == int(trained.sum())
    return record


async def play(sessions: int, logs: Path) -> None:
    chat = ChatML.load(ROOT / "examples" / "small_world" / "model")
    engine = Telltale(chat, together=64)
    tap = Tap(chat, LIMITS, logs, model=MODEL)
    opened = [tap.open(f"rollout-{i}", engine, seed=i) for i in range(sessions)]
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with (
        TapServer(tap, ServerSettings()) as server,
        aiohttp.ClientSession(server.url, connector=connector) as http,
    ):
        kinds = (AnthropicClient, ChatClient)
        clients = [kinds[i % 2](session.id, token, chat, http) for i, (session, token) in enumerate(opened)]
        await asyncio.gather(*(client.run() for client in clients))
    records = {session.id: check(session, engine.prompts[session.id], chat) for session, _ in opened}
    assert len(records) == sessions
    for session, _ in opened:
        await session.close({})
    other = Tap(chat, LIMITS, logs, model=MODEL)
    for session, token in opened:
        again = other.reopen(tap.log_of(session.id), engine)
        assert other.session(token) is again
        assert record_of(again) == records[session.id]
        await again.close({})


def test_no_rollout_sees_anything_of_another(tmp_path: Path) -> None:
    asyncio.run(play(256, tmp_path))
