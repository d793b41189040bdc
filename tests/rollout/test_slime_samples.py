"""Samples of slime's on a real engine: evaluations, and rollouts that slime ends while they are busy with a tool."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from slime_plugin.config.overrides import load_cell
from slime_plugin.hooks import rollout as hooks
from slime_plugin.local.sample import Sample
from slime_plugin.rollout.server import Server
from slime_plugin.rollout.tools.tool import Parameter, Schema
from slime_plugin.slime.samples import record_of, rollout_service
from tests.conftest import ROOT
from tests.tap.agents import mean_logdiff

BUSY: list[asyncio.Event] = []


class Stuck:
    """A search that never answers, and says when it is asked."""

    schema = Schema("search", "Look something up.", {"query": Parameter("string")})

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        BUSY[0].set()
        await asyncio.Event().wait()
        return "never"


def args_of(server: Server, *settings: str) -> Namespace:
    cell = load_cell(ROOT / "configs" / "small_world" / "agentfold.yaml", settings)
    address = urlsplit(server.url)
    return Namespace(memorywalker=cell.to_json(), sglang_router_ip=address.hostname, sglang_router_port=address.port)


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The state of slime's rollout loop, where ours looks for it."""
    state = SimpleNamespace(aborted=False)
    module = ModuleType("slime.rollout.sglang_rollout")
    module.GenerateState = lambda args: state  # type: ignore[attr-defined]  # slime's name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(ROOT)
    return state


def question() -> Sample:
    return Sample(index=3, group_index=1, prompt="Where does Ada work?", label=["Rome"])


def test_a_rollout_that_is_busy_with_a_tool_ends_when_slime_wants_it_to(server: Server, slime: SimpleNamespace) -> None:
    args = args_of(server, "tools=[{type: 'tests.rollout.test_slime_samples:Stuck'}]", "rollout.tool_seconds=600")

    async def play() -> Any:
        BUSY[:] = [asyncio.Event()]
        rolling_out = asyncio.create_task(hooks.generate(args, question(), {}))
        await asyncio.wait_for(BUSY[0].wait(), 60)
        slime.aborted = True
        return await asyncio.wait_for(rolling_out, 60)

    sample = asyncio.run(play())
    record = record_of(sample)
    assert (record.meta.status, record.meta.extra["stop"]) == ("aborted", "stopped")
    assert sample.status is Sample.Status.ABORTED
    assert (sample.reward, record.meta.reward) == (0.0, None), "a number for slime's statistics, and none for ours"
    assert record.generated.any(), "what was sampled before is kept"

    async def again() -> Any:
        slime.aborted = False
        return await hooks.generate(args_of(server), sample, {})

    finished = record_of(asyncio.run(again()))
    assert finished.meta.status in ("completed", "truncated")
    assert finished.meta.report.discarded == int(record.generated.sum())


def test_evaluations_sample_in_their_own_way(server: Server, slime: SimpleNamespace) -> None:
    args = args_of(server, "evaluation.temperature=0", "rollout.seed=1")

    async def play(evaluation: bool, index: int) -> list[int]:
        sample = Sample(index=index, prompt="Where does Ada work?", label=["Rome"])
        return (await hooks.generate(args, sample, {}, evaluation=evaluation)).tokens

    async def several() -> tuple[list[list[int]], list[list[int]]]:
        return (
            await asyncio.gather(*(play(True, index) for index in range(4))),
            await asyncio.gather(*(play(False, index) for index in range(4))),
        )

    greedy, drawn = asyncio.run(several())
    assert len({tuple(tokens) for tokens in greedy}) == 1
    assert len({tuple(tokens) for tokens in drawn}) > 1


def test_an_agent_that_is_a_black_box_gives_a_sample_like_any_other(server: Server, slime: SimpleNamespace) -> None:
    """A process of its own, served by the tap with what the engine really samples."""
    settings = ("harness={type: 'tests.tap.own_driver:OwnDriver', asks: 3, forget: 99}", "tools=[]")
    args = args_of(server, *settings, "rollout.turn_tokens=40", "rollout.context_tokens=2048")

    async def play() -> Any:
        sample = await hooks.generate(args, question(), {})
        await rollout_service(args).close()
        return sample

    sample = asyncio.run(play())
    record = record_of(sample)
    assert record.meta.status == "completed", record.meta.extra
    assert sample.status is Sample.Status.COMPLETED
    assert len(record.meta.extra["turns"]) == 3
    assert sample.reward == record.meta.reward
    assert mean_logdiff(record, ROOT / "examples" / "small_world" / "model") < 1e-5
