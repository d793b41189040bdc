"""Agents that do anything at all, through a real session: what the engine noted is what the record has to say.

A simulated agent keeps its messages as clients do, writes them in a real wire format, now this way and now that, and
reads the answers from the wire. The engine notes what it was sent whenever it samples, and gives each token a
log-probability of its own, by which a token of a record is found among the notes. Nothing that the tap believes is
used to judge it.

    python -m tests.tap.test_histories 10000 [SEED]     # so many histories of each story, and the first that fails
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_plugin.agents import any_thread_of
from slime_plugin.config.rollout import Rollout
from slime_plugin.record import Meta, Record
from slime_plugin.recovery.recover import Recovered, recover
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.engine import EngineError, Finish, Generation, Request
from slime_plugin.tap.payload import Answer, ClientRequest, Payload, TapError
from slime_plugin.tap.tap import Tap
from slime_plugin.tap.tap_session import SessionHistory
from slime_plugin.tap.wire import WIRE_FORMATS
from slime_plugin.tree import Trajectory, branches_of
from tests.conftest import ROOT
from tests.tap.engines import sampled, spell

ANTHROPIC, CHAT = "/v1/messages", "/v1/chat/completions"
ON = {"summaries": 1.0, "subagents": 1.0, "auxiliary": 1.0}
SETTING = {"summary": "summaries", "subagent": "subagents", "auxiliary": "auxiliary"}
LIMITS = Rollout(turns=10**6, context_tokens=10**6)
CLEARED = "[Old tool result content cleared]"
CLASS_HEADER = "x-claude-code-request-class"
CLASSES = {"summary": "compaction", "auxiliary": "auxiliary"}
VALUES: list[Any] = [5, 5.0, 0, -1, 2.5, True, None, "x", "été", "", [1, 2.0], {"b": 1, "a": []}, 2**60, 1e21]
"""Arguments of calls."""


@functools.cache
def chat() -> ChatML:
    return ChatML.load(ROOT / "examples" / "small_world" / "model")


def coin(rng: random.Random, chance: float = 0.5) -> bool:
    return rng.random() < chance


# The engine and its notes


@dataclass(eq=False)
class Plan:
    """What the engine is to say to a request."""

    text: str
    kind: str
    """What the agent asks for it."""
    parts: int = 1
    """It is tokenised in so many parts: ids that no tokenizer would give."""
    delay: int = 0
    how: str = "say"
    """Or ``away``; ``abort``; ``hang`` until the client is gone; ``late``, the same, and say everything after all."""
    note: Note | None = None

    def tokens(self) -> tuple[int, ...]:
        ends = [len(self.text) * i // self.parts for i in range(self.parts + 1)]
        parts = [sampled(chat(), self.text[start:stop]) for start, stop in itertools.pairwise(ends)]
        return tuple(token for part in parts for token in part[:-1]) + parts[-1][-1:]


@dataclass(eq=False)
class Note:
    """What was sampled, and after what."""

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    kind: str
    lost: bool
    """It was cut off, and nobody can be given it."""
    heard: bool = False
    """Somebody was given it."""


PLAN: ContextVar[Plan] = ContextVar("PLAN")
"""Of the request that is being answered."""


class Noting:
    """An engine that says what is planned, and takes notes."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._sampled = 0

    async def generate(self, request: Request) -> Generation:
        plan = PLAN.get()
        for _ in range(plan.delay):
            await asyncio.sleep(0)
        if plan.how == "away":
            raise EngineError("the engine is away")
        tokens = plan.tokens()
        finish: Finish = "stop"
        if plan.how in ("hang", "late"):
            assert request.stop is not None
            await request.stop.wait()
        if plan.how in ("hang", "abort"):
            tokens, finish = tokens[: len(tokens) // 2], "abort"
        elif len(tokens) > request.max_tokens:
            tokens, finish = tokens[: request.max_tokens], "length"
        logprobs = tuple(-(self._sampled + i) / 4096 for i in range(1, len(tokens) + 1))
        self._sampled += len(tokens)
        plan.note = Note(len(self.notes), tuple(request.prompt), tokens, logprobs, plan.kind, finish == "abort")
        self.notes.append(plan.note)
        return Generation(tokens, logprobs, finish, (("7", len(tokens)),))


# Messages as a client keeps them and as it writes them


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class ToolResult:
    call: str
    text: str


@dataclass(frozen=True)
class Called:
    id: str
    name: str
    arguments: Any


@dataclass(frozen=True)
class Said:
    """By the assistant."""

    text: str
    calls: tuple[Called, ...] = ()
    thought: str = ""
    signature: str = ""
    own: bool = False
    """The client's own words: it has one way of writing these."""


Item = User | ToolResult | Said


def wobbled(items: Sequence[Item], rng: random.Random) -> list[Item]:
    """The same in other words: results of parallel calls in another order, spaces, arguments from another library."""
    out: list[Item] = []
    for is_result, run in itertools.groupby(items, lambda item: isinstance(item, ToolResult)):
        some = list(run)
        if is_result and coin(rng):
            rng.shuffle(some)
        out += some
    return [_respelt(item, rng) if isinstance(item, Said) and not item.own else item for item in out]


def _respelt(said: Said, rng: random.Random) -> Said:
    text = said.text
    spaced = [f"\n{text}", f"{text} \n", text.replace(" ", "\n", 1), text.replace("\n\n", "\n")] if text else []
    calls = (replace(call, arguments=_retyped(call.arguments, rng)) for call in said.calls)
    return replace(said, text=rng.choice([text, text, *spaced]), calls=tuple(calls))


def _retyped(value: Any, rng: random.Random) -> Any:
    """Keys elsewhere, 5.0 for 5, 5 for 5.0."""
    if isinstance(value, dict):
        return {key: _retyped(value[key], rng) for key in rng.sample(list(value), len(value))}
    if isinstance(value, list):
        return [_retyped(item, rng) for item in value]
    if isinstance(value, float) and value.is_integer() and coin(rng):
        return int(value)
    return float(value) if type(value) is int and coin(rng) else value


def anthropic(system: str, tools: Sequence[str], items: Sequence[Item], rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for item in wobbled(items, rng):
        role, blocks = "assistant" if isinstance(item, Said) else "user", _blocks(item, rng)
        if role == "user" and messages and messages[-1]["role"] == "user" and coin(rng):
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    for message in messages:
        blocks = message["content"]
        if len(blocks) == 1 and blocks[0]["type"] == "text" and coin(rng):
            message["content"] = blocks[0]["text"]
        elif blocks and coin(rng, 0.2):
            blocks[-1]["cache_control"] = {"type": "ephemeral"}
    body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 4096}
    body["system"] = system if coin(rng) else [{"type": "text", "text": system}]
    return body | ({"tools": [{"name": name, "input_schema": {"type": "object"}} for name in tools]} if tools else {})


def _blocks(item: Item, rng: random.Random) -> list[dict[str, Any]]:
    if isinstance(item, User):
        return [{"type": "text", "text": item.text}]
    if isinstance(item, ToolResult):
        content = item.text if coin(rng) else [{"type": "text", "text": item.text}]
        return [{"type": "tool_result", "tool_use_id": item.call, "content": content}]
    blocks: list[dict[str, Any]] = []
    if item.thought:
        signed = {"signature": item.signature} if item.signature else {}
        blocks.append({"type": "thinking", "thinking": item.thought, **signed})
    if item.text or coin(rng, 0.1):
        blocks.append({"type": "text", "text": item.text or " \n"})
    uses = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in item.calls]
    return blocks + uses


