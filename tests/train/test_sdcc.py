"""SDCC at its edges: no weight, no leaf, top-k, moving average, warm-up and guard rails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slime_plugin.config.method import NaiveCompressed, Sdcc
from slime_plugin.config.parallel import Parallelism
from slime_plugin.train.distillation import SdccSchedule
from slime_plugin.train.ranks import OnProgress, run_ranks
from tests.train import oracle
from tests.train.conftest import Truth
from tests.train.jobs import Job, distilling, update
from tests.train.test_exact import outcomes, worst


@pytest.mark.parametrize("parallel", [Parallelism(), Parallelism(tp=2, pp=2, sp=True)], ids=["one", "tp2 pp2 sp"])
def test_weight_zero_is_naive_compressed_bit_for_bit(truth: Truth, parallel: Parallelism) -> None:
    sdcc, naive = outcomes(truth.job(parallel=parallel), [distilling(0.0), NaiveCompressed()])
    assert sdcc.sums["leaves"] == 0
    assert sdcc.sums == naive.sums
    assert all(torch.equal(sdcc.gradients[name], naive.gradients[name]) for name in naive.gradients)


def test_without_a_diverging_leaf_there_is_no_teacher_pass(truth: Truth) -> None:
    unedited = [oracle.diverging(rollout) == [] for rollout in truth.rollouts]
    assert any(unedited)
    calm = replace(
        truth,
        rollouts=[rollout for rollout, keep in zip(truth.rollouts, unedited, strict=True) if keep],
        references=[values for values, keep in zip(truth.references, unedited, strict=True) if keep],
    )
    sdcc, naive = outcomes(calm.job(), [distilling(0.7), NaiveCompressed()])
    assert sdcc.sums["leaves"] == 0
    assert all(torch.equal(sdcc.gradients[name], naive.gradients[name]) for name in naive.gradients)


@pytest.mark.parametrize("parallel", [Parallelism(), Parallelism(tp=2)], ids=["one", "tp2"])
def test_the_whole_vocabulary_as_top_k_is_the_whole_kl(truth: Truth, parallel: Parallelism) -> None:
    loss, gradients = truth.distilled(torch.float64, 0.7)
    (outcome,) = outcomes(truth.job(dtype=torch.float64, parallel=parallel), [distilling(0.7, top_k=oracle.VOCABULARY)])
    assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst(outcome, gradients)[0] < 1e-9


def test_leaf_diagnostics_are_those_of_the_plain_distributions(truth: Truth) -> None:
    (outcome,) = outcomes(truth.job(dtype=torch.float64, parallel=Parallelism(tp=2, cp=2)), [distilling(0.7)])
    model = oracle.load_model(truth.folder, torch.float64)
    leaves, kl, pinsker, gap = 0, 0.0, 0.0, 0.0
    with torch.no_grad():
        for rollout in truth.rollouts:
            live, compressed = oracle.score_live(model, rollout), oracle.score_compressed(model, rollout)
            for position in oracle.diverging(rollout):
                teacher, student = (torch.softmax(side[position][1], -1) for side in (live, compressed))
                here = float((teacher * (teacher / student).log()).sum())
                entropies = [float(-(p * p.log()).sum()) for p in (student, teacher)]
                leaves, kl, pinsker = leaves + 1, kl + here, pinsker + math.sqrt(here / 2)
                gap += abs(entropies[0] - entropies[1])
                assert 0.5 * float((teacher - student).abs().sum()) <= math.sqrt(here / 2)
    found = [outcome.sums[key] for key in ("leaves", "leaf_kl", "pinsker", "entropy_gap")]
    assert found == pytest.approx([leaves, kl, pinsker, gap], rel=1e-9)


def test_the_teacher_pass_is_skipped_where_it_would_teach_nothing(truth: Truth) -> None:
    (calm,) = run_ranks(1, count_teacher_passes, truth.job(), [0, 1], distilling(0.7))
    assert calm == 1
    twins = [i for i, rollout in enumerate(truth.rollouts) if not oracle.diverging(rollout)]
    assert run_ranks(1, count_teacher_passes, truth.job(), twins, distilling(0.7)) == [0]
    assert run_ranks(1, count_teacher_passes, truth.job(), [0, 1], distilling(0.0)) == [0]


def count_teacher_passes(on_progress: OnProgress, job: Job, rollouts: list[int], method: Sdcc) -> int:
    """Forward passes beyond those of the students: hooks count how often the first layer runs."""
    passes = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: (
            passes.append(torch.is_grad_enabled()) if type(module).__name__ == "PackedTreeModel" else None
        )
    )
    some = replace(job, records=[job.records[i] for i in rollouts], references=[job.references[i] for i in rollouts])
    update(on_progress, replace(some, batch_tokens=10_000), [method])
    hook.remove()
    return passes.count(False)


def test_a_moving_average_teaches_with_its_own_weights(truth: Truth) -> None:
    """Before the first update the average is the model itself, so nothing changes."""
    current, averaged = outcomes(truth.job(parallel=Parallelism(pp=2)), [distilling(0.7), distilling(0.7, ema=0.9)])
    assert current.sums == averaged.sums
    assert all(torch.equal(current.gradients[name], averaged.gradients[name]) for name in current.gradients)


def test_the_weight_ramps_up_over_the_first_fifth_of_the_steps() -> None:
    schedule = SdccSchedule(Sdcc(), steps=100)
    assert [schedule.coefficient(step) for step in (0, 5, 10, 20, 99)] == pytest.approx([0.0, 0.025, 0.05, 0.1, 0.1])
    assert SdccSchedule(Sdcc(warmup=0), steps=10).coefficient(0) == 0.1


def test_divergence_switches_the_kl_off_after_some_patience_and_for_good() -> None:
    schedule = SdccSchedule(Sdcc(kl_limit=2.0, patience=2, warmup=0), steps=10)
    schedule.observe(leaves=4, kl=12.0, entropy_gap=0.0)
    schedule.observe(leaves=4, kl=4.0, entropy_gap=0.0)  # a calm step starts the count anew
    schedule.observe(leaves=4, kl=12.0, entropy_gap=0.0)
    assert schedule.coefficient(3) == 0.1
    schedule.observe(leaves=0, kl=0.0, entropy_gap=0.0)  # a step without leaves says nothing
    schedule.observe(leaves=4, kl=math.nan, entropy_gap=0.0)
    assert schedule.off_reason == "mean KL per leaf nan where 2 is the limit in 2 steps in a row"
    schedule.observe(leaves=4, kl=0.0, entropy_gap=0.0)
    assert schedule.coefficient(9) == 0.0


def test_the_entropy_gap_is_a_guard_rail_too() -> None:
    schedule = SdccSchedule(Sdcc(entropy_gap_limit=1.0, patience=1), steps=10)
    schedule.observe(leaves=2, kl=0.1, entropy_gap=3.0)
    assert schedule.off_reason == "mean entropy gap 1.5 where 1 is the limit in 1 steps in a row"


def test_a_schedule_goes_on_as_it_was() -> None:
    before = SdccSchedule(Sdcc(kl_limit=2.0, patience=2), steps=100)
    before.observe(1.0, 3.0, 0.0)
    longer = SdccSchedule(Sdcc(kl_limit=2.0, patience=2), steps=1000)
    longer.restore(before.state())
    assert longer.coefficient(10) == before.coefficient(10) == pytest.approx(0.05), "the ramp is not drawn out"
    longer.observe(1.0, 3.0, 0.0)
    assert longer.off_reason is not None, "the second diverged step in a row"
    again = SdccSchedule(Sdcc(), steps=100)
    again.restore(longer.state())
    assert again.coefficient(50) == 0.0
