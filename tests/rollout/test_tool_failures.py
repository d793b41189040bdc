"""Tools that fail for no fault of the policy: they are counted, and stop a job before it trains on error messages."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.hooks.rollout import evaluation_log, rollout_log
from slime_plugin.local.sample import Sample, recorded_samples
from slime_plugin.record import Meta, Record, read_records
from slime_plugin.slime.args import args_of


def samples(*errors: dict[str, int], calls: int = 10) -> list[Sample]:
    """Rollouts with so many calls each, and their errors by kind."""
    return recorded_samples(
        [
            Record(
                tokens=[1, 2],
                generated=[0, 1],
                logprobs=[None, -1.0],
                views=[[(0, 2)]],
                meta=Meta(
                    id=f"q-{number}", group="q", reward=number % 2, status="completed", weight_version="0",
                    extra={"calls": calls, "call_errors": sum(kinds.values()), "error_kinds": kinds},
                ),
            )
            for number, kinds in enumerate(errors)
        ]
    )  # fmt: skip


def args(folder: Path, **rollout: Any) -> Namespace:
    settings = args_of(Cell.model_validate({"method": {"type": "mask4d"}, "rollout": rollout}))
    settings.save = str(folder / "checkpoints")
    return settings


def logged(settings: Namespace, found: list[Sample], iteration: int = 0) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    rollout_log(iteration, settings, found, metrics, 1.0)
    return metrics


def test_calls_and_errors_are_metrics(tmp_path: Path) -> None:
    found = samples({"malformed": 2, "timeout": 1}, {"key": 1}, {"unknown tool": 5, "arguments": 1}, {})
    metrics = logged(args(tmp_path), found)
    errors = {"malformed": 2, "timeout": 1, "key": 1, "unknown tool": 5, "arguments": 1}
    assert metrics["rollout/memorywalker/calls"] == 40
    for kind, number in errors.items():
        assert metrics[f"rollout/memorywalker/call_errors/{kind}"] == number
    assert metrics["rollout/memorywalker/tool_failures"] == pytest.approx(2 / (40 - 2 - 5 - 1))


def test_agents_call_tools_of_their_own(tmp_path: Path) -> None:
    metrics = logged(args(tmp_path), samples({}, {}, calls=0))
    assert "rollout/memorywalker/tool_failures" not in metrics  # undefined, and not 0


def test_a_job_whose_tools_fail_stops(tmp_path: Path) -> None:
    found = samples({"key": 9}, {"key": 2, "timeout": 1}, {"refused": 8}, {})
    with pytest.raises(MemoryWalkerError) as caught:
        logged(args(tmp_path), found, 3)
    kept = tmp_path / "rollout-00003.attempt-1.records"
    assert str(caught.value) == (
        "iteration 3: 12 of 32 tool calls failed for no fault of the policy (key 11, timeout 1): 38%, over "
        "rollout.max_tool_failures 0.3; check the API key and the credit of its account, then resume; its rollouts "
        f"are in {kept}"
    )
    assert len(list(read_records([kept]))) == 4
    assert not (tmp_path / "rollout-00003.records").exists()  # so that the iteration is sampled again


@pytest.mark.parametrize(
    ("errors", "settings"),
    [
        ([{"key": 9}, {"key": 2, "timeout": 1}, {"refused": 8}, {}], {"max_tool_failures": 0.4}),
        ([{"key": 10}, {"key": 10}], {"max_tool_failures": 1.0}),
        ([{"malformed": 10}, {"unknown tool": 9}, {"arguments": 10}, {"refused": 10}], {}),  # the policy's own
        ([{"crashed": 7}], {}),  # too few to tell
    ],
)
def test_a_job_goes_on(errors: list[dict[str, int]], settings: dict[str, Any], tmp_path: Path) -> None:
    logged(args(tmp_path, **settings), samples(*errors))
    assert (tmp_path / "rollout-00000.records").exists()


def test_recorded_rollouts_are_replayed_whatever_their_tools_did(tmp_path: Path) -> None:
    settings = args(tmp_path)
    settings.memorywalker["cluster"]["replay"] = str(tmp_path)
    logged(settings, samples({"key": 10}, {"key": 10}))


def test_an_evaluation_counts_its_tool_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dead tools say nothing about the policy; the job goes on."""
    metrics: dict[str, Any] = {}
    settings = args(tmp_path)
    settings.num_rollout = 1
    evaluation_log(0, settings, {"dev": {"samples": samples({"key": 10}, {"key": 10})}}, metrics)
    assert metrics["eval/dev/memorywalker/call_errors/key"] == 20
    assert metrics["eval/dev/memorywalker/tool_failures"] == 1
    assert "evaluation dev says little about the policy: 20 of 20 tool calls failed" in caplog.text