def openai(system: str, tools: Sequence[str], items: Sequence[Item], rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for item in wobbled(items, rng):
        if isinstance(item, User):
            messages.append({"role": "user", "content": item.text})
        elif isinstance(item, ToolResult):
            messages.append({"role": "tool", "tool_call_id": item.call, "content": item.text})
        else:
            messages.append(_message(item, rng))
    for message in messages:
        if isinstance(message["content"], str) and coin(rng, 0.2):
            message["content"] = [{"type": "text", "text": message["content"]}]
    functions = [{"type": "function", "function": {"name": name}} for name in tools]
    return {"model": "policy", "messages": messages} | ({"tools": functions} if tools else {})


def _message(said: Said, rng: random.Random) -> dict[str, Any]:
    empty = None if said.calls and coin(rng) else ""
    message: dict[str, Any] = {"role": "assistant", "content": said.text or empty}
    if said.thought:
        message[rng.choice(["reasoning_content", "reasoning"])] = said.thought
    if said.calls:
        how: dict[str, Any] = {"indent": rng.choice([None, 1]), "ensure_ascii": coin(rng)}
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments, **how)} for call in said.calls]
        calls = zip(said.calls, functions, strict=True)
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": function} for call, function in calls]
    return message


def read_answer(path: str, answer: Answer) -> Said:
    """What a client makes of the bytes it is sent."""
    whole = orjson.loads(WIRE_FORMATS[path].whole(answer))
    if path == CHAT:
        message = whole["choices"][0]["message"]
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        made = tuple(Called(id, function["name"], json.loads(function["arguments"])) for id, function in calls)
        return Said(message["content"] or "", made, message.get("reasoning_content", ""))
    said = Said("")
    for block in whole["content"]:
        if block["type"] == "text":
            said = replace(said, text=block["text"])
        elif block["type"] == "thinking":
            said = replace(said, thought=block["thinking"], signature=block["signature"])
        else:
            said = replace(said, calls=(*said.calls, Called(block["id"], block["name"], block["input"])))
    return said


# Agents


