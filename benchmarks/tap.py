"""What the tap adds to a request beyond the engine's own time, and whether that grows with the number of turns.

    python -m benchmarks.tap [--sessions 20] [--repeat 15] [--turns 5 20 80 160] [--many 256] [--think 2] [--json FILE]

A server in a process of its own, whose engine answers at once, is asked by a client that speaks HTTP and nothing else.
What is timed is a request from its first byte to the last of its answer, minus what the engine took. Contexts are text
of this repository, in tokens of a byte-level BPE trained on it: three to four characters each, as real ones have.

1. A turn at a context of about 30,000 tokens, in both wire formats: a result of 500 tokens is new in each request.
2. The same context made of few long turns or many short ones, and contexts that grow: all of them take turns within
   each repetition, and ratios are medians over repetitions. Beside it, what tokenising the whole context again takes.
3. Many sessions of 20 turns at once: with an engine that answers at once, and with one that takes its time.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import re
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slime_plugin.config.rollout import Rollout
from slime_plugin.recovery.conversations import find_conversations
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.engine import Generation, Request
from slime_plugin.rollout.messages import Message
from slime_plugin.tap.limits import ServerSettings
from slime_plugin.tap.server import TapServer
from slime_plugin.tap.tap import Tap

ROOT = Path(__file__).parent.parent
PATHS = {"anthropic": "/v1/messages", "openai chat": "/v1/chat/completions"}
CONTEXT = 30_000
VOCABULARY = 8192
SYSTEM_TOKENS, TOOLS, TOOL_TOKENS = 2000, 10, 100
SCRIPT = 400
"""Turns that the engine can tell apart; a session has fewer."""
CALL_ID = re.compile(rb'"id":"(call_[^"]+)"')


class Library:
    """Text of this repository, a passage after the other."""

    def __init__(self, folder: Path) -> None:
        self._text = "\n".join(repository())
        whole: Any = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(self._text, add_special_tokens=False)
        self._starts = [start for start, _ in whole.offsets]
        self.characters = len(self._text) / len(self._starts)
        """Per token."""
        self._at = self._passages = 0

    def passage(self, tokens: int) -> str:
        """About so many tokens that were never given out before; its number is in front."""
        if self._at + tokens >= len(self._starts):
            self._at = 0
        first, self._at = self._at, self._at + tokens
        self._passages += 1
        return f"{self._passages}: " + self._text[self._starts[first] : self._starts[self._at]]


def repository() -> list[str]:
    folders = ("slime_plugin", "tests", "benchmarks", "examples", "docs")
    paths = [ROOT / "README.md", *(path for name in folders for path in sorted((ROOT / name).rglob("*")))]
    return [path.read_text(encoding="utf-8") for path in paths if path.suffix in (".md", ".py")]


def train_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(repository(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


# What the policy says


@dataclass(frozen=True)
class Line:
    """The same turn of every session."""

    thought: str
    text: str
    path: str

    def spelt(self) -> str:
        call = orjson.dumps({"name": "tool_0", "arguments": {"path": self.path, "limit": 2000}}).decode()
        return f"<think>\n{self.thought}\n</think>\n\n{self.text}\n<tool_call>\n{call}\n</tool_call>"


def line(number: int) -> Line:
    """About eighty tokens."""
    thought = f"Step {number}: the last result does not say where the record is written, so I have to look further."
    text = f"I will read the next file, number {number}, and see whether the log is closed before it is read back."
    return Line(thought, text, f"slime_plugin/tap/session_{number}.py")


class Prepared:
    """Says the lines of the script in turn, in every session; notes how long each took."""

    def __init__(self, chat: ChatML) -> None:
        self.think = 0.0
        """Seconds that a turn takes."""
        self.spent: dict[str, list[float]] = defaultdict(list)
        (end,) = chat.stop_ids
        opening = len(chat.open_turn())
        self._script = []
        rng = np.random.default_rng(0)
        for number in range(SCRIPT):
            tokens = chat.reply(line(number).spelt())[opening:]
            tokens = tokens[: tokens.index(end) + 1]
            logprobs = (-rng.exponential(0.5, len(tokens))).tolist()
            self._script.append(Generation(tuple(tokens), tuple(logprobs), "stop", (("7", len(tokens)),)))

    async def generate(self, request: Request) -> Generation:
        begun = time.perf_counter()
        if self.think:
            await asyncio.sleep(self.think)
        spent = self.spent[request.rollout]
        spent.append(time.perf_counter() - begun)
        return self._script[len(spent) - 1]


# The server


def serve(pipe: Connection, folder: Path) -> None:
    """In a process of its own: answers what comes through the pipe until that is None."""
    more_files()
    asyncio.run(_serve(pipe, folder))


async def _serve(pipe: Connection, folder: Path) -> None:
    chat = ChatML.load(folder)
    engine = Prepared(chat)
    limits = Rollout(turns=10**6, context_tokens=10**7)
    tap = Tap(chat, limits, folder / "logs", model="policy")
    opened = 0
    async with TapServer(tap, ServerSettings()) as server:
        pipe.send(server.port)
        while (command := await asyncio.to_thread(pipe.recv)) is not None:
            if command[0] == "open":
                engine.think = command[2]
                names = [f"r{opened + i}" for i in range(command[1])]
                opened += command[1]
                pipe.send([(name, tap.open(name, engine, seed=7)[1]) for name in names])
            else:  # close
                spent, tokens = {}, {}
                for session in tap.sessions:
                    (only,) = find_conversations(session.contexts, session.parents).all
                    assert len(only.chains) == 1
                    assert not session.contexts.unmatched_replies()
                    spent[session.id] = engine.spent.pop(session.id)
                    tokens[session.id] = [session.contexts.nodes[turn.at].length for turn in session.turns]
                    await session.close({})
                    tap.close(session)
                pipe.send((spent, tokens, time.process_time()))


def more_files() -> None:
    """A session has a log and a connection, which is a file at either end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@dataclass
