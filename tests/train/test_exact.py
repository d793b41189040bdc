"""Loss and the gradient of every parameter are those of one forward pass per sampled token, however it is split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull
from slime_plugin.config.parallel import Parallelism
from slime_plugin.train.ranks import run_ranks
from tests.train.conftest import Truth
from tests.train.jobs import Job, Outcome, distilling, update
from tests.train.oracle import diverging, is_left_out

EXACT: list[MethodSettings] = [LogitTree(), Mask4d(packing="replicated"), Mask4d(packing="trie"), Mask4d(budget=60)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
DISTIL = 0.7


def outcomes(job: Job, methods: list[MethodSettings], replicas: int = 1) -> list[Outcome]:
    """What all ranks together have of each method."""
    ranks = run_ranks(job.parallel.ranks * replicas, update, job, methods)
    return [together([rank[i] for rank in ranks]) for i in range(len(methods))]


def together(ranks: list[Outcome]) -> Outcome:
    """The gradients of all stages. Where ranks have the same number they agree on it."""
    gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    for rank in ranks:
        assert rank.sums == ranks[0].sums
        for name, gradient in rank.gradients.items():
            assert torch.equal(gradient, gradients[name]), f"ranks differ in the gradient of {name}"
    return Outcome(ranks[0].sums, gradients)


def worst(outcome: Outcome, gradients: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any parameter's gradient, and whose it is."""
    assert set(outcome.gradients) == set(gradients)
    return max((float((outcome.gradients[k] - g).norm() / g.norm()), k) for k, g in gradients.items())


SPLITS: dict[str, tuple[dict[str, Any], int]] = {
    "one process": ({}, 1),
    "tp2": ({"parallel": Parallelism(tp=2)}, 1),
    "tp2 sp": ({"parallel": Parallelism(tp=2, sp=True)}, 1),
    "pp2": ({"parallel": Parallelism(pp=2)}, 1),
    "cp2": ({"parallel": Parallelism(cp=2)}, 1),
    "dp2": ({}, 2),
    "tp2 pp2 sp": ({"parallel": Parallelism(tp=2, pp=2, sp=True)}, 1),
    "tp2 cp2 sp": ({"parallel": Parallelism(tp=2, cp=2, sp=True)}, 1),
    "pp2 cp2": ({"parallel": Parallelism(pp=2, cp=2)}, 1),
    "cp2 dp2": ({"parallel": Parallelism(cp=2)}, 2),
    "recompute": ({"recompute": True}, 1),
    "tp2 pp2 sp recompute": ({"parallel": Parallelism(tp=2, pp=2, sp=True), "recompute": True}, 1),
    "a row per micro-batch": ({"batch_tokens": 1}, 1),
    "one micro-batch": ({"batch_tokens": 10_000}, 1),
    "cp3": ({"parallel": Parallelism(cp=3), "batch_tokens": 100}, 1),
    "dp3": ({"batch_tokens": 10_000}, 3),
}
INTERLEAVED = {
    "pp3 vpp2": {"parallel": Parallelism(pp=3, vpp=2), "batch_tokens": 60},
    "tp2 pp3 vpp2 sp": {"parallel": Parallelism(tp=2, sp=True, pp=3, vpp=2), "batch_tokens": 200},
}