class World:
    """A session with its engine, and what the agents in it share."""

    def __init__(self, folder: Path, seed: int, path: str, *, keep_thoughts: bool, same_words: bool) -> None:
        self.folder, self.path, self.keep_thoughts = folder, path, keep_thoughts
        self.same_words = same_words
        """Turns may say what others have said."""
        self.rng = random.Random(seed)
        self.signed = coin(self.rng)
        """Clients send the signatures of thoughts back."""
        self.classed = path == ANTHROPIC and coin(self.rng)
        """Clients that have a name say what a request is for."""
        self.one_thread = False
        self.engine = Noting()
        self.given: dict[str, Note] = {}
        """By the id of the answer."""
        self.late: dict[str, Note] = {}
        """What was sampled for a client that is gone, by its request."""
        self.trace: list[str] = []
        self._numbers = itertools.count(1)
        self.tap = self._tap()
        self.session, self.token = self.tap.open("s", self.engine, seed=1)
        self.log = self.tap.log_of("s")

    def _tap(self) -> Tap:
        return Tap(
            *(chat(), LIMITS, self.folder),
            model="policy",
            thread_of=any_thread_of(),
            keep_thoughts=self.keep_thoughts,
        )

    def next(self) -> int:
        return next(self._numbers)

    def some(self, same: Sequence[str], other: str) -> str:
        """Words that were used before, perhaps, or new ones."""
        return self.rng.choice([*(same if self.same_words else ()), f"{other} {self.next()}."])

    def plan(self, kind: str, how: str = "say") -> Plan:
        rng = self.rng
        many = 0 if kind in ("summary", "auxiliary") else rng.choice([0, 1, 1, 2, 3])
        text = self.some(["ok", "So it is."] + [""] * bool(many), rng.choice(["Step", "Où?\n\nNo"]))
        if kind in ("summary", "auxiliary", "nameless"):
            text = f"In a few words {self.next()}."
        thought = rng.choice([None, None, "", self.some(["hm"], "because")])
        made = [(rng.choice(["look", "Read"]), self._arguments()) for _ in range(many)]
        words = spell(text, made, thought) + rng.choice(["", "", "\n"])
        return Plan(words, kind, rng.choice([1, 1, 2, 3]), rng.choice([0, 0, 1, 3]), how)

    def _arguments(self) -> dict[str, Any]:
        made = {f"k{i}": self.rng.choice(VALUES) for i in range(self.rng.choice([0, 1, 2, 3]))}
        return made if self.same_words else made | {"n": self.next()}

    async def crash(self) -> None:
        """The process dies while it writes a line; what it had not answered may be missing before that."""
        lines = self.log.read_bytes().splitlines(keepends=True)
        answered = max((i for i, line in enumerate(lines, 1) if b'"turn":' in line or b'"lost":' in line), default=1)
        kept = self.rng.randint(answered, len(lines))
        self.trace.append(f"the tap dies, and {len(lines) - kept} lines are lost")
        self.log = self.folder / f"{self.next()}.tap.jsonl"
        self.log.write_bytes(b"".join(lines[:kept]) + (lines[kept] if kept < len(lines) else b'{"node": 7, "pa')[:9])
        await self.session.close({})
        self.tap = self._tap()
        self.session = self.tap.reopen(self.log, self.engine)
        assert self.tap.session(self.token) is self.session