class Server:
    port: int
    pipe: Connection

    def open(self, sessions: int, think: float = 0.0) -> list[tuple[str, str]]:
        """Names and tokens."""
        self.pipe.send(("open", sessions, think))
        opened: list[tuple[str, str]] = self.pipe.recv()
        return opened

    def close(self) -> tuple[dict[str, list[float]], dict[str, list[int]], float]:
        """Ends all sessions: seconds in the engine and tokens of the prompt for each of their turns, and the CPU
        time of the server so far."""
        self.pipe.send(("close",))
        closed: tuple[dict[str, list[float]], dict[str, list[int]], float] = self.pipe.recv()
        return closed


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, folder))
    process.start()
    theirs.close()
    try:
        yield Server(ours.recv(), ours)
        ours.send(None)
        process.join()
    finally:
        process.kill()  # if it has not ended by now
        process.join()


# The client


@dataclass
class Agent:
    """A conversation as a client has it."""

    wire_format: str
    token: str
    library: Library
    messages: list[dict[str, Any]] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """Of each request so far."""

    def __post_init__(self) -> None:
        system, schema = self.library.passage(SYSTEM_TOKENS), {"type": "object", "properties": {"path": {}}}
        told = [(f"tool_{i}", self.library.passage(TOOL_TOKENS)) for i in range(TOOLS)]
        self.head = {"model": "policy", "stream": True}
        self.messages = [{"role": "user", "content": self.library.passage(100)}]
        if self.wire_format == "anthropic":
            tools = [{"name": name, "description": text, "input_schema": schema} for name, text in told]
            self.head |= {"system": system, "tools": tools, "max_tokens": 2048}
        else:
            self.messages.insert(0, {"role": "system", "content": system})
            functions = [{"name": name, "description": text, "parameters": schema} for name, text in told]
            self.head["tools"] = [{"type": "function", "function": function} for function in functions]

    def body(self) -> bytes:
        return orjson.dumps({**self.head, "messages": self.messages})

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}", "content-type": "application/json"}

    def go_on(self, raw: bytes, result: str) -> None:
        """Take an answer, and the result of the tool that it calls."""
        said, call = line(len(self.seconds) - 1), CALL_ID.findall(raw)[0].decode()
        arguments = {"path": said.path, "limit": 2000}
        if self.wire_format == "anthropic":
            blocks: list[dict[str, Any]] = [
                {"type": "thinking", "thinking": said.thought, "signature": ""},
                {"type": "text", "text": said.text},
                {"type": "tool_use", "id": call, "name": "tool_0", "input": arguments},
            ]
            given = {"type": "tool_result", "tool_use_id": call, "content": result}
            self.messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [given]}]
        else:
            function = {"name": "tool_0", "arguments": orjson.dumps(arguments).decode()}
            calls = [{"id": call, "type": "function", "function": function}]
            self.messages.append({"role": "assistant", "content": said.text, "tool_calls": calls})
            self.messages.append({"role": "tool", "tool_call_id": call, "content": result})

    def step(self, wire: http.client.HTTPConnection, result: int) -> None:
        """One turn, and a result of so many tokens."""
        body, headers = self.body(), self.headers
        begun = time.perf_counter()
        wire.request("POST", PATHS[self.wire_format], body, headers)
        response = wire.getresponse()
        raw = response.read()
        self.seconds.append(time.perf_counter() - begun)
        assert response.status == 200, raw
        self.go_on(raw, self.library.passage(result))

    async def step_among(self, client: aiohttp.ClientSession, result: int) -> None:
        body = self.body()
        begun = time.perf_counter()
        async with client.post(PATHS[self.wire_format], data=body, headers=self.headers) as response:
            raw = await response.read()
        self.seconds.append(time.perf_counter() - begun)
        assert response.status == 200, raw
        self.go_on(raw, self.library.passage(result))


