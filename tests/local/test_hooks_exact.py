"""An update through slime's hooks has the loss and the gradients of one forward pass per sampled token."""

from __future__ import annotations

import pytest
import torch

from slime_plugin.config.method import LogitTree, Mask4d, Method, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.config.trainer import Trainer
from slime_plugin.megatron.launch import run_ranks
from tests.local.jobs import Job, Outcome, update
from tests.megatron.conftest import Truth

SPLITS = {
    "one": Trainer(),
    "small micro-batches": Trainer(batch_tokens=40),
    "tp2+sp": Trainer(tp=2, sp=True, batch_tokens=100),
    "pp2": Trainer(pp=2, batch_tokens=60),
    "tp2+sp pp2": Trainer(tp=2, pp=2, sp=True, batch_tokens=60),
    "cp2": Trainer(cp=2, batch_tokens=100),
    "tp2+sp cp2": Trainer(tp=2, cp=2, sp=True, batch_tokens=100),
    "cp3": Trainer(cp=3, batch_tokens=100),
    "dp2": Trainer(dp=2, batch_tokens=60),
    "dp3": Trainer(dp=3, batch_tokens=10_000),
}
INTERLEAVED = {
    "pp3 vpp2": Trainer(pp=3, vpp=2, batch_tokens=60),
    "tp2+sp pp3 vpp2": Trainer(tp=2, sp=True, pp=3, vpp=2, batch_tokens=200),
}
EVERY = {**SPLITS, **INTERLEAVED}
EXACT = (LogitTree(), Mask4d(), Mask4d(packing="replicated"), Mask4d(budget=60))
WEIGHT = 0.7


@pytest.mark.parametrize("split", SPLITS)
def test_exact_methods_are_one_forward_per_token(truth: Truth, split: str) -> None:
    loss, gradients = truth.exact(torch.float64)
    for outcomes in _run(truth, split, EXACT):
        check(outcomes, split, loss, gradients)


@pytest.mark.parametrize("split", SPLITS)
def test_sdcc_is_the_compressed_walk_with_a_kl(truth: Truth, split: str) -> None:
    loss, gradients = truth.distilled(torch.float64, WEIGHT)
    (outcomes,) = _run(truth, split, (Sdcc(weight=WEIGHT, warmup=0),))
    check(outcomes, split, loss, gradients)


@pytest.mark.parametrize("split", ["one", "tp2+sp pp2", "cp2"])
def test_the_naive_methods_are_one_walk_each(truth: Truth, split: str) -> None:
    compressed, full = _run(truth, split, (NaiveCompressed(), NaiveFull()))
    check(compressed, split, *truth.distilled(torch.float64, 0.0))
    check(full, split, *truth.full(torch.float64))


@pytest.mark.parametrize("split", INTERLEAVED)
def test_virtual_stages_are_one_forward_per_token_too(deep: Truth, split: str) -> None:
    exact, distilled = deep.exact(torch.float64), deep.distilled(torch.float64, WEIGHT)
    for outcomes in _run(deep, split, (LogitTree(), Mask4d())):
        check(outcomes, split, *exact)
    (outcomes,) = _run(deep, split, (Sdcc(weight=WEIGHT, warmup=0),))
    check(outcomes, split, *distilled)


@pytest.mark.parametrize("top_k", [None, 9])
def test_in_bfloat16_inside_megatrons_wrapper(truth: Truth, top_k: int | None) -> None:
    """What the wrapper hands out is float32, also where nothing is projected."""
    records = [r.record for r in truth.rollouts]
    job = Job(truth.folder, records, truth.references, truth.objective, Trainer(), torch.bfloat16, wrapped=True)
    ((tree, distilled),) = run_ranks(1, update, job, (Mask4d(), Sdcc(weight=WEIGHT, warmup=0, top_k=top_k)))
    assert tree.loss == pytest.approx(truth.exact(torch.float64)[0], rel=0.1)
    assert distilled.loss == pytest.approx(truth.distilled(torch.float64, WEIGHT)[0], rel=0.1)


def test_naive_training_is_something_else(truth: Truth) -> None:
    _, gradients = truth.exact(torch.float64)
    ((outcome,),) = _run(truth, "one", (NaiveCompressed(),))
    assert _worst(outcome.gradients, gradients) > 0.1


def _run(truth: Truth, split: str, methods: tuple[Method, ...]) -> list[tuple[Outcome, ...]]:
    """For each method what the ranks came to."""
    trainer = EVERY[split]
    job = Job(truth.folder, [r.record for r in truth.rollouts], truth.references, truth.objective, trainer)
    return list(zip(*run_ranks(trainer.ranks, update, job, methods), strict=True))


def check(outcomes: tuple[Outcome, ...], split: str, loss: float, gradients: dict[str, torch.Tensor]) -> None:
    found: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        found.update(outcome.gradients)
    assert _worst(found, gradients) < 2e-6  # what was logged in the rollout travels as float32
    # Tensor-parallel ranks hold the same loss, all others a part of it.
    assert sum(outcome.loss for outcome in outcomes) / EVERY[split].tp == pytest.approx(loss, rel=1e-6)


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error of a parameter's gradient, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)