@dataclass(eq=False)
class Agent:
    """A client with one conversation. What it can do is a method, and says whether it came to anything."""

    world: World
    kind: str
    headers: Mapping[str, str]
    system: str
    tools: tuple[str, ...]
    items: list[Item]
    asked: tuple[bytes, Said] | None = None
    """The last request of the conversation and what it got."""

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    def body(self, items: Sequence[Item], system: str | None = None, tools: Sequence[str] | None = None) -> bytes:
        write = anthropic if self.world.path == ANTHROPIC else openai
        system, tools = self.system if system is None else system, self.tools if tools is None else tools
        for i, item in enumerate(self.items):  # thoughts are left out, some time or other
            if isinstance(item, Said) and not item.own and (item.text or item.calls) and coin(self.rng, 0.2):
                self.items[i] = replace(item, thought="", signature="")
        return json.dumps(write(system, tools, items, self.rng)).encode()

    def payload(self, raw: bytes) -> Payload:
        return WIRE_FORMATS[self.world.path].read(orjson.loads(raw), self.world.session.parse_cache)

    async def send(self, raw: bytes, plan: Plan) -> Said:
        """Ask, and hold the numbers that come back against what the engine saw."""
        world, session, payload = self.world, self.world.session, self.payload(raw)
        counts = world.one_thread or not world.same_words  # a request to count does not say whose context it is
        counted = await session.count(payload) if counts and coin(self.rng, 0.2) else None
        PLAN.set(plan)
        classed = {CLASS_HEADER: CLASSES.get(plan.kind, "main")} if world.classed and self.headers else {}
        answer = await session.answer(
            ClientRequest(payload, hashlib.blake2b(raw).hexdigest(), {**self.headers, **classed})
        )
        if answer.id not in world.given:
            note = plan.note or world.late[f"{self.headers} {raw!r}"]
            world.given[answer.id], note.kind, note.heard = note, plan.kind, True
        note = world.given[answer.id]
        self.tell(payload, f"#{note.number} {chat().text(note.tokens)!r}")
        assert answer.prompt_tokens == len(note.prompt)
        assert answer.sampled_tokens == len(note.tokens)
        assert counted in (None, len(note.prompt))
        if counts and coin(self.rng, 0.2):
            assert await session.count(self.payload(raw)) == len(note.prompt)
        said = read_answer(world.path, answer)
        return said if world.signed else replace(said, signature="")

    def tell(self, payload: Payload, end: str) -> None:
        """For whoever wants to know why a test failed."""
        thread, tools = " ".join(self.headers.values()), ",".join(tool.name for tool in payload.tools)
        parts = " | ".join(_shown(part) for part in payload.parts)
        self.world.trace.append(f"{self.kind} [{thread}] ({tools}) {parts} -> {end}")

    def go_on(self) -> None:
        """With results, or with what the user says next."""
        last = self.items[-1]
        if isinstance(last, Said):
            self.items += [ToolResult(call.id, self.world.some(["fine"], "it is")) for call in last.calls]
            if not last.calls or coin(self.rng, 0.1):
                self.items.append(User(self.world.some(["Go on."], "Next")))

    async def turn(self, plan: Plan | None = None, **limits: int) -> bool:
        self.go_on()
        raw = json.dumps(json.loads(self.body(self.items)) | limits).encode()
        self.heard(raw, await self.send(raw, plan or self.plan()))
        return True

    def plan(self) -> Plan:
        """Agents without a name that say the same cannot be told apart."""
        nameless = self.kind == "subagent" and not self.headers
        plan = self.world.plan("nameless" if nameless else self.kind)
        plan.kind = self.kind
        return plan

    async def beside(self, kind: str, items: Sequence[Item], system: str | None = None, *tools: str) -> Said:
        """Something is asked that is no turn of the conversation; again, if the first answer was not good enough."""
        given = self.tools if system is None else tools
        said = await self.send(self.body(items, system, given), self.world.plan(kind))
        if coin(self.rng, 0.2):
            raw = marked(self.body(items, system, given), self.world.next())
            said = await self.send(raw, self.world.plan(kind))
        return said

    def heard(self, raw: bytes, said: Said) -> None:
        """Of a turn that says nothing there is nothing to keep."""
        self.asked = raw, said
        self.items.append(User(f"Well {self.world.next()}?") if said == Said("") else said)

    # What happens to requests without a trace in the conversation

    async def cut_off(self) -> bool:
        """A turn that may not say all it wants to; but something."""
        plan = self.plan()
        tokens = plan.tokens()
        heard = [n for n in range(1, len(tokens)) if chat().text(tokens[:n]).strip("</think> \n")]
        return await self.turn(plan, max_tokens=self.rng.choice(heard or [len(tokens)]))

    async def retry(self) -> bool:
        """The same bytes twice more, at once."""
        if self.asked is None:
            return False
        raw, said = self.asked
        again = await asyncio.gather(*(self.send(raw, self.world.plan("never")) for _ in range(2)))
        assert list(again) == [said, said]
        return True

    async def hang_up(self, how: str = "hang", *, for_good: bool = False) -> bool:
        """The client is gone before the answer is there; it may come back with the same request."""
        self.go_on()
        raw, plan = self.body(self.items), self.world.plan("cancelled", how)
        waiting = asyncio.create_task(self.send(raw, plan))
        for _ in range(5):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        if plan.note is not None and not plan.note.lost:
            self.world.late[f"{self.headers} {raw!r}"] = plan.note
        self.tell(self.payload(raw), "the client hangs up" + (", too late" if how == "late" else ""))
        if not for_good and coin(self.rng):
            self.heard(raw, await self.send(raw, self.plan()))
        return True

    async def hang_up_late(self) -> bool:
        """The engine has sampled the whole turn when it hears of it."""
        return await self.hang_up("late")

    async def fail(self) -> bool:
        """The engine is away, or aborts the turn."""
        self.go_on()
        plan = self.world.plan("aborted", self.rng.choice(["away", "abort"]))
        with contextlib.suppress(TapError):
            await self.send(self.body(self.items), plan)
            assert plan.note is None  # it was answered before
        return True

    async def crash(self) -> bool:
        await self.world.crash()
        return True

    async def resample(self) -> bool:
        """The last request in other bytes; the client goes on with what came second."""
        if self.asked is None or not isinstance(self.items[-1], Said):
            return False
        raw = marked(self.body(self.items[:-1]), self.world.next())
        self.items.pop()
        self.heard(raw, await self.send(raw, self.plan()))
        return True

    async def ask_twice(self) -> bool:
        """The same, and the client stays with what came first."""
        if self.asked is None or not isinstance(self.items[-1], Said):
            return False
        await self.send(marked(self.body(self.items[:-1]), self.world.next()), self.plan())
        return True

    async def interrupted(self) -> bool:
        """The user hangs up, and says something else."""
        await self.hang_up(self.rng.choice(["hang", "late"]), for_good=True)
        self.items.append(User(f"[Request interrupted by user {self.world.next()}]"))
        return True

    # What agents do to their context

    async def compact(self) -> bool:
        """As Claude Code does: the summary is asked for in the context."""
        self.go_on()
        summary = await self.beside("summary", [*self.items, User(f"Sum it up {self.world.next()}.")])
        self.items = [User(f"This session is being continued. {summary.text}"), *self.tail()]
        return True

    async def compact_elsewhere(self) -> bool:
        """As OpenCode does: the summary has a context of its own, and comes back as it was."""
        self.go_on()
        summary = await self.beside("summary", [User(f"Sum up: {self.items}")], "You sum up.")
        self.items = [User("What did we do so far?"), summary, *self.tail(), User("Continue if you can.")]
        return True

    def tail(self) -> list[Item]:
        """The last turns with their results, or none."""
        starts = [i for i, item in enumerate(self.items) if isinstance(item, Said)][2:]
        return self.items[self.rng.choice(starts) :] if starts and coin(self.rng) else []

    async def prune(self) -> bool:
        """Old results are cleared."""
        self.go_on()
        found = [(i, item) for i, item in enumerate(self.items[:-1]) if isinstance(item, ToolResult)]
        newest = max((i for i, item in enumerate(self.items) if isinstance(item, Said)), default=0)
        old = [(i, item) for i, item in found if i < newest and item.text != CLEARED]
        for i, item in old[: self.rng.randint(1, 3)]:
            self.items[i] = replace(item, text=CLEARED)
        return bool(old)

    async def drift(self) -> bool:
        """A turn comes back as something else: a call that is called invalid, better words."""
        places = [i for i, item in enumerate(self.items) if isinstance(item, Said) and not item.own]
        if not places:
            return False
        said = self.items[place := self.rng.choice(places)]
        assert isinstance(said, Said)
        if said.calls and coin(self.rng):
            calls = (replace(said.calls[0], name="invalid"), *said.calls[1:])
            self.items[place] = replace(said, calls=calls, thought="", own=True)
        else:
            self.items[place] = replace(said, text=f"Improved {self.world.next()}.", thought="", own=True)
        return True

    async def new_system(self) -> bool:
        self.system = f"You look at things anew {self.world.next()}."
        return True

    async def new_tool(self) -> bool:
        self.tools = (*self.tools, f"tool_{self.world.next()}")
        return True

    async def silence(self) -> bool:
        """A turn of nothing but a stop token. There is nothing to send back of it."""
        return await self.turn(Plan("", self.kind))

    async def rewind(self) -> bool:
        """Back to an earlier point, and on in the same words or in others."""
        places = [i for i, item in enumerate(self.items) if i and isinstance(item, Said)]
        if not places:
            return False
        self.items = self.items[: self.rng.choice(places)]
        if coin(self.rng):
            self.items.append(User(f"Rather this {self.world.next()}."))
        return True

    async def make_up(self) -> bool:
        """A message of the assistant's that nobody sampled."""
        self.go_on()
        words = self.rng.choice(["ok", "API Error", f"Interrupted {self.world.next()}."])
        self.items += [Said(words, own=True), User("Go on.")]
        return True

    # What goes on beside a conversation

    async def title(self) -> bool:
        first = next((item for item in self.items if isinstance(item, User)), User("Nothing."))
        await self.beside("auxiliary", [User(f"Title {self.world.next()}:"), first], "You give titles.")
        return True

    async def aside(self) -> bool:
        """Something is asked in the context, and nothing made of the answer."""
        self.go_on()
        await self.beside("auxiliary", [*self.items, User(f"What may the user say next? {self.world.next()}")])
        return True

    def worker(self, *, named: bool, fork: bool = False) -> Agent:
        """An agent that works for this one; a fork goes on from its context."""
        number, headers = self.world.next(), self.headers
        if named and self.world.path == ANTHROPIC:
            headers = {"x-claude-code-session-id": "a", "x-claude-code-agent-id": f"agent-{number}"}
        elif named:
            headers = {"x-session-id": f"b{number}", "x-parent-session-id": self.headers.get("x-session-id", "a")}
        task = self.world.some(["Help."], "Help") if named else f"Help with {number}."
        if fork:
            self.go_on()
            return Agent(self.world, "subagent", headers, self.system, self.tools, [*self.items, User(task)])
        return Agent(self.world, "subagent", headers, "You help.", ("look",), [User(task)])

    async def delegate(self) -> bool:
        if not self.headers and not self.world.keep_thoughts:
            return False  # nobody could tell whose context it is
        worker = self.worker(named=bool(self.headers))
        for _ in range(self.rng.randint(1, 3)):
            await worker.turn()
        return True


