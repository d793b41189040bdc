"""A run with its engine: what was sampled is never lost, whoever is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from slime_plugin.record import Record, read_records
from slime_plugin.rollout.runner import DONE
from slime_plugin.run.folder import RunFolder
from tests.local.runs import AGENTS, ROLLOUTS, Run, Runs, places
from tests.local.test_faults import check_interrupted, error_line

SETTINGS = ("trainer.iterations=3", "rollout.concurrency=1")


def sampled(folder: RunFolder) -> dict[str, bytes]:
    """The stores, byte for byte."""
    return {path.name: path.read_bytes() for path in folder.path.glob("*.records")}


def until_sampled(run: Run, iteration: int) -> None:
    """Until some rollouts of an iteration are there, but not all."""
    store = run.folder.rollouts(iteration)
    run.until(lambda: store.exists() and len(list(read_records([store]))) > 0)


def whole(path: Path) -> list[Record]:
    return [record for record in read_records([path]) if record.meta.status in DONE]


def check_kept(folder: RunFolder, before: dict[str, bytes]) -> None:
    """Whatever was there still is, and whatever was whole has not been sampled again."""
    for name, content in before.items():
        assert (folder.path / name).read_bytes().startswith(content)
    assert folder.iterations() == [0, 1, 2]
    for iteration in folder.iterations():
        records = whole(folder.rollouts(iteration))
        assert len({str(record.meta.id).partition("~")[0] for record in records}) == len(records) == ROLLOUTS
        assert {str(record.meta.weight_version) for record in records} == {str(iteration)}
    assert places(folder) == [
        place for i in range(3) for place in (("step", 2 * i), ("step", 2 * i + 1), ("iteration", i))
    ]


def test_an_engine_that_is_killed_costs_no_rollout(real_runs: Runs) -> None:
    first = real_runs.start("run", *SETTINGS)
    until_sampled(first, 1)
    engine = first.actor("slime_plugin.rollout.server")
    os.kill(engine, signal.SIGKILL)
    assert first.end() == 1
    assert error_line(first.stderr) == (
        f"the engine (process {engine}) has exited; see {first.folder.logs / 'engine.log'}, and continue with --resume"
    )
    before = sampled(first.folder)
    last = real_runs.start("run", *SETTINGS, resume=True)
    last.finish()
    check_kept(last.folder, before)


@pytest.mark.slow
def test_a_driver_that_is_killed_costs_no_rollout(real_runs: Runs) -> None:
    first = real_runs.start("run", *SETTINGS)
    until_sampled(first, 0)
    first.signal(signal.SIGKILL)
    first.end(but_for=AGENTS)
    before = sampled(first.folder)
    second = real_runs.start("run", *SETTINGS, resume=True)
    until_sampled(second, 2)
    os.kill(second.actor("RolloutActor"), signal.SIGKILL)
    assert second.end() == 1
    assert not first.left
    before |= {
        name: content for name, content in sampled(second.folder).items() if content.startswith(before.get(name, b""))
    }
    last = real_runs.start("run", *SETTINGS, resume=True)
    last.finish()
    check_kept(last.folder, before)


@pytest.mark.slow
def test_an_interrupt_ends_the_engine(real_runs: Runs) -> None:
    first = real_runs.start("run", *SETTINGS)
    first.actor("slime_plugin.rollout.server")  # it is not healthy yet
    first.signal(signal.SIGINT, group=True)
    check_interrupted(first)
    second = real_runs.start("run", *SETTINGS, resume=True)
    until_sampled(second, 1)
    second.signal(signal.SIGINT, group=True)
    second.signal(signal.SIGINT, group=True)
    check_interrupted(second)
    before = sampled(second.folder)
    last = real_runs.start("run", *SETTINGS, resume=True)
    last.finish()
    check_kept(last.folder, before)


@pytest.mark.slow
def test_a_run_whose_tools_are_down_is_not_trained_on_error_messages(real_runs: Runs) -> None:
    down = "tools=[{type: search, backend: {type: http, url: 'http://127.0.0.1:9/retrieve', retries: 0}}]"
    settings = (*SETTINGS, "rollout.samples=6", down)
    first = real_runs.start("run", *settings)
    assert first.end() == 1
    assert re.fullmatch(
        r"iteration 0: (\d+) of \1 tool calls failed for no fault of the policy \(unavailable \1\): 100%, over "
        r"rollout\.max_tool_failures 0\.3; the log of the rollouts has what the service answered, then resume; its "
        r"rollouts are in .*/rollout-00000\.attempt-1\.records",
        error_line(first.stderr),
    ), first.stderr
    assert places(first.folder) == []
    last = real_runs.start("run", *settings, "rollout.max_tool_failures=1", "trainer.iterations=1", resume=True)
    last.finish()
    (line,) = (line for line in last.folder.read_metrics() if line["kind"] == "iteration")
    assert line["tool_failures"] == 1
    assert line["call_errors"]["unavailable"] <= line["calls"]
    kept = list(read_records([last.folder.path / "rollout-00000.attempt-1.records"]))
    assert len(kept) == len(whole(last.folder.rollouts(0))) == 12
