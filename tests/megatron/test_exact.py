"""Loss and the gradient of every parameter are those of one forward pass per sampled token, however it is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_plugin.config.method import LogitTree, Mask4d, Method, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.megatron.launch import run_ranks
from slime_plugin.megatron.parallel import Parallelism
from tests.megatron.conftest import Truth
from tests.megatron.jobs import Job, Outcome, update

EXACT: list[Method] = [LogitTree(), Mask4d(packing="replicated"), Mask4d(packing="trie")]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
DISTIL = 0.7


def outcomes(job: Job, methods: list[Method], replicas: int = 1, distil: float = DISTIL) -> list[Outcome]:
    """What all ranks together have of each method."""
    ranks = run_ranks(job.parallel.ranks * replicas, update, job, methods, distil)
    return [together([rank[i] for rank in ranks], job.parallel) for i in range(len(methods))]


def together(ranks: list[Outcome], parallel: Parallelism) -> Outcome:
    """Sums over replicas and context ranks (tensor-parallel ranks agree), and the gradients of all stages."""
    last = [rank for rank in ranks if rank.sums]
    assert len(last) * parallel.pp == len(ranks)
    sums = {key: sum(rank.sums[key] for rank in last) / parallel.tp for key in last[0].sums}
    gradients = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    for rank in ranks:
        for name, gradient in rank.gradients.items():
            assert torch.equal(gradient, gradients[name]), f"ranks differ in the gradient of {name}"
    return Outcome(sums, gradients, last[0].micro_batches, any(rank.teacher_ran for rank in ranks))


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
    "a row per micro-batch": ({"budget": 1}, 1),
    "one micro-batch": ({"budget": 10_000}, 1),
}


@pytest.mark.parametrize("split", SPLITS)
def test_float64_on_every_split(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(truth, torch.float64, replicas, **settings)


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2 dp2"])
def test_float32(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(truth, torch.float32, replicas, **settings)


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp"])
def test_an_output_layer_of_its_own(split: str, untied: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(untied, torch.float64, replicas, **settings)


def check(truth: Truth, dtype: torch.dtype, replicas: int, **settings: Any) -> None:
    *exact, sdcc = outcomes(truth.job(dtype=dtype, **settings), [*EXACT, Sdcc()], replicas)
    loss, gradients = truth.exact(dtype)
    for outcome in exact:
        assert outcome.sums["loss"] == pytest.approx(loss, rel=TOLERANCE[dtype])
        assert worst(outcome, gradients)[0] < TOLERANCE[dtype], worst(outcome, gradients)
    loss, gradients = truth.distilled(dtype, DISTIL)
    assert sdcc.teacher_ran
    assert sdcc.sums["loss"] == pytest.approx(loss, rel=TOLERANCE[dtype])
    assert worst(sdcc, gradients)[0] < TOLERANCE[dtype], worst(sdcc, gradients)


def test_inexact_methods_fail_the_same_comparison(truth: Truth) -> None:
    """The paper's mask equation taken literally keeps hidden states that saw what was evicted; so it is not exact."""
    loss, gradients = truth.exact(torch.float64)
    inexact: list[Method] = [Mask4d(packing="union"), NaiveCompressed(), NaiveFull()]
    for outcome in outcomes(truth.job(dtype=torch.float64), inexact):
        assert outcome.sums["loss"] != pytest.approx(loss, rel=1e-3)
        assert worst(outcome, gradients)[0] > 1e-2


def test_the_dense_backend_agrees(truth: Truth) -> None:
    loss, gradients = truth.exact(torch.float64)
    (outcome,) = outcomes(truth.job(dtype=torch.float64, backend="dense"), [Mask4d()])
    assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst(outcome, gradients)[0] < 1e-9


def test_the_batch_was_really_split(truth: Truth) -> None:
    """Otherwise the tests above would compare one micro-batch with one micro-batch."""
    (many,), (one,) = (outcomes(truth.job(budget=budget), [Mask4d()]) for budget in (1, 10_000))
    assert (many.micro_batches, one.micro_batches) == (len(truth.rollouts), 1)