def marked(raw: bytes, number: int) -> bytes:
    """The same request in other bytes."""
    return json.dumps(json.loads(raw) | {"metadata": {"n": str(number)}}).encode()


def _shown(part: Any) -> str:
    calls = [f" {call.name}{json.dumps(call.arguments)}" for call in getattr(part, "calls", ())]
    thought = getattr(part, "thought", None)
    return f"{type(part).__name__}({part.text[:60]!r}{''.join(calls)}{f' thinking {thought!r}' if thought else ''})"


def main_agent(world: World, *, named: bool | None = None) -> Agent:
    name = "x-claude-code-session-id" if world.path == ANTHROPIC else "x-session-id"
    headers = {name: "a"} if (coin(world.rng) if named is None else named) else {}
    return Agent(world, "main", headers, "You look at things.", ("look", "read"), [User("Look at all of it.")])


# What is true of every record


@dataclass(frozen=True)
class Found:
    """A record, held against the notes."""

    recovered: Recovered
    record: Record
    notes: Sequence[Note]
    trained: Mapping[int, tuple[int, int]]
    """Where on the tape the tokens of each note are that are trained, by its number."""

    @property
    def causes(self) -> list[str]:
        return [edit.extra["cause"] for edit in self.record.edits]

    @property
    def untrained(self) -> Counter[str]:
        return Counter(self.recovered.report.to_json().get("untrained", {}))

    @property
    def kinds(self) -> dict[int, str]:
        """What the record says that each trained note was for."""
        spans = {tuple(turn["span"]): turn.get("kind", "main") for turn in self.recovered.report.to_json()["turns"]}
        assert set(spans) == set(self.trained.values())
        return {number: spans[span] for number, span in self.trained.items()}


