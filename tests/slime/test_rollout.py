"""slime's own rollout loop with our hooks, on a real SGLang server behind a router."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_plugin.cluster.arguments import plugin_yaml, slime_flags
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.record import Record, scan_store
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import convert
from slime_plugin.slime.samples import record_of
from tests.conftest import ROOT
from tests.rollout.router import Router
from tests.slime.sources import needs_slime, slime_imports

pytestmark = needs_slime

MODEL = ROOT / "examples" / "small_world" / "model"
HELD_OUT = "examples/small_world/data/held_out.jsonl"


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with Server(Flags(MODEL, "cpu", max_total_tokens=16384)) as server, Router([server.url]) as router:
        yield router


class World:
    """What slime's rollout manager has: arguments, a data source, the loop."""

    def __init__(self, run: Path, router: Router, *settings: str, more: tuple[str, ...] = ()) -> None:
        slime_imports()
        from slime.observability import logging_utils
        from slime.rollout.data_source import RolloutDataSourceWithBuffer
        from slime.rollout.sglang_rollout import GenerateState
        from slime.utils.http_utils import init_http_client

        from slime_plugin.cluster.driver import parsed

        self.run = run
        run.mkdir(exist_ok=True)
        self.cell = load_cell(
            ROOT / "configs" / "small_world" / "agentfold.yaml",
            ("trainer.prompts=2", "trainer.steps=1", "rollout.samples=4", "trainer.iterations=3", *settings),
        )
        (run / "plugin.yaml").write_text(plugin_yaml(self.cell))
        (run / "megatron").mkdir(exist_ok=True)
        words = [word for flag in slime_flags(self.cell, run) for word in flag.words]
        words[words.index("--ref-load") + 1] = str(run / "megatron")
        self.args: Namespace = parsed([*words, *more])
        host, port = router.url.removeprefix("http://").split(":")
        self.args.sglang_router_ip, self.args.sglang_router_port = host, int(port)
        GenerateState.clear_instances()
        init_http_client(self.args)
        self.source = RolloutDataSourceWithBuffer(self.args)
        self.logged: dict[str, Any] = {}
        logging_utils.log = lambda args, metrics, step_key: self.logged.update(metrics)

    def roll_out(self, iteration: int = 0, *, evaluation: bool = False) -> Any:
        from slime.observability import rollout_metrics
        from slime.rollout.base_types import call_rollout_fn
        from slime.rollout.sglang_rollout import generate_rollout

        result = call_rollout_fn(generate_rollout, self.args, iteration, self.source, evaluation=evaluation)
        if evaluation:
            rollout_metrics.log_eval_rollout_data(iteration, self.args, result.data, result.metrics)
            return result.data["dev"]["samples"]
        samples = [sample for group in result.samples for sample in group]
        rollout_metrics.log_rollout_data(iteration, self.args, samples, result.metrics, 1.0)
        return samples


