"""What a record says its tokens count, through slime's hooks: beside the tokens, wherever a batch is split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import EVERY_METHOD, LogitTree, Mask4d, Method, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.config.trainer import Trainer
from slime_plugin.local.schedule import split_batch
from slime_plugin.megatron.launch import run_ranks
from slime_plugin.methods import lay_out
from slime_plugin.seam.train_data import convert
from tests.local.jobs import Job, Outcome, update
from tests.local.test_hooks_exact import SPLITS, WEIGHT, check
from tests.local.test_train_data import batch, samples_of
from tests.megatron import oracle
from tests.megatron.conftest import Truth

FIVE: tuple[Method, ...] = (NaiveCompressed(), NaiveFull(), LogitTree(), Mask4d(), Sdcc(weight=WEIGHT, warmup=0))


@pytest.mark.parametrize("split", ["one", "tp2+sp pp2", "cp2", "dp3"])
def test_all_methods_are_the_long_way(truth: Truth, split: str) -> None:
    weighted = truth.weighted()
    compressed, full, *exact, sdcc = _run(weighted, SPLITS[split], (*FIVE[:-1], Mask4d(budget=60), FIVE[-1]))
    check(compressed, split, *weighted.distilled(torch.float64, 0.0))
    check(full, split, *weighted.full(torch.float64))
    check(sdcc, split, *weighted.distilled(torch.float64, WEIGHT))
    loss, gradients = weighted.exact(torch.float64)
    for outcomes in exact:
        check(outcomes, split, loss, gradients)


def test_weights_of_one_change_no_bit(truth: Truth) -> None:
    """Neither if records say so, which is not sent, nor if they are sent."""
    ones = replace(truth, rollouts=[oracle.with_weights(r, [[0, len(r.record), 1]]) for r in truth.rollouts])
    trainer = Trainer(batch_tokens=100)
    plain, said, sent = _run(truth, trainer, FIVE), _run(ones, trainer, FIVE), _run(truth, trainer, FIVE, ones=True)
    for (one,), *others in zip(plain, said, sent, strict=True):
        for (other,) in others:
            assert other.loss == one.loss
            assert all(torch.equal(other.gradients[name], one.gradients[name]) for name in one.gradients)


@pytest.mark.parametrize("method", EVERY_METHOD, ids=lambda m: m.type)
def test_weights_ride_on_all_rows_or_on_none(method: Method) -> None:
    """slime concatenates what rides on the rows of a micro-batch."""
    rollouts = batch((1.0, None, 0.2, 0.7), ("completed", "aborted", "completed", "completed"))
    plain = convert(samples_of(rollouts), Cell(method=method))
    last = oracle.final_context(rollouts[2])[-1]  # sampled, and in the rows of every method
    weighted = [*rollouts[:2], oracle.with_weights(rollouts[2], [[last, last + 1, 0.5]]), rollouts[3]]
    data = convert(samples_of(weighted), Cell(method=method))
    assert not any("weight" in inputs for inputs in plain["multimodal_train_inputs"])
    assert all(inputs["weight"].dtype == np.float32 for inputs in data["multimodal_train_inputs"])
    assert [len(inputs["weight"]) for inputs in data["multimodal_train_inputs"]] == [len(t) for t in data["tokens"]]
    assert data["rollout_mask_sums"] == plain["rollout_mask_sums"], "what rollouts are averaged over stays"
    halved = []
    for i, inputs in enumerate(data["multimodal_train_inputs"]):
        halved += [(data["rollout_ids"][i], int(data["tokens"][i][j])) for j in np.flatnonzero(inputs["weight"] != 1)]
        assert inputs["weight"].min() >= 0.5
    assert halved == [(2, int(rollouts[2].record.tokens[last]))]
    for part in split_batch(data, replicas=3, steps=1, batch_tokens=10_000):  # with idle rows of its own
        sizes = [len(tokens) for tokens in part["tokens"]]
        assert [len(inputs["weight"]) for inputs in part["multimodal_train_inputs"]] == sizes


def test_weights_of_what_is_not_trained_do_not_ride() -> None:
    rollouts = batch((1.0, 0.0))
    record = rollouts[0].record
    evicted = sorted(set(np.flatnonzero(record.generated).tolist()) - set(oracle.final_context(rollouts[0])))
    assert evicted
    untrained = sorted({*evicted, *np.flatnonzero(~record.generated).tolist()})
    rollouts[0] = oracle.with_weights(rollouts[0], [[p, p + 1, 0.5] for p in untrained])
    for method, rides in ((NaiveCompressed(), False), (LogitTree(), True)):
        data = convert(samples_of(rollouts), Cell(method=method))
        assert [("weight" in inputs) for inputs in data["multimodal_train_inputs"]] == [rides] * len(data["tokens"])


def test_a_rollout_that_is_left_out_sends_no_weights() -> None:
    rollouts = batch((1.0, None), ("completed", "aborted"))
    rollouts[1] = oracle.with_weights(rollouts[1], [[0, len(rollouts[1].record), 0.5]])
    assert (lay_out(rollouts[1].record, LogitTree()).rows[0].weight == 0.5).any()
    data = convert(samples_of(rollouts), Cell(method=LogitTree()))
    assert not any("weight" in inputs for inputs in data["multimodal_train_inputs"])


def _run(
    truth: Truth, trainer: Trainer, methods: tuple[Method, ...], *, ones: bool = False
) -> list[tuple[Outcome, ...]]:
    """For each method what the ranks came to."""
    records = [r.record for r in truth.rollouts]
    job = Job(truth.folder, records, truth.references, truth.objective, trainer, ones=ones)
    return list(zip(*run_ranks(trainer.ranks, update, job, methods), strict=True))