def found_in(history: SessionHistory, notes: Sequence[Note], weights: Mapping[str, float] = ON) -> Found:
    """Every token is trained once, after what the engine was sent, or counted. ``notes`` are all there are."""
    recovered = recover(history.contexts, history.parents, history.lost, weights)
    record = recovered.record(Meta(id="s", extra=recovered.report.to_json()))
    by_logprob = {np.float32(value): (note, i) for note in notes for i, value in enumerate(note.logprobs)}
    places: dict[int, list[int]] = {}
    for branch in branches_of(Trajectory.of(record)):
        tokens = tuple(record.tokens[branch.tape].tolist())
        for i in np.flatnonzero(branch.trained).tolist():
            note, at = by_logprob[record.logprobs[branch.tape[i]]]
            place = places.setdefault(note.number, [])
            assert len(place) == at, "a token is trained twice, or not in its turn"
            assert tokens[i] == note.tokens[at]
            assert tokens[:i] == note.prompt if at == 0 else branch.tape[i - 1] == place[-1]
            place.append(int(branch.tape[i]))
    by_number = {note.number: note for note in notes}
    for number, place in places.items():
        assert place == list(range(place[0], place[0] + len(by_number[number].tokens)))
        assert not by_number[number].lost
    found = Found(recovered, record, notes, {number: (place[0], place[-1] + 1) for number, place in places.items()})
    assert int(record.generated.sum()) == sum(map(len, places.values()))
    assert int(record.generated.sum()) + found.untrained.total() == sum(len(note.tokens) for note in notes)
    lost, unheard = (
        sum(len(note.tokens) for note in notes if not note.heard and note.lost is cut) for cut in (True, False)
    )
    assert lost <= found.untrained["cancelled"] + found.untrained["aborted"] <= lost + unheard
    return found


def check_retries(found: Found) -> None:
    """What is not trained was sampled again after the same words, and nothing came after it."""
    assert set(found.untrained) <= {"retry", "cancelled", "aborted"}
    given = [note for note in found.notes if note.heard]
    for note in (note for note in given if note.number not in found.trained):
        again = [other for other in given if other.prompt == note.prompt and other is not note]
        assert again
        whole = (*note.prompt, *note.tokens, *chat().close_turn(note.tokens))
        used = any(other.prompt[: len(whole)] == whole for other in given)
        alike = any(other.tokens[-len(note.tokens) :] == note.tokens for other in again)  # without its thought, perhaps
        assert alike or not used


def check_weights(history: SessionHistory, on: Found, weights: Mapping[str, float]) -> None:
    """What has no weight is not trained, and counted as what it is; the other weights are where they belong."""
    found, kinds = found_in(history, on.notes, weights), on.kinds
    weight = {number: weights[SETTING[kind]] if kind in SETTING else 1.0 for number, kind in kinds.items()}
    assert set(found.trained) == {number for number in kinds if weight[number] > 0}
    off = Counter[str]()
    for note in on.notes:
        if weight.get(note.number) == 0:
            off[kinds[note.number]] += len(note.tokens)
    assert found.untrained == on.untrained + off
    spans = {(start, stop): value for start, stop, value in found.recovered.report.to_json().get("weights", ())}
    assert spans == {found.trained[number]: value for number, value in weight.items() if value not in (0, 1)}