@pytest.fixture
def world(tmp_path: Path, router: Router, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(ROOT)
    return World(tmp_path / "run", router, f"evaluation.questions={HELD_OUT}", "evaluation.temperature=0")


def stored(path: Path) -> list[Record]:
    return [found for found in scan_store(path) if isinstance(found, Record)]


def test_rollouts_are_recorded_told_and_converted(world: World) -> None:
    samples = world.roll_out(0)
    assert len(samples) == 8
    records = [record_of(sample) for sample in samples]
    assert {record.meta.status for record in records} <= {"completed", "truncated"}
    assert all(isinstance(sample.reward, float) and sample.response for sample in samples)
    assert [record.meta.id for record in stored(world.run / "rollout-00000.records")] == [r.meta.id for r in records]
    assert world.logged["rollout/memorywalker/sampled"] == sum(int(record.generated.sum()) for record in records)
    assert world.logged["rollout/memorywalker/trained"] == world.logged["rollout/memorywalker/sampled"]
    assert "rollout/response_len/mean" in world.logged, "slime's own are logged too"
    data = _converted(samples, world.cell)
    assert sum(int(mask.sum()) for mask in data["loss_masks"]) == world.logged["rollout/memorywalker/sampled"]


def test_evaluations_sample_as_they_are_told_and_are_recorded(world: World) -> None:
    first = world.roll_out(0, evaluation=True)
    again = world.roll_out(1, evaluation=True)
    assert [sample.tokens for sample in first] == [sample.tokens for sample in again], "temperature 0"
    assert world.logged["eval/dev"] == np.mean([sample.reward for sample in again])
    assert len(stored(world.run / "evaluation-dev-00002.records")) == len(again)


def test_rollouts_that_slime_aborts_begin_anew_and_what_they_had_is_counted(
    tmp_path: Path, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    world = World(tmp_path / "run", router, more=("--over-sampling-batch-size", "6", "--partial-rollout"))
    first = world.roll_out(0)
    buffered = [sample for group in world.source.buffer for sample in group]
    assert len(first) == 8
    assert len(buffered) == 16, "four groups of four too many"
    begun = {sample.index: record_of(sample) for sample in buffered if "memorywalker_record" in sample.metadata}
    partial = {index: record for index, record in begun.items() if record.meta.status == "aborted"}
    assert partial, "all came to an end before they could be aborted"
    second = world.roll_out(1)
    for sample in second:
        record = record_of(sample)
        assert record.meta.status in ("completed", "truncated")
        if sample.index in partial:
            assert record.meta.report.discarded == int(partial[sample.index].generated.sum())
    again = {sample.index: record_of(sample) for group in world.source.buffer for sample in group}
    twice = [index for index in partial.keys() & again.keys() if again[index] != partial[index]]
    for index in twice:  # aborted once more: both times count
        assert again[index].meta.report.discarded == int(partial[index].generated.sum())
    assert twice or any(sample.index in partial for sample in second), "what was in the buffer comes first"


def test_dumps_are_replayed(world: World, tmp_path: Path) -> None:
    from slime.observability.rollout_data_utils import load_debug_rollout_data, save_debug_rollout_data

    samples = world.roll_out(0)
    template = str(tmp_path / "dump_{rollout_id}.pt")
    save_debug_rollout_data(template, samples, rollout_id=0, evaluation=False)
    loaded = load_debug_rollout_data(template, rollout_id=0)
    _same(_converted(samples, world.cell), _converted(loaded, world.cell))


def test_recorded_rollouts_are_replayed(world: World, tmp_path: Path, router: Router) -> None:
    samples = world.roll_out(0)
    again = World(tmp_path / "again", router, f"cluster.replay={world.run}")
    from slime.observability.rollout_metrics import log_rollout_data
    from slime.utils.misc import load_function

    output = load_function(again.args.rollout_function_path)(again.args, 0, again.source, evaluation=False)
    replayed = [sample for group in output.samples for sample in group]
    log_rollout_data(0, again.args, replayed, output.metrics, 1.0)
    assert again.logged["rollout/memorywalker/trained"] > 0
    _same(_converted(samples, world.cell), _converted(replayed, again.cell))


def _converted(samples: Any, cell: Cell) -> dict[str, list[Any]]:
    return convert(args_of(cell), samples)


def _same(data: dict[str, list[Any]], other: dict[str, list[Any]]) -> None:
    assert data.keys() == other.keys()
    for key in data.keys() - {"multimodal_train_inputs", "prompt"}:
        for one, two in zip(data[key], other[key], strict=True):
            assert np.array_equal(one, two), key
    for one, two in zip(data["multimodal_train_inputs"], other["multimodal_train_inputs"], strict=True):
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[key], two[key]) for key in one)


def test_samples_travel_as_slime_sends_them(world: World) -> None:
    from slime.utils.types import Sample

    (sample, *_) = world.roll_out(0)
    copied = Sample.from_dict(copy.deepcopy(sample.to_dict()))
    assert record_of(copied) == record_of(sample)
    assert torch.equal(torch.tensor(copied.tokens), torch.tensor(sample.tokens))
