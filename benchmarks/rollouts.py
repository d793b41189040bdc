"""What the turn loop itself costs: its share of the time of real rollouts, and how it grows with the number of turns.

    python -m benchmarks.rollouts [--cell configs/small_world/agentfold.yaml] [--questions 32] [--turns 8 16 ...]

The first part samples rollouts on a real SGLang server, 64 at once, and takes the CPU time of every call of its
functions; all of them run on one thread. The second part plays rollouts of many turns with an engine that answers at
once, where the turn loop is all that takes time.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import load_config
from slime_plugin.config.harness import SearchR1, TcRag
from slime_plugin.config.reward import ExactMatch
from slime_plugin.config.rollout import Rollout
from slime_plugin.record import StoreWriter
from slime_plugin.rollout import turn_loop
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.context import Context
from slime_plugin.rollout.editors import editor_factory
from slime_plugin.rollout.engine import sglang_client
from slime_plugin.rollout.engine.engine import Generation, Request
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.environment import EditorEnvironment, open_editor_environment
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.reward import build_reward
from slime_plugin.rollout.runner import RolloutTask, RunTotals, open_run, run_tasks
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.rollout.tools.tool import Parameter, Schema
from slime_plugin.rollout.turn_loop import EditorRollout

TIMED: dict[str, tuple[tuple[Any, str], ...]] = {
    "rendering": ((ChatML, "prompt"), (ChatML, "render"), (ChatML, "text"), (ChatML, "cut")),
    "context and edits": (
        *((Context, name) for name in ("append", "append_turn", "evict", "replace", "restore", "prompt", "take_back")),
        (turn_loop, "parse_calls"),
    ),
    "recording": ((Context, "record"), (StoreWriter, "append")),
    "requests": ((SglangEngine, "_read"),),  # and what orjson takes, see below
}


def clock_seconds(calls: int = 100_000) -> float:
    """What asking for the CPU time once, before and after a call, adds to the time of the call."""
    begun = time.thread_time()
    for _ in range(calls):
        time.thread_time()
    return (time.thread_time() - begun) / calls


@contextmanager
def timed() -> Iterator[Mapping[str, float]]:
    """Seconds spent in each part of the turn loop; what one part does for another counts once, for the inner one."""
    spent: dict[str, float] = defaultdict(float)
    inner = [0.0]
    clock = clock_seconds()

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **settings: Any) -> Any:
            inner.append(0.0)
            begun = time.thread_time()
            try:
                return function(*arguments, **settings)
            finally:
                taken = time.thread_time() - begun
                spent[part] += taken - inner.pop() - clock
                inner[-1] += taken

        return wrapper

    places = [(part, owner, name) for part, places in TIMED.items() for owner, name in places]
    before = [(owner, name, getattr(owner, name)) for _, owner, name in places]
    for part, owner, name in places:
        setattr(owner, name, wrap(part, getattr(owner, name)))
    # The functions of a compiled module cannot be replaced, but the client can be given another module.
    written = {name: staticmethod(wrap("requests", getattr(orjson, name))) for name in ("dumps", "loads")}
    setattr(sglang_client, "orjson", type("orjson", (), written))  # noqa: B010  # mypy knows it as a module
    try:
        yield spent
    finally:
        setattr(sglang_client, "orjson", orjson)  # noqa: B010
        for owner, name, function in before:
            setattr(owner, name, function)


async def real_rollouts(cell: Cell, server: Server, questions: int, out: Path) -> None:
    async with (
        open_editor_environment(cell) as environment,
        SglangEngine(server.url, cell.engine, cell.rollout, environment.chat.stop_ids) as engine,
    ):
        assert cell.rollout.questions is not None
        asked = read_questions(cell.rollout.questions)[:questions]
        tasks = [RolloutTask(question, sample) for question in asked for sample in range(cell.rollout.samples)]
        totals, stop = RunTotals(len(tasks)), asyncio.Event()
        with open_run(out, cell) as store, timed() as spent:
            begun, cpu = time.perf_counter(), time.process_time()
            await run_tasks(
                environment, engine, tasks, store, lambda record, done: totals.add(record, done.turns), stop
            )
            wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(
        f"{totals.rollouts} rollouts, {cell.rollout.concurrency} at once: {wall:.1f} s, "
        f"{totals.turns / wall:.0f} turns/s, {totals.tokens / wall:.0f} tokens/s, "
        f"{totals.edits} edits, {dict(totals.statuses)}"
    )
    for part in TIMED:
        print(f"  {part:32} {spent[part] * 1e3:9.1f} ms   {spent[part] / wall:7.2%} of the wall time")
    own = sum(spent[part] for part in TIMED if part != "requests")
    print(f"  {'rendering, editing, recording':32} {own * 1e3:9.1f} ms   {own / wall:7.2%}   (target: under 3 %)")
    print(f"  {'the process, with HTTP and tools':32} {cpu * 1e3:9.1f} ms   {cpu / wall:7.2%}")


class Instant:
    """An engine that calls a tool at every turn but the last, and pops at every fourth, at no cost."""

    def __init__(self, chat: ChatML, turns: int, pops: bool) -> None:
        say = chat._encode_text
        search = say(
            'I have to look further. <tool_call>\n{"name": "look", "arguments": {"query": "more"}}\n</tool_call>'
        )
        pop = say('<tool_call>\n{"name": "pop", "arguments": {}}\n</tool_call>')
        (end,) = chat.stop_ids
        lines = [pop if pops and i % 4 == 3 else search for i in range(turns - 1)] + [say("<answer>x</answer>")]
        self.turns = [Generation((*line, end), (-0.5,) * (len(line) + 1), "stop") for line in lines]
        self.at = 0
        self.written = 0.0
        """Seconds that writing the prompts out as JSON takes. That grows with the context, whoever writes them."""

    async def generate(self, request: Request) -> Generation:
        begun = time.thread_time()
        orjson.dumps(request.prompt)
        self.written += time.thread_time() - begun
        self.at += 1
        return self.turns[self.at - 1]


class Look:
    """A tool with a result of about 250 tokens, never the same."""

    schema = Schema("look", "", {"query": Parameter("string")})

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        self.calls += 1
        return f"{self.calls}: " + "find Ada Stone's boss: " + "a result that is neither short nor long, " * 6


def seconds_of(turns: int, pops: bool, model: Path, repeat: int = 7) -> tuple[float, float, int]:
    """Least time of a rollout of that many turns, of writing its prompts out, and the tokens on its tape."""
    chat = ChatML.load(model)
    limits = Rollout(turns=turns, context_tokens=10_000_000, system="append", describe_tools=False)
    editor = editor_factory(TcRag(reply="") if pops else SearchR1())
    environment = EditorEnvironment("bench", editor, {"look": Look()}, chat, build_reward(ExactMatch()), limits)
    times, tape = [], 0
    for _ in range(repeat):
        engine = Instant(chat, turns, pops)
        begun = time.thread_time()
        record = asyncio.run(EditorRollout(environment, engine, Question("q", "What?", ("x",)), "q-0", 1).run())
        times.append((time.thread_time() - begun - engine.written, engine.written))
        assert record.meta.status == "completed", record.meta
        tape = len(record)
    return min(own for own, _ in times), min(written for _, written in times), tape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=Path, default=Path("configs/small_world/agentfold.yaml"))
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--turns", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    arguments = parser.parse_args()
    cell = load_config(arguments.cell, Cell)
    assert cell.model is not None
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    with tempfile.TemporaryDirectory() as folder, Server(Flags(cell.model, "cpu")) as server:
        asyncio.run(real_rollouts(cell, server, 2, Path(folder) / "warm"))
        asyncio.run(real_rollouts(cell, server, arguments.questions, Path(folder) / "run"))
    for pops, what in ((False, "nothing is edited"), (True, "a pop at every fourth turn")):
        print(f"\nan engine that answers at once, {what}")
        for turns in arguments.turns:
            own, written, tape = seconds_of(turns, pops, cell.model)
            print(
                f"  {turns:4} turns, {tape:7,} tokens: {own * 1e3:8.2f} ms, {own / turns * 1e6:5.0f} us per turn; "
                f"writing the prompts {written * 1e3:7.2f} ms"
            )


if __name__ == "__main__":
    main()