def check_log(world: World, whole: Found, *, everywhere: bool) -> None:
    """A log gives the same record. One that was cut off gives that of the turns that are in it."""
    tap, path, rng = world.tap, world.folder / "cut.jsonl", world.rng
    lines = world.log.read_bytes().splitlines(keepends=True)
    assert found_in(tap.read(world.log), whole.notes).record == whole.record
    entries = [orjson.loads(line) for line in lines]
    begins = [entry["logprobs"][0] if "turn" in entry else None for entry in entries]
    lost = [note for note in whole.notes if note.tokens and note.logprobs[0] not in begins]
    first = next(i for i, value in enumerate(begins, 1) if value is not None)
    places = range(first, len(lines)) if everywhere else {rng.randint(first, len(lines)) for _ in range(2)}
    for place in places:
        torn = lines[place][: rng.choice([0, rng.randrange(len(lines[place]))])] if place < len(lines) else b""
        path.write_bytes(b"".join(lines[:place]) + torn)
        left = lost[: sum("lost" in entry for entry in entries[:place])]
        left += [note for note in whole.notes if note.tokens and note.logprobs[0] in begins[:place]]
        assert len(left) == sum("lost" in entry or "turn" in entry for entry in entries[:place])
        check_retries(found_in(tap.read(path), left))


def check(world: World, *, everywhere: bool = False) -> Found:
    found = found_in(world.session, world.engine.notes)
    check_retries(found)
    check_weights(world.session, found, {name: world.rng.choice([0.0, 0.5, 1.0]) for name in ON})
    check_log(world, found, everywhere=everywhere)
    return found


def check_end(found: Found, agent: Agent) -> None:
    """The record ends with the last context of the user's conversation, and its last words are the reply."""
    said = [item for item in agent.items if isinstance(item, Said)]
    assert found.recovered.reply.split() == said[-1].text.split()
    last = [note for note in found.notes if note.kind == "main"][-1]
    whole = (*last.prompt, *last.tokens, *chat().close_turn(last.tokens))
    view = found.record.tokens[found.record.view_positions(-1)]
    assert tuple(view.tolist()) == whole


# Stories


QUIET = ["turn"] * 5 + ["retry", "hang_up", "hang_up_late", "cut_off", "fail", "crash"]
"""What leaves a conversation as one context that only grows."""
THINGS: dict[str, list[str]] = {
    "resample": [],
    "ask_twice": [],
    "interrupted": [],
    "compact": ["compaction"],
    "compact_elsewhere": ["auxiliary", "compaction"],
    "prune": ["prune"],
    "drift": ["drift"],
    "new_system": ["drift"],
    "new_tool": ["drift"],
    "silence": ["drift"],
    "title": ["auxiliary", "auxiliary"],
    "aside": ["auxiliary"],
    "delegate": ["subagent", "subagent"],
}
"""What happens to it, with the causes of the edits that it makes."""
ANYTHING = [*QUIET, *THINGS, "rewind", "make_up", "hire", "hire", "together", "together", "together"]

REWRITING = ("compact", "compact_elsewhere", "prune", "drift", "new_system", "new_tool")


def is_clear(acts: list[str]) -> bool:
    """Of words that stand in two turns and come back out of their place once and again, nobody knows whose they are."""
    rewritten = [act for act in acts if act in REWRITING]
    return len(rewritten) < 2 or not {"compact", "compact_elsewhere"} & set(rewritten)


Story = Callable[[World, list[str]], Coroutine[Any, Any, None]]


async def do(agent: Agent, act: str) -> bool:
    agent.world.trace.append(f"{act}:")
    done: bool = await getattr(agent, act)()
    return done


async def in_order(world: World, acts: list[str]) -> None:
    """One conversation, and one thing after the other. One alone leaves its own edits and no others; of several that
    fall together, nobody can tell which was which."""
    agent, wanted = main_agent(world), list[str]()
    world.one_thread = not (agent.headers and "delegate" in acts)
    world.same_words &= is_clear(acts)
    if coin(world.rng, 0.2):
        await agent.title()
        wanted += ["auxiliary"]
    await agent.turn()
    if not world.keep_thoughts and not (world.classed and agent.headers):  # nobody could tell it from a turn
        acts = [act for act in acts if act != "aside"]
    for act in acts:
        if await do(agent, act) and act in THINGS:
            wanted += THINGS[act]
            if act not in ("resample", "interrupted") or coin(world.rng):
                await agent.turn()
    if not isinstance(agent.items[-1], Said):
        await agent.turn()
    found = check(world)
    assert all(found.notes[number].heard for number in found.trained)
    if sum(act in THINGS for act in acts) > (0 if world.same_words else 1):  # or whose words they are
        return
    check_end(found, agent)
    assert {number: found.notes[number].kind for number in found.trained} == found.kinds
    rewritten = sum(isinstance(item, Said) and item.own for item in agent.items)
    assert rewritten <= found.recovered.report.to_json()["retokenised"]["messages"] <= acts.count("drift")
    if world.keep_thoughts:
        assert found.causes == wanted
    elif not {*REWRITING, "silence"} & set(acts):
        assert set(found.causes) <= {*wanted, "template_strip"}


