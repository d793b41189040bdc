"""Rollouts of an agent that is a process of its own: how they end, and what is recorded of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from slime_plugin.agents import Thread
from slime_plugin.config.overrides import parse_cell
from slime_plugin.environments import open_environment
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.engine import Request
from slime_plugin.rollout.environment import RolloutHandle
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.reward import Outcome
from tests.conftest import ROOT
from tests.tap.engines import Scripted, spell
from tests.tap.own_driver import OwnDriver


class WorkerDriver(OwnDriver):
    """Its agent says nothing of conversations, so the driver reads what every client sends."""

    @classmethod
    def thread_of(cls, headers: Mapping[str, str]) -> Thread:
        return Thread(headers["user-agent"], parent="somebody")


MODEL = ROOT / "examples" / "small_world" / "model"
QUESTION = Question("q", "What is the word?", ("blue",))


def twice(outcome: Outcome) -> float:
    """A reward of one's own, from the last message."""
    return 2.0 * len(outcome.reply.split())


def settings(harness: dict[str, Any] | None = None, **blocks: Any) -> dict[str, Any]:
    own = {"type": "tests.tap.own_driver:OwnDriver", **(harness or {})}
    limits = {"context_tokens": 4096, "turn_tokens": 512, "seconds": 60.0, **blocks.pop("rollout", {})}
    return {"model": str(MODEL), "harness": own, "rollout": limits, **blocks}


def roll_out(
    given: dict[str, Any],
    words: Callable[[int], str | None],
    meanwhile: Callable[[RolloutHandle, Scripted], Any] | None = None,
) -> tuple[Record, Scripted]:
    """``words`` are what is said in each turn."""

    async def play() -> tuple[Record, Scripted]:
        count = iter(range(1000))
        engine = Scripted(ChatML.load(MODEL), lambda request: words(next(count)))
        async with open_environment(parse_cell(given, (), "the test")) as agents:
            rollout = agents.begin(engine, QUESTION, "q-0", 7)
            beside = asyncio.create_task(meanwhile(rollout, engine)) if meanwhile is not None else None
            record = await rollout.run()
            if beside is not None:
                await beside
            return record, engine

    return asyncio.run(play())


def calling(turn: int) -> str:
    if turn == 2:
        return spell("It is <answer>Blue.</answer>")
    return spell(f"Turn {turn}.", [("upper", {"word": f"w{turn}"})])


def test_from_a_question_to_a_rewarded_record() -> None:
    record, engine = roll_out(settings(), calling)
    meta = record.meta
    assert (meta.status, meta.extra["stop"], meta.reward, meta.group) == ("completed", "answer", 1.0, "q")
    assert meta.harness == "tests.tap.own_driver:OwnDriver"
    assert meta.weight_version == "7"
    assert meta.extra["calls"] == 2
    assert [edit.extra["cause"] for edit in record.edits] == ["compaction"]
    last = list(engine.requests[-1].prompt)
    assert record.tokens[record.view_positions(-1)].tolist()[: len(last)] == last
    assert "untrained" not in meta.extra


def test_a_driver_tells_conversations_apart() -> None:
    record, _ = roll_out(settings({"type": "tests.tap.test_run:WorkerDriver"}), calling)
    assert [found.name for found in record.meta.report.conversations] == ["subagent"]


def test_a_reward_of_ones_own_judges_the_last_message() -> None:
    record, _ = roll_out(settings(reward={"type": "tests.tap.test_run:twice"}), calling)
    assert record.meta.reward == 6.0


def leaky(outcome: Outcome) -> float:
    raise ValueError("401 for key sk-123")


def test_a_reward_that_fails_keeps_its_message_to_itself() -> None:
    record, _ = roll_out(settings(reward={"type": "tests.tap.test_run:leaky"}), calling)
    assert (record.meta.status, record.meta.extra["stop"], record.meta.reward) == ("failed", "error", None)
    assert record.meta.extra["error"] == "the reward failed (ValueError)"
    assert record.generated.any()


JUDGING = asyncio.Event()


async def slow(outcome: Outcome) -> float:
    JUDGING.set()
    await asyncio.sleep(3600)
    return 1.0


def test_a_slow_reward_is_in_the_way_of_neither_the_limit_nor_a_stop() -> None:
    async def stop(rollout: RolloutHandle, engine: Scripted) -> None:
        await JUDGING.wait()
        rollout.stop()

    given = settings(reward={"type": "tests.tap.test_run:slow"})
    record, _ = roll_out(given, calling, stop)
    assert (record.meta.status, record.meta.extra["stop"], record.meta.reward) == ("aborted", "stopped", None)
    assert record.generated.any()
    record, _ = roll_out(given | {"rollout": {**given["rollout"], "tool_seconds": 0.05}}, calling)
    assert (record.meta.status, record.meta.extra["stop"]) == ("failed", "error")
    assert record.meta.extra["error"] == "the reward timed out after 0.05 seconds"