@pytest.mark.parametrize("split", SPLITS)
def test_float64_on_every_split(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(truth, torch.float64, replicas, **settings)


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2 dp2"])
def test_float32(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(truth, torch.float32, replicas, **settings)


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2 dp2"])
def test_rollouts_that_are_not_trained_count_in_the_mean(split: str, truth: Truth) -> None:
    """One that was aborted leaves the baseline of its group, too; one that a filter removed does not."""
    settings, replicas = SPLITS[split]
    check(truth.left_out(), torch.float64, replicas, **settings)


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2", "recompute"])
def test_fused_rope(split: str, truth: Truth) -> None:
    """As on CUDA: the kernel reads row i of the table for token i of its sequence, and a tree is one sequence."""
    settings, replicas = SPLITS[split]
    check(truth, torch.float32, replicas, fused_rope=True, **settings)


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp"])
def test_an_output_layer_of_its_own(split: str, untied: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(untied, torch.float64, replicas, **settings)


@pytest.mark.parametrize("split", INTERLEAVED)
def test_virtual_stages(split: str, deep: Truth) -> None:
    check(deep, torch.float64, 1, **INTERLEAVED[split])


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2"])
def test_the_naive_methods_are_one_walk_each(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    job = truth.job(dtype=torch.float64, **settings)
    compressed, full = outcomes(job, [NaiveCompressed(), NaiveFull()], replicas)
    walks = ((compressed, truth.distilled(torch.float64, 0.0)), (full, truth.full(torch.float64)))
    for outcome, (loss, gradients) in walks:
        assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
        assert worst(outcome, gradients)[0] < 1e-9


@pytest.mark.parametrize("top_k", [None, 9])
def test_in_bfloat16_inside_megatrons_wrapper(truth: Truth, top_k: int | None) -> None:
    """What the wrapper returns is float32, also where nothing is projected."""
    job = truth.job(dtype=torch.bfloat16, wrapped=True)
    tree, distilled = outcomes(job, [Mask4d(), distilling(DISTIL, top_k=top_k)])
    # The terms cancel for the most part, and a KL over the most likely tokens is a little less than the whole one.
    assert tree.sums["loss"] == pytest.approx(truth.exact(torch.float64)[0], abs=0.06)
    assert distilled.sums["loss"] == pytest.approx(truth.distilled(torch.float64, DISTIL)[0], abs=0.06)


def check(truth: Truth, dtype: torch.dtype, replicas: int, **settings: Any) -> None:
    *exact, sdcc = outcomes(truth.job(dtype=dtype, **settings), [*EXACT, distilling(DISTIL)], replicas)
    loss, gradients = truth.exact(dtype)
    for outcome in exact:
        assert outcome.sums["loss"] == pytest.approx(loss, rel=TOLERANCE[dtype])
        assert worst(outcome, gradients)[0] < TOLERANCE[dtype], worst(outcome, gradients)
    loss, gradients = truth.distilled(dtype, DISTIL)
    trained = [rollout for rollout in truth.rollouts if not is_left_out(rollout)]
    assert sdcc.sums["leaves"] == sum(len(diverging(rollout)) for rollout in trained)
    assert sdcc.sums["loss"] == pytest.approx(loss, rel=TOLERANCE[dtype])
    assert worst(sdcc, gradients)[0] < TOLERANCE[dtype], worst(sdcc, gradients)


def test_inexact_methods_fail_the_same_comparison(truth: Truth) -> None:
    """The paper's mask equation taken literally keeps hidden states that saw what was evicted; so it is not exact."""
    loss, gradients = truth.exact(torch.float64)
    inexact: list[MethodSettings] = [Mask4d(packing="union"), NaiveCompressed(), NaiveFull()]
    for outcome in outcomes(truth.job(dtype=torch.float64), inexact):
        assert outcome.sums["loss"] != pytest.approx(loss, rel=1e-3)
        assert worst(outcome, gradients)[0] > 1e-2


def test_the_dense_backend_agrees(truth: Truth) -> None:
    loss, gradients = truth.exact(torch.float64)
    (outcome,) = outcomes(truth.job(dtype=torch.float64, backend="dense"), [Mask4d()])
    assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst(outcome, gradients)[0] < 1e-9


def test_old_logprobs_can_be_others_than_the_rollouts(truth: Truth) -> None:
    """The rollout's own, given by hand, change nothing; others do."""
    logged = [rollout.record.logprobs for rollout in truth.rollouts]
    (same,) = outcomes(truth.job(old=logged), [Mask4d()])
    (default,) = outcomes(truth.job(), [Mask4d()])
    (other,) = outcomes(truth.job(old=[values + 0.5 for values in logged]), [Mask4d()])
    assert same.sums == default.sums
    assert other.sums["ratio"] == pytest.approx(default.sums["ratio"] * math.exp(-0.5), rel=1e-5)


def test_a_replica_without_rollouts_takes_part(truth: Truth) -> None:
    few = replace(truth, rollouts=truth.rollouts[:2], references=truth.references[:2])
    loss, gradients = few.exact(torch.float64)
    (outcome,) = outcomes(few.job(dtype=torch.float64), [Mask4d()], replicas=3)
    assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst(outcome, gradients)[0] < 1e-9


def test_parts_of_the_loss_add_up(truth: Truth) -> None:
    (outcome,) = outcomes(truth.job(dtype=torch.float64), [Mask4d()])
    sums, objective = outcome.sums, truth.objective
    total = sums["policy"] + objective.kl * sums["reference_kl"] - objective.entropy * sums["entropy"]
    assert sums["loss"] == pytest.approx(total, rel=1e-12)
    assert 0 < sums["clipped"] < 1


def test_a_budget_splits_a_tree_without_changing_anything(truth: Truth) -> None:
    loss, gradients = truth.exact(torch.float64)
    longest = max(len(rollout.record) for rollout in truth.rollouts)
    (outcome,) = outcomes(truth.job(dtype=torch.float64), [Mask4d(budget=longest)])
    assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst(outcome, gradients)[0] < 1e-9