async def astray(world: World, acts: list[str]) -> None:
    """An agent goes back and then on for a while: that is where its conversation ends."""
    agent = main_agent(world)
    world.one_thread = True
    await agent.turn()
    for act in acts:
        if await do(agent, act) and act == "rewind":
            said = len(world.engine.notes)
            while len(world.engine.notes) < said + 2:
                await agent.turn()
    if not isinstance(agent.items[-1], Said):
        await agent.turn()
    found = check(world)
    if acts.count("rewind") == 1:
        check_end(found, agent)


async def side_by_side(world: World, acts: list[str]) -> None:
    """Agents that work for others, all at once, each under its own name: none is taken for another."""
    rng, boss = world.rng, main_agent(world, named=True)
    agents = [boss]
    world.same_words &= is_clear(acts)
    await boss.turn()
    for act in acts:
        agent = rng.choice(agents)
        if act in ("hire", "fork"):
            agents.append(worker := agent.worker(named=True, fork=act == "fork"))
            await asyncio.gather(worker.turn(), agent.turn())
        elif act == "together":
            asked = [one.turn() for one in rng.sample(agents, rng.randint(1, len(agents)))]
            await asyncio.gather(*asked, *([agent.title()] if coin(rng, 0.3) else []))
        elif await do(agent, act):
            await agent.turn()
    await boss.turn()
    found = check(world)
    if not set(acts) & set(THINGS):
        check_end(found, boss)
        assert {number: found.notes[number].kind for number in found.trained} == found.kinds


async def anything(world: World, acts: list[str], *, everywhere: bool = False) -> None:
    """Whatever an agent or several do, in any order: no token is lost, and none is trained in the wrong context."""
    rng, agents = world.rng, [main_agent(world)]
    for act in acts:
        agent = rng.choice(agents)
        if act == "hire":
            agents.append(agent.worker(named=coin(rng, 0.7)))
        elif act == "together":
            await asyncio.gather(*(one.turn() for one in rng.sample(agents, rng.randint(1, len(agents)))))
        else:
            await do(agent, act)
    await rng.choice(agents).turn()
    check(world, everywhere=everywhere)


def play(story: Story, seed: int, acts: list[str], **how: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:

        async def played() -> None:
            path = ANTHROPIC if seed % 2 else CHAT
            told = {"keep_thoughts": seed % 3 > 0, "same_words": seed % 5 > 0} | how
            world = World(Path(folder), seed, path, **told)
            try:
                await story(world, acts)
            except BaseException as error:
                error.add_note("\n".join([f"{path}, {told}, acts: {acts}", *world.trace]))
                raise
            finally:
                await world.session.close({})

        asyncio.run(played())


STORIES: dict[str, tuple[Story, list[str]]] = {
    "it only grows": (in_order, QUIET),
    "one thing after the other": (in_order, [*QUIET, *THINGS]),
    "astray": (astray, [*QUIET, *["rewind"] * 4]),
    "side by side": (
        side_by_side,
        [*["hire", "fork", "together"] * 2, *QUIET[4:], *(thing for thing in THINGS if thing != "aside")],
    ),
    "anything": (anything, ANYTHING),
}
EXAMPLES = settings().max_examples // 5


@pytest.mark.parametrize("name", STORIES)
@settings(max_examples=EXAMPLES, derandomize=True)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_histories(name: str, seed: int, data: st.DataObject) -> None:
    story, acts = STORIES[name]
    play(story, seed, data.draw(st.lists(st.sampled_from(acts), max_size=10)))


@pytest.mark.parametrize("thing", THINGS)
def test_one_thing(thing: str) -> None:
    """Exactly one, in the middle of a conversation that only grows."""
    for seed in range(10):
        before, after = (random.Random(f"{seed} {side}").choices(QUIET, k=2) for side in ("before", "after"))
        play(in_order, seed, [*before, thing, *after])


def test_a_log_that_is_cut_off_anywhere() -> None:
    for seed in range(4):
        play(functools.partial(anything, everywhere=True), seed, random.Random(seed).choices(ANYTHING, k=8))


def failure(story: Story, seed: int, acts: list[str]) -> Exception | None:
    try:
        play(story, seed, acts)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told
        return error
    return None


def main(count: int, first: int) -> None:
    """Each story with many seeds, and of the first that fails as little as still does."""
    logging.disable(logging.CRITICAL)
    for name, (story, every) in STORIES.items():
        for seed in range(first, first + count):
            rng = random.Random(f"acts of {seed}")
            acts = rng.choices(every, k=rng.randint(0, 14))
            if failure(story, seed, acts) is None:
                continue
            i = 0
            while i < len(acts):
                less = acts[:i] + acts[i + 1 :]
                acts, i = (less, i) if failure(story, seed, less) is not None else (acts, i + 1)
            error = failure(story, seed, acts)
            print(f"{name}, seed {seed}, {acts}", *traceback.format_exception(error, limit=-2), sep="\n")
            break
        else:
            print(f"{name}: {count} histories")


if __name__ == "__main__":
    main(int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0]))
