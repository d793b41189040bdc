"""What a record says its tokens count is a factor of all they contribute to the loss, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull
from slime_plugin.config.objective import Objective
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.train.logdiff import LEAF_KEYS, LOGDIFF_KEYS
from slime_plugin.train.loss import Targets, policy_loss
from tests.train import oracle
from tests.train.conftest import Truth
from tests.train.jobs import distilling
from tests.train.test_exact import SPLITS, outcomes, worst

DISTIL = 0.7
EXACT: list[MethodSettings] = [LogitTree(), Mask4d(packing="replicated"), Mask4d(), Mask4d(budget=60)]
FIVE: list[MethodSettings] = [NaiveCompressed(), NaiveFull(), LogitTree(), Mask4d(), distilling(DISTIL)]


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2", "cp2 dp2", "dp3"])
def test_all_methods_are_the_long_way(split: str, truth: Truth) -> None:
    weighted = truth.weighted()
    settings, replicas = SPLITS[split]
    job = weighted.job(dtype=torch.float64, **settings)
    compressed, full, sdcc, *exact = outcomes(
        job, [NaiveCompressed(), NaiveFull(), distilling(DISTIL), *EXACT], replicas
    )
    own_contexts = weighted.exact(torch.float64)
    expected = [
        (compressed, weighted.distilled(torch.float64, 0.0)),
        (full, weighted.full(torch.float64)),
        (sdcc, weighted.distilled(torch.float64, DISTIL)),
        *((outcome, own_contexts) for outcome in exact),
    ]
    for outcome, (loss, gradients) in expected:
        assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
        assert worst(outcome, gradients)[0] < 1e-9, worst(outcome, gradients)


def test_the_comparison_can_fail(truth: Truth) -> None:
    """The weights are of tokens that matter, also among the diverging leaves."""
    weighted = truth.weighted()
    for of in (Truth.exact, Truth.full, lambda t, dtype: t.distilled(dtype, DISTIL)):
        (loss, gradients), (other, others) = of(weighted, torch.float64), of(truth, torch.float64)
        assert loss != pytest.approx(other, rel=0.01)
        assert min(float((gradients[name] - others[name]).norm() / others[name].norm()) for name in others) > 0.01
    leaves = [oracle.counts_for(r.record, p) for r in weighted.rollouts for p in oracle.diverging(r)]
    assert {0.0, 1.0} < set(leaves)


def test_weights_of_one_change_no_bit(truth: Truth) -> None:
    """Neither if records say so, which is not sent, nor if they are sent."""
    ones = replace(truth, rollouts=[oracle.with_weights(r, [[0, len(r.record), 1]]) for r in truth.rollouts])
    jobs = (truth.job(), ones.job(), truth.job(ones=True))
    for plain, *others in zip(*(outcomes(job, FIVE) for job in jobs), strict=True):
        for same in others:
            assert same.sums == plain.sums
            assert all(torch.equal(same.gradients[name], plain.gradients[name]) for name in plain.gradients)


def test_half_of_everything_is_half_the_loss_and_the_same_diagnostics(truth: Truth) -> None:
    """Halving is exact. The loss and its policy part are what is minimised; the rest describes the policy."""
    halves = replace(truth, rollouts=[oracle.with_weights(r, [[0, len(r.record), 0.5]]) for r in truth.rollouts])
    for plain, half in zip(outcomes(truth.job(), FIVE), outcomes(halves.job(), FIVE), strict=True):
        assert all(torch.equal(half.gradients[name], plain.gradients[name] / 2) for name in plain.gradients)
        for key in ("loss", "policy"):
            assert half.sums[key] == plain.sums[key] / 2 != 0
        for key in ("entropy", "reference_kl", "clipped", "ratio", "rollout_logdiff", *LOGDIFF_KEYS, *LEAF_KEYS):
            assert half.sums[key] == plain.sums[key]


@pytest.mark.parametrize("method", FIVE, ids=lambda method: method.type)
def test_weight_zero_is_a_term_that_is_missing(truth: Truth, method: MethodSettings) -> None:
    """As if the token had not been sampled, except that the mean is still over as many tokens as were."""
    rollout, reference = next(
        (r, values) for r, values in zip(truth.rollouts, truth.references, strict=True) if oracle.diverging(r)
    )
    position = oracle.diverging(rollout)[0]
    silent = oracle.with_weights(rollout, [[position, position + 1, 0]]).record
    unsampled = _without(rollout.record, position)
    sampled = lay_out(rollout.record, method).trained
    assert (lay_out(silent, method).trained, lay_out(unsampled, method).trained) == (sampled, sampled - 1)
    silenced, missing = (
        outcomes(replace(truth.job(dtype=torch.float64), records=_group(record), references=[reference] * 2), [method])[
            0
        ]
        for record in (silent, unsampled)
    )
    scale = (sampled - 1) / sampled
    assert silenced.sums["loss"] == pytest.approx(missing.sums["loss"] * scale, rel=1e-9)
    assert worst(silenced, {name: g * scale for name, g in missing.gradients.items()})[0] < 1e-9


def _without(record: Record, position: int) -> Record:
    """The token was not sampled."""
    generated, logprobs = record.generated.copy(), record.logprobs.copy()
    generated[position], logprobs[position] = False, float("nan")
    return replace(record, generated=generated, logprobs=logprobs)


def _group(record: Record) -> list[Record]:
    """Twice the same, once with a reward."""
    return [replace(record, meta=replace(record.meta, id=f"r{i}", group=0, reward=float(i))) for i in range(2)]


def test_a_factor_of_one_changes_no_bit_of_the_loss() -> None:
    torch.manual_seed(0)
    logprobs, entropy = (-torch.rand(50)).requires_grad_(), torch.rand(50).requires_grad_()
    advantage, weight, old, reference = torch.randn(50), torch.rand(50), -torch.rand(50), -torch.rand(50)
    found = []
    for factor in (None, torch.ones(50)):
        targets = Targets(advantage, weight, old, reference, factor)
        loss, sums = policy_loss(logprobs, entropy, targets, Objective(kl=0.1, entropy=0.05))
        found.append((loss, *torch.autograd.grad(loss, (logprobs, entropy)), *sums.values()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
