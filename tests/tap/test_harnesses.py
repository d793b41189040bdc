"""The real command-line agents, served by the tap: tool calls, an automatic compaction, and the record of it.

``launch/harnesses.sh`` installs them. What they are told is scripted; everything else is as in a rollout, and what each
turn is worth is scored by a real SGLang server.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from slime_plugin.agents import driver_for
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import parse_cell
from slime_plugin.environments import open_environment
from slime_plugin.errors import ConfigError
from slime_plugin.methods import lay_out
from slime_plugin.record import Record, parse_record
from slime_plugin.record.interchange import dump_record
from slime_plugin.rollout.engine.engine import Generation, Request
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.tree import Trajectory
from tests.conftest import ROOT
from tests.tap.agents import ScoredScript, make_model, mean_logdiff
from tests.tap.engines import spell

SUMMARY = spell(
    "<analysis>Files were read.</analysis>\n"
    "<summary>The user wants every file read. Some were; nothing else is left to do.</summary>"
)
FINAL = spell("Everything is read. <answer>done</answer>", thought="That is enough.")
TASK = "Read every file in this folder, one after the other."
SHELLS = {"claude_code": "Bash", "opencode": "bash"}
DELEGATES = {"claude_code": ("Agent", "general-purpose"), "opencode": ("task", "general")}
CONTEXTS = {"claude_code": 30000, "opencode": 26000}
COMPACT_AT = {"claude_code": None, "opencode": 20000}
"""OpenCode looks at what the last turn took, and not at what its tools have read since."""


def cell(harness: str, model: Path, workspace: Path) -> Cell:
    program = ROOT / ".harnesses" / "bin" / {"claude_code": "claude", "opencode": "opencode"}[harness]
    settings = {
        "model": str(model),
        "harness": {
            "type": harness,
            "workspace": str(workspace),
            "program": str(program),
            "compact_at": COMPACT_AT[harness],
        },
        "rollout": {"context_tokens": CONTEXTS[harness], "turn_tokens": 1000, "turns": 60, "seconds": 300.0},
    }
    return parse_cell(settings, (), "the test")


def reading(harness: str) -> Callable[[str], str]:
    """Reads one file after the other, sometimes with a second call, until a summary was asked for; then one more."""
    asked: Counter[str] = Counter()

    def say(prompt: str) -> str:
        head, tail = prompt[:2000], prompt[-9000:]
        if "Respond with TEXT ONLY" in tail or "context summar" in head:
            asked["summary"] += 1
            return SUMMARY
        if asked["summary"]:
            asked["after"] += 1
        if asked["after"] > 1:
            return FINAL
        asked["turns"] += 1
        number = asked["turns"]
        calls = [(SHELLS[harness], {"command": f"cat file{number}.txt", "description": "show"})]
        if number % 2:
            calls.append((SHELLS[harness], {"description": "list", "command": "ls"}))
        return spell(f"Now number {number}.", calls, thought=f"step {number}")

    return say


def delegating(harness: str) -> Callable[[str], str]:
    """Has two agents of its own read a file each, at once; then it is done."""
    tool, kind = DELEGATES[harness]

    def say(prompt: str) -> str:
        if TASK not in prompt:
            number = re.findall(r"SUBTASK (\d)", prompt)[-1]
            if "<tool_response>" in prompt:
                return spell(f"File {number} is read.", thought=f"that was {number}")
            command = {"command": f"cat file{number}.txt", "description": "show"}
            return spell(f"Reading {number}.", [(SHELLS[harness], command)])
        if prompt.count("<tool_response>") >= 2:
            return FINAL
        asked = {"subagent_type": kind, "description": "read a file"}
        calls = [(tool, {**asked, "prompt": f"SUBTASK {number}: read file {number}."}) for number in (1, 2)]
        return spell("Two of me will do it.", calls, thought="this can be shared")

    return say


def stumbling(harness: str) -> Callable[[str], str]:
    """Calls a tool that does not exist, one without what it needs, and one twice in the same words; then it is done."""
    shell = SHELLS[harness]
    script = [
        spell("", [("Fly", {"to": "the moon"})], thought="up"),
        spell("  Now\n\nthis. ", [(shell, {"description": "nothing to run"})]),
        spell("Again.", [(shell, {"command": "echo same", "description": "say", "timeout": 5000.0})]),
        spell("Again.", [(shell, {"description": "say", "timeout": 5000, "command": "echo same"})]),
        FINAL,
    ]
    turn = iter(script)
    return lambda prompt: next(turn)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def scorer(model: Path) -> Iterator[Server]:
    with Server(Flags(model, "cpu", max_total_tokens=65536)) as server:
        yield server


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Files of about a thousand tokens."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    words = (ROOT / "README.md").read_text(encoding="utf-8") * 6
    for i in range(40):
        (folder / f"file{i}.txt").write_text(f"file {i}\n{words[1000 * i : 1000 * i + 3500]}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["claude_code", "opencode"])
def harness(request: pytest.FixtureRequest) -> str:
    """An agent that is installed. Tests ask for it before anything that takes time."""
    driver = driver_for(cell(request.param, ROOT, ROOT).harness)
    assert driver is not None
    try:
        driver.program()
    except ConfigError as error:
        pytest.skip(f"{error}")
    return str(request.param)


def checked_rollout(settings: Cell, scorer: Server, say: Callable[[str], str]) -> Record:
    """A rollout that went well: conditioned as it was served, and every sampled token trained or accounted for."""

    async def roll_out() -> tuple[Record, list[int]]:
        async with open_environment(settings) as agents:
            engine = Counting(ScoredScript(scorer.url, agents.chat, say))
            question = Question("q", TASK, ("done",))
            return await agents.begin(engine, question, "q-0", 1).run(), engine.sampled

    record, sampled = asyncio.run(roll_out())
    meta, extra = record.meta, record.meta.extra
    assert (meta.status, extra["stop"], meta.reward) == ("completed", "answer", 1.0), extra
    assert record.sampled == sum(sampled)
    for method in ("logittree", "mask4d"):
        layout = lay_out(Trajectory.of(record), parse_cell({"method": {"type": method}}, (), "").method)
        assert layout.trained == int(record.generated.sum())
    assert np.nanstd(record.logprobs) > 0.1
    assert settings.model is not None
    assert mean_logdiff(record, settings.model) < 1e-5
    assert parse_record(dump_record(record)) == record
    return record


def test_an_agent_works_compacts_and_is_recorded(harness: str, model: Path, workspace: Path, scorer: Server) -> None:
    record = checked_rollout(cell(harness, model, workspace), scorer, reading(harness))
    # The compaction is a junction, and nothing else happened to the context.
    assert [edit.extra["cause"] for edit in record.edits if edit.kind != "switch"] == ["compaction"]
    extra = record.meta.extra
    assert extra["breaks"] == {"compaction": 1}
    assert extra["retokenised"] == {"messages": 0, "tokens": 0}
    assert Counter(turn.get("kind", "main") for turn in extra["turns"])["summary"] == 1


def test_subagents_side_by_side(harness: str, model: Path, workspace: Path, scorer: Server) -> None:
    record = checked_rollout(cell(harness, model, workspace), scorer, delegating(harness))
    extra = record.meta.extra
    turns = {one["name"]: one["turns"] for one in extra["conversations"]}
    assert turns == {"main": 2, "subagent 1": 2, "subagent 2": 2}
    assert {edit.extra["cause"] for edit in record.edits} == {"subagent"}
    assert (extra["breaks"], extra["retokenised"]["messages"]) == ({}, 0)
    off = record.generated.copy()
    for turn in extra["turns"]:
        off[slice(*turn["span"])] = False
    assert not off.any()


def test_calls_that_cannot_be_carried_out(harness: str, model: Path, workspace: Path, scorer: Server) -> None:
    record = checked_rollout(cell(harness, model, workspace), scorer, stumbling(harness))
    extra = record.meta.extra
    assert (len(record.views), extra["calls"], len(extra["turns"])) == (1, 4, 5)
    assert (extra["breaks"], extra["retokenised"]["messages"], record.untrained) == ({}, 0, {})


def test_a_policy_that_samples(harness: str, model: Path, workspace: Path, scorer: Server) -> None:
    """Nothing is scripted: what a random model says is nonsense, is mostly cut off, and is the policy's fault."""
    settings = cell(harness, model, workspace)
    limits = settings.rollout.model_copy(update={"turns": 3, "turn_tokens": 200})
    settings = settings.model_copy(update={"rollout": limits})

    async def roll_out() -> Record:
        async with (
            open_environment(settings) as agents,
            SglangEngine(scorer.url, settings.engine, limits, agents.chat.stop_ids) as engine,
        ):
            return await agents.begin(engine, Question("q", TASK, ("done",)), "q-0", 1).run()

    record = asyncio.run(roll_out())
    assert record.meta.status in ("completed", "truncated"), record.meta.extra
    assert (record.meta.reward, record.untrained) == (0.0, {})
    assert record.sampled > 0
    assert record.meta.extra["retokenised"]["messages"] == 0
    assert mean_logdiff(record, model) < 1e-5


class Counting:
    """Keeps how much was sampled in each turn."""

    def __init__(self, engine: ScoredScript) -> None:
        self._engine = engine
        self.sampled: list[int] = []

    async def generate(self, request: Request) -> Generation:
        generation = await self._engine.generate(request)
        self.sampled.append(len(generation.tokens))
        return generation
