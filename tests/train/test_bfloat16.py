"""Updates in bfloat16 are those of one forward pass per sampled token, within the limits of ``memorywalker verify``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.train.ranks import run_ranks
from slime_plugin.verify.settings import LIMITS
from tests.train import te_reference
from tests.train.conftest import Truth
from tests.train.jobs import Job, Outcome, distilling, update
from tests.train.test_exact import DISTIL, EXACT, INTERLEAVED, SPLITS, together
from tests.verify.breakages import run_broken

Errors = tuple[float, float]
LIMIT = LIMITS["bfloat16"]
METHODS: list[MethodSettings] = [*EXACT, distilling(DISTIL)]
WALKS: list[MethodSettings] = [NaiveCompressed(), NaiveFull()]
FAST = ("one process", "tp2 pp2 sp")
ON_A_GPU = ("tp2 cp2 sp",)
SLOW = pytest.mark.slow


def errors(outcome: Outcome, expected: tuple[float, dict[str, torch.Tensor]]) -> Errors:
    """Of the loss, relative where it is over 1, and of all gradients together, as the model check has them."""
    loss, gradients = expected
    found = torch.cat([outcome.gradients[name].double().flatten() for name in gradients])
    right = torch.cat([gradient.flatten() for gradient in gradients.values()])
    return abs(outcome.sums["loss"] - loss) / max(1.0, abs(loss)), float((found - right).norm() / right.norm())


def within(found: Errors) -> bool:
    return found[0] <= LIMIT.loss and found[1] <= LIMIT.gradient


def expectation(truth: Truth, method: MethodSettings) -> tuple[float, dict[str, torch.Tensor]]:
    if isinstance(method, NaiveFull):
        return truth.full(torch.float64)
    if isinstance(method, NaiveCompressed | Sdcc):
        return truth.distilled(torch.float64, method.weight if isinstance(method, Sdcc) else 0.0)
    return truth.exact(torch.float64)


def check(truth: Truth, ranks: list[list[Outcome]], methods: list[MethodSettings], what: Any = "") -> None:
    expected: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
    for i, method in enumerate(methods):
        kind = "exact" if method in EXACT else method.type
        expected[kind] = expected.get(kind) or expectation(truth, method)
        found = errors(together([rank[i] for rank in ranks]), expected[kind])
        assert within(found), (what, method, found)


def run(job: Job, methods: list[MethodSettings], replicas: int) -> list[list[Outcome]]:
    return run_ranks(job.parallel.ranks * replicas, update, job, methods)


@pytest.mark.parametrize("split", [split if split in FAST else pytest.param(split, marks=SLOW) for split in SPLITS])
def test_every_method_on_every_split(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(truth, run(truth.job(dtype=torch.bfloat16, wrapped=True, **settings), METHODS, replicas), METHODS)


@pytest.mark.parametrize("split", [split if split in FAST[:1] else pytest.param(split, marks=SLOW) for split in FAST])
def test_the_naive_methods(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(truth, run(truth.job(dtype=torch.bfloat16, wrapped=True, **settings), WALKS, replicas), WALKS)


@SLOW
@pytest.mark.parametrize("split", INTERLEAVED)
def test_virtual_stages(split: str, deep: Truth) -> None:
    check(deep, run(deep.job(dtype=torch.bfloat16, wrapped=True, **INTERLEAVED[split]), METHODS, 1), METHODS)


@SLOW
@pytest.mark.parametrize("split", FAST)
def test_an_output_layer_of_its_own(split: str, untied: Truth) -> None:
    settings, replicas = SPLITS[split]
    check(untied, run(untied.job(dtype=torch.bfloat16, wrapped=True, **settings), METHODS, replicas), METHODS)


@SLOW
@pytest.mark.parametrize("split", FAST)
def test_token_weights_and_rollouts_that_are_not_trained(split: str, truth: Truth) -> None:
    settings, replicas = SPLITS[split]
    for changed in (truth.weighted(), truth.left_out()):
        check(changed, run(changed.job(dtype=torch.bfloat16, wrapped=True, **settings), METHODS, replicas), METHODS)


@pytest.mark.parametrize(
    ("flash", "splits"),
    [
        (3, ON_A_GPU),
        pytest.param(3, tuple(set(SPLITS) - set(ON_A_GPU)), marks=SLOW),
        pytest.param(2, tuple(SPLITS), marks=SLOW),
    ],
)
def test_with_the_layers_and_kernels_of_a_gpu(flash: int, splits: tuple[str, ...], truth: Truth) -> None:
    """Transformer Engine's layers, its fused RoPE, FlashAttention and Megatron's bfloat16 wrapper, all at once."""
    methods: list[MethodSettings] = [LogitTree(), Mask4d(), distilling(DISTIL)]
    calls = []
    for split in splits:
        settings, replicas = SPLITS[split]
        gpu: dict[str, Any] = {"wrapped": True, "flash": flash, "transformer_engine": True}
        job = truth.job(dtype=torch.bfloat16, **gpu, **settings)
        calls.append(("update", job.parallel.ranks * replicas, (job, methods)))
    for split, ranks in zip(splits, te_reference.run_calls("tests.train.te_world", *calls), strict=True):
        check(truth, ranks, methods, split)


@pytest.mark.parametrize(
    ("breakage", "method"),
    [
        ("wrong_parent", Mask4d()),
        ("index_for_depth", Mask4d()),
        ("top_left_causality", Mask4d()),
        ("trained_teacher", distilling(30.0)),
        ("dropped_shard", LogitTree()),
    ],
)
def test_what_is_wrong_is_over_the_limits(breakage: str, method: MethodSettings, truth: Truth) -> None:
    split = "tp2 sp" if breakage == "dropped_shard" else "one micro-batch"
    job = truth.job(dtype=torch.bfloat16, wrapped=True, **SPLITS[split][0])
    check(truth, run(job, [method], 1), [method])
    (broken,) = run_broken(breakage, job.parallel.ranks, update, job, [method])[0]  # ranks may not agree any more
    found = errors(broken, expectation(truth, method))
    assert found[1] > 2 * LIMIT.gradient, found


def test_methods_that_are_not_exact_are_over_the_limits(truth: Truth) -> None:
    job = truth.job(dtype=torch.bfloat16, wrapped=True)
    for outcome in run(job, [*WALKS, Mask4d(packing="union")], 1)[0]:
        found = errors(outcome, truth.exact(torch.float64))
        assert found[1] > 2 * LIMIT.gradient, found
