"""The real command-line agents, served by the tap: tool calls, an automatic compaction, and the record of it.

``launch/harnesses.sh`` installs them. What they are told is scripted; everything else is as in a rollout, and what each
turn is worth is scored by a real SGLang server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from slime_plugin.bridge.engine.base import Generation, Request
from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.server import Flags, Server
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import parse_cell
from slime_plugin.errors import ConfigError
from slime_plugin.methods import lay_out
from slime_plugin.record import Record, parse_record
from slime_plugin.record.interchange import dump_record
from slime_plugin.tap.drivers import driver_for
from slime_plugin.tap.run import open_surroundings
from slime_plugin.tree import Trajectory
from tests.conftest import ROOT
from tests.tap.agents import ScoredScript, drift, make_model
from tests.tap.engines import spell

SUMMARY = spell(
    "<analysis>Files were read.</analysis>\n"
    "<summary>The user wants every file read. Some were; nothing else is left to do.</summary>"
)
FINAL = spell("Everything is read. <answer>done</answer>", thought="That is enough.")
SHELLS = {"claude_code": "Bash", "opencode": "bash"}
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


def script(harness: str) -> Callable[[str], str]:
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
    words = (ROOT / "README.md").read_text(encoding="utf-8") * 4
    for i in range(40):
        (folder / f"file{i}.txt").write_text(f"file {i}\n{words[1000 * i : 1000 * i + 3500]}", encoding="utf-8")
    return folder


def skip_unless_installed(settings: Cell) -> None:
    driver = driver_for(settings.harness)
    assert driver is not None
    try:
        driver.program()
    except ConfigError as error:
        pytest.skip(f"{error}")


@pytest.mark.parametrize("harness", ["claude_code", "opencode"])
def test_an_agent_works_compacts_and_is_recorded(
    harness: str, model: Path, workspace: Path, request: pytest.FixtureRequest
) -> None:
    settings = cell(harness, model, workspace)
    skip_unless_installed(settings)
    scorer: Server = request.getfixturevalue("scorer")

    async def roll_out() -> tuple[Record, list[int]]:
        async with open_surroundings(settings) as agents:
            engine = Counting(ScoredScript(scorer.url, agents.chat, script(harness)))
            question = Question("q", "Read every file in this folder, one after the other.", ("done",))
            return await agents.begin(engine, question, "q-0", 1).run(), engine.sampled

    record, sampled = asyncio.run(roll_out())
    meta, extra = record.meta, record.meta.extra
    assert (meta.status, extra["stop"], meta.reward) == ("completed", "answer", 1.0), extra
    # The compaction is a junction, and nothing else happened to the context.
    assert [edit.extra["cause"] for edit in record.edits if edit.kind != "switch"] == ["compaction"]
    assert extra["breaks"] == {"compaction": 1}
    assert extra["retokenised"] == {"messages": 0, "tokens": 0}
    assert Counter(turn.get("kind", "main") for turn in extra["turns"])["summary"] == 1
    # Every sampled token is trained, or it is said why not.
    untrained = sum(extra.get("untrained", {}).values())
    assert int(record.generated.sum()) + untrained == sum(sampled)
    for method in ("logittree", "mask4d"):
        layout = lay_out(Trajectory.of(record), parse_cell({"method": {"type": method}}, (), "").method)
        assert layout.trained == int(record.generated.sum())
    # It is conditioned as it was served.
    assert np.nanstd(record.logprobs) > 0.1
    assert drift(record, model) < 1e-5
    assert parse_record(dump_record(record)) == record


class Counting:
    """Keeps how much was sampled in each turn."""

    def __init__(self, engine: ScoredScript) -> None:
        self._engine = engine
        self.sampled: list[int] = []

    async def generate(self, request: Request) -> Generation:
        generation = await self._engine.generate(request)
        self.sampled.append(len(generation.tokens))
        return generation