def test_turns_are_limited_also_for_an_agent_that_knows_no_limit() -> None:
    record, engine = roll_out(settings({"asks": 50, "forget": 99}, rollout={"turns": 4}), lambda turn: calling(0))
    assert (record.meta.status, record.meta.extra["stop"]) == ("truncated", "turns")
    assert len(engine.requests) == 4
    assert record.meta.reward == 0.0


def test_an_engine_that_is_away_fails_the_rollout_and_keeps_what_was_sampled() -> None:
    record, _ = roll_out(settings(), lambda turn: calling(0) if turn == 0 else None)
    assert (record.meta.status, record.meta.extra["stop"]) == ("failed", "engine")
    assert "the engine is away" in record.meta.extra["error"]
    assert len(record.meta.extra["turns"]) == 1
    assert int(record.generated.sum()) > 0


def test_an_agent_that_fails_is_told_of_with_its_own_words() -> None:
    record, _ = roll_out(settings({"asks": 0}), calling)
    assert (record.meta.status, record.meta.extra["stop"]) == ("failed", "agent")
    assert "KeyError" in record.meta.extra["error"]
    assert not record.generated.any()


LONG = "on and on " * 200


@pytest.mark.parametrize("strict", [True, False])
def test_a_policy_that_is_cut_off_hears_of_it_whatever_the_agent_does(strict: bool) -> None:
    record, _ = roll_out(settings({"strict": strict, "asks": 2, "forget": 9}), lambda turn: calling(turn) + LONG * turn)
    assert (record.meta.status, record.meta.extra["stop"]) == ("truncated", "turn tokens")
    assert record.meta.reward == 0.0
    assert ("cut off" in record.meta.extra.get("error", "")) == strict


def test_an_answer_counts_although_it_was_cut_off_behind_it() -> None:
    record, _ = roll_out(settings({"asks": 1}), lambda turn: spell(f"<answer>Blue</answer> {LONG}"))
    assert (record.meta.status, record.meta.extra["stop"], record.meta.reward) == ("completed", "answer", 1.0)


def test_a_context_that_does_not_fit_ends_an_agent_that_cannot_compact() -> None:
    given = settings({"asks": 9, "forget": 99}, rollout={"context_tokens": 800})
    record, engine = roll_out(given, lambda turn: calling(0))
    assert 2 < len(engine.requests) < 9
    assert (record.meta.status, record.meta.extra["stop"], record.meta.reward) == ("truncated", "context", 0.0)


def test_an_agent_that_hangs_is_ended_in_time() -> None:
    record, _ = roll_out(settings({"hang": True}, rollout={"seconds": 1.0}), calling)
    assert (record.meta.status, record.meta.extra["stop"]) == ("truncated", "time")
    assert record.meta.reward == 0.0


def test_an_agent_that_asks_nothing_in_time_has_a_reward() -> None:
    """Of every truncated rollout there is one: its group's baseline needs it."""
    record, engine = roll_out(settings(rollout={"seconds": 0.001}), calling)
    assert (record.meta.status, record.meta.extra["stop"], record.meta.reward) == ("truncated", "time", 0.0)
    assert engine.requests == []


def test_a_rollout_that_is_stopped_counts_what_was_being_sampled() -> None:
    async def stop(rollout: RolloutHandle, engine: Scripted) -> None:
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        rollout.stop()

    record, _ = roll_out(settings(), lambda turn: calling(0) if turn == 0 else Scripted.HANG, stop)
    assert (record.meta.status, record.meta.extra["stop"]) == ("aborted", "stopped")
    assert record.meta.extra["untrained"] == {"cancelled": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (settings({"asks": "many"}), "harness: asks"),
        (settings({"train": {"summaries": -1}}), "harness: train.summaries"),
        (settings({"program": "nowhere"}), "harness.program: nowhere is not an executable"),
        (settings(tools=[{"type": "search", "backend": {"type": "bm25", "corpus": "x"}}]), "has tools of its own"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        roll_out(given, calling)


def test_requests_carry_the_seed_of_their_context() -> None:
    seeds: list[list[int | None]] = []
    for _ in range(2):
        _, engine = roll_out(settings(), calling)
        requests: list[Request] = engine.requests
        seeds.append([request.seed for request in requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