@dataclass(frozen=True)
class Course:
    """How a conversation grows: turns whose results have ``filler`` tokens, and then some that are measured."""

    turns: int
    filler: int
    measured: int
    result: int
    """Tokens that are new in each request that is measured, beside what the policy said."""


def filling(chat: ChatML, turns: int, measured: int, result: int) -> Course:
    """A context of about ``CONTEXT`` tokens in the middle of what is measured, made of so many turns."""
    said = len(chat.reply(line(50).spelt())) + len(chat.render(Message("tool", "1234: ")))
    head = SYSTEM_TOKENS + TOOLS * (TOOL_TOKENS + 45) + 200
    left = CONTEXT - head - turns * said - (1 + measured // 2) * (result + said)
    return Course(turns, max(left // (turns - 1), 1), measured, result)


@dataclass(frozen=True)
class Measured:
    """The requests of one conversation that count."""

    added: list[float]
    """Seconds beyond the engine's."""
    tokens: float
    """Of their prompts, in the middle."""


def measure(server: Server, library: Library, wire_format: str, course: Course) -> Measured:
    ((name, token),) = server.open(1)
    agent = Agent(wire_format, token, library)
    wire = http.client.HTTPConnection("127.0.0.1", server.port)
    for turn in range(course.turns + course.measured):
        # The last filler is the first that is new in a measured request.
        agent.step(wire, course.filler if turn < course.turns - 1 else course.result)
    wire.close()
    spent, tokens, _ = server.close()
    added = [whole - engine for whole, engine in zip(agent.seconds, spent[name], strict=True)]
    return Measured(added[course.turns :], statistics.median(tokens[name][course.turns :]))


def again_seconds(chat: ChatML, library: Library, tokens: int) -> float:
    """What tokenising a context of so many tokens takes, in pieces of 500."""
    pieces = [library.passage(500) for _ in range(tokens // 500)]
    begun = time.perf_counter()
    for piece in pieces:
        chat.reply(piece)
    return time.perf_counter() - begun


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    at = np.percentile(np.array(values) * 1e3, [50, 90, 99])
    return dict(zip(("median", "p90", "p99"), at.tolist(), strict=True))


def row(what: str, values: dict[str, float]) -> str:
    return f"  {what:44} {values['median']:8.2f} {values['p90']:8.2f} {values['p99']:8.2f}"


# The three parts


def one_turn(server: Server, library: Library, chat: ChatML, sessions: int) -> dict[str, Any]:
    course = filling(chat, turns=20, measured=10, result=500)
    found: dict[str, list[Measured]] = {wire_format: [] for wire_format in PATHS}
    for _ in range(sessions):
        for wire_format in PATHS:
            found[wire_format].append(measure(server, library, wire_format, course))
    print(f"\nbeyond the engine's own time, {sessions * course.measured} requests each; ms   median      p90      p99")
    told = {}
    for wire_format, every in found.items():
        tokens = statistics.median(one.tokens for one in every)
        told[wire_format] = {"tokens": tokens} | percentiles([added for one in every for added in one.added])
        print(row(f"{wire_format}, {tokens:,.0f} tokens", told[wire_format]))
    return told


def by_turns(server: Server, library: Library, chat: ChatML, turns: Sequence[int], repeat: int) -> dict[str, Any]:
    courses = {
        "fixed": {n: filling(chat, n, measured=8, result=150) for n in turns},
        "growing": {n: Course(n, filler=500, measured=8, result=150) for n in turns},
    }
    told: dict[str, Any] = {}
    for wire_format in PATHS:
        found: dict[tuple[str, int], list[Measured]] = defaultdict(list)
        again: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(repeat):
            for context, of in courses.items():
                for n, course in of.items():
                    one = measure(server, library, wire_format, course)
                    found[context, n].append(one)
                    again[context, n].append(again_seconds(chat, library, int(one.tokens)))
        for context, of in courses.items():
            size = "about the same size" if context == "fixed" else "some 630 tokens more with each turn"
            print(f"\n{wire_format}, a context of {size}, {repeat} repetitions")
            print("   turns    tokens   median ms      p90      p99   / first   (range)      rendering it again, ms")
            first = [statistics.median(one.added) for one in found[context, turns[0]]]
            for n in of:
                every = found[context, n]
                ratios = [statistics.median(one.added) / base for one, base in zip(every, first, strict=True)]
                values: dict[str, Any] = percentiles([added for one in every for added in one.added])
                values |= {
                    "tokens": statistics.median(one.tokens for one in every),
                    "ratio": statistics.median(ratios),
                    "ratios": [min(ratios), max(ratios)],
                    "again": statistics.median(again[context, n]) * 1e3,
                }
                told.setdefault(wire_format, {}).setdefault(context, {})[n] = values
                print(
                    f"  {n:6} {values['tokens']:9,.0f}   {values['median']:9.2f} {values['p90']:8.2f} "
                    f"{values['p99']:8.2f}   {values['ratio']:7.2f}   {min(ratios):.2f} to {max(ratios):.2f}   "
                    f"{values['again']:12.1f}"
                )
    return told


async def many(server: Server, library: Library, sessions: int, think: float, turns: int = 20) -> dict[str, Any]:
    """Half of them in each wire_format; 500 tokens are new in each request."""
    cpu = server.close()[2]
    opened = server.open(sessions, think)
    wire_formats = list(PATHS)
    agents = [Agent(wire_formats[i % 2], token, library) for i, (_, token) in enumerate(opened)]
    url = f"http://127.0.0.1:{server.port}"

    async def play(agent: Agent, client: aiohttp.ClientSession, wait: float) -> None:
        await asyncio.sleep(wait)  # agents do not all begin at once
        for _ in range(turns):
            await agent.step_among(client, 500)

    begun = time.perf_counter()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=sessions)) as client:
        await asyncio.gather(*(play(agent, client, think * i / sessions) for i, agent in enumerate(agents)))
    wall = time.perf_counter() - begun
    spent, tokens, used = server.close()
    latency = [seconds for agent in agents for seconds in agent.seconds]
    engine = [seconds for name, _ in opened for seconds in spent[name]]
    added = [whole - part for whole, part in zip(latency, engine, strict=True)]
    last = statistics.median(of[-1] for of in tokens.values())
    per_turn = (used - cpu) / (sessions * turns)
    print(
        f"\n{sessions} sessions x {turns} turns at once, contexts of up to {last:,.0f} tokens, "
        f"{f'an engine that takes {think:g} s a turn' if think else 'an engine that answers at once'}:\n"
        f"  {wall:.1f} s, {sessions * turns / wall:.0f} turns/s, {per_turn * 1e3:.2f} ms of CPU of the server per turn"
        "; ms   median      p90      p99"
    )
    whole, beyond = percentiles(latency), percentiles(added)
    print(row("a request as its client sees it", whole))
    print(row("beyond the engine's own time", beyond))
    rates = {"wall": wall, "turns_per_second": sessions * turns / wall, "cpu_ms": per_turn * 1e3}
    return {"think": think, "sessions": sessions, **rates, "latency": whole, "added": beyond}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 20, 80, 160])
    parser.add_argument("--many", type=int, default=256)
    parser.add_argument("--think", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    more_files()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(folder)
        library, chat = Library(folder), ChatML.load(folder)
        print(f"{VOCABULARY} tokens of {library.characters:.1f} characters in the mean")
        with running(folder) as server:
            measure(server, library, "anthropic", filling(chat, 20, 10, 500))  # warm
            told = {
                "one_turn": one_turn(server, library, chat, options.sessions),
                "by_turns": by_turns(server, library, chat, options.turns, options.repeat),
                "many": [asyncio.run(many(server, library, options.many, think)) for think in (0.0, options.think)],
            }
    if options.json is not None:
        content = {"settings": vars(options) | {"json": str(options.json)}, **told}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
