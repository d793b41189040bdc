"""Faults on a real SGLang server: killed in mid-turn, stopped, out of time, updated in mid-turn, asked for too much.

Whatever happens, what is on record is what the engine sampled: it replays.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import load_config
from slime_plugin.config.rollout import EngineSettings, Rollout
from slime_plugin.record import Meta, Record, StoreWriter, read_records
from slime_plugin.rollout.context import Context
from slime_plugin.rollout.engine.engine import EngineError, Generation, Request
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.environment import RolloutHandle, open_editor_environment
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.runner import STORE, run_tasks, tasks_left
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.rollout.server.ports import free_port
from slime_plugin.rollout.server.weight_update import update_weights
from slime_plugin.rollout.turn_loop import EditorRollout
from tests.conftest import ROOT
from tests.rollout.policy import CHAT
from tests.rollout.replay import MODEL, check_replay
from tests.rollout.router import Router

START = CHAT.prompt("append", "What is it?", ())
PROMPT = [*START, *CHAT.open_turn()]
BRISK = EngineSettings(timeout=60.0, retries=0)
RANDOM = Rollout(temperature=20.0)
"""Nearly uniform sampling, so that a turn goes on for hundreds of tokens."""


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def cell(name: str, **limits: Any) -> Cell:
    loaded = load_config(f"configs/small_world/{name}.yaml", Cell)
    return loaded.model_copy(update={"rollout": loaded.rollout.model_copy(update=limits)})


def test_an_engine_that_is_killed_in_mid_turn_and_restarted_costs_no_rollout(policy: Any, tmp_path: Path) -> None:
    """And the restarted one, whose cache is empty, goes on with the same rollouts."""
    server = Server(Flags(MODEL, "cpu", max_total_tokens=16384), port=free_port())
    settings = cell("agentfold", concurrency=16)
    patient = EngineSettings(retries=1000, timeout=1800.0)  # as long as the restart may take

    async def play() -> None:
        stop = asyncio.Event()
        restarting: list[asyncio.Task[None]] = []

        def watch(record: Record, rollout: RolloutHandle) -> None:
            if not restarting:
                os.killpg(server.pid, signal.SIGKILL)
                restarting.append(asyncio.create_task(asyncio.to_thread(restart)))
                restarting[0].add_done_callback(lambda task: stop.set() if task.exception() else None)

        async with (
            open_editor_environment(settings) as harness,
            SglangEngine(server.url, patient, settings.rollout, harness.chat.stop_ids) as engine,
        ):
            assert settings.rollout.questions is not None
            with StoreWriter(tmp_path / STORE) as store:
                tasks = tasks_left(store.path, read_questions(settings.rollout.questions)[:6], 4)
                try:
                    await run_tasks(harness, engine, tasks, store, watch, stop)
                finally:
                    await restarting[0]  # if it failed, that is the error to report

    def restart() -> None:
        server.stop()
        server.start()
        server.wait()

    with server:
        asyncio.run(play())
    records = list(read_records([tmp_path]))
    assert len({record.meta.id for record in records}) == len(records) == 24
    assert {record.meta.status for record in records} <= {"completed", "truncated"}
    check_replay(records, policy)


async def sampled(server: Server, during: Callable[[asyncio.Event], Awaitable[None]], **request: Any) -> Generation:
    """A long turn, while something happens."""
    stop = asyncio.Event()
    async with SglangEngine(server.url, BRISK, RANDOM, CHAT.stop_ids) as engine:
        engine._sampling["ignore_eos"] = True  # which token a seed draws depends on the processor: none may end it
        settings = {"max_tokens": 1500, "rollout": "s", "seed": 5, **request}
        turn = asyncio.create_task(engine.generate(Request(PROMPT, stop=stop, **settings)))
        await asyncio.sleep(1.0)
        await during(stop)
        return await turn


def replayed_turn(generation: Generation) -> Record:
    context = Context(CHAT, START, "What is it?")
    context.append_turn(generation)
    return context.record(Meta(id="turn"))


async def nothing(stop: asyncio.Event) -> None:
    pass


def test_a_stopped_turn_comes_back_with_what_was_sampled(server: Server, policy: Any) -> None:
    async def stopped(stop: asyncio.Event) -> None:
        stop.set()

    generation = asyncio.run(sampled(server, stopped))
    assert generation.finish == "abort"
    assert 0 < len(generation.tokens) < 1500
    check_replay([replayed_turn(generation)], policy, temperature=RANDOM.temperature)


def test_a_turn_that_is_out_of_time_comes_back_with_what_was_sampled(server: Server, policy: Any) -> None:
    generation = asyncio.run(sampled(server, nothing, timeout=1.0))
    assert generation.finish == "abort"
    assert 0 < len(generation.tokens) < 1500
    check_replay([replayed_turn(generation)], policy, temperature=RANDOM.temperature)


def test_a_turn_that_straddles_a_weight_update_says_how_far_each_version_went(server: Server) -> None:
    async def updated(stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession(server.url) as http:
            for path, body in (
                ("/pause_generation", {"mode": "retract"}),
                ("/update_weights_from_disk", {"model_path": str(MODEL), "weight_version": "next"}),
                ("/continue_generation", {}),
            ):
                async with http.post(path, json=body) as response:
                    assert response.status == 200, await response.text()

    async def after() -> Generation:
        async with SglangEngine(server.url, BRISK, RANDOM, CHAT.stop_ids) as engine:
            return await engine.generate(Request(PROMPT, 3, "s", 5))

    generation = asyncio.run(sampled(server, updated, max_tokens=900))
    assert generation.straddles
    (_, before), (version, then) = generation.weights
    assert version == "next"
    assert before + then == len(generation.tokens)
    assert asyncio.run(after()).weights == (("next", 3),)


def test_a_context_that_the_engine_cannot_hold_is_a_failed_record_with_the_engines_words(server: Server) -> None:
    settings = cell("search_r1", system="append " * 5000, context_tokens=100_000)

    async def play() -> Record:
        async with (
            open_editor_environment(settings) as harness,
            SglangEngine(server.url, BRISK, settings.rollout, harness.chat.stop_ids) as engine,
        ):
            assert settings.rollout.questions is not None
            question = read_questions(settings.rollout.questions)[0]
            return await EditorRollout(harness, engine, question, "q-0", 1).run()

    record = asyncio.run(play())
    assert (record.meta.status, record.meta.extra["stop"]) == ("failed", "refused")
    assert "refuses a turn of q-0" in record.meta.extra["error"]
    assert "longer than the model's context length" in record.meta.extra["error"]


def test_weights_are_updated_also_behind_a_router(server: Server, tmp_path: Path) -> None:
    async def version_of_a_turn(url: str) -> str:
        async with SglangEngine(url, BRISK, RANDOM, CHAT.stop_ids) as engine:
            ((version, tokens),) = (await engine.generate(Request(PROMPT, 3, "s", 5))).weights
        assert tokens == 3
        return version

    asyncio.run(update_weights(server.url, MODEL, "7"))
    assert asyncio.run(version_of_a_turn(server.url)) == "7"
    with Router([server.url]) as router:
        asyncio.run(update_weights(router.url, MODEL, "8"))
        assert asyncio.run(version_of_a_turn(router.url)) == "8"
    with pytest.raises(EngineError, match=r"refuses the weights in .*nowhere: 400"):
        asyncio.run(update_weights(server.url, tmp_path / "nowhere", "9"))
    with pytest.raises(EngineError, match="did not take the weights"):
        asyncio.run(update_weights("http://127.0.0.1:9", MODEL, "9"))
    assert asyncio.run(version_of_a_turn(server.url)) == "8"
