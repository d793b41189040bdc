"""A step of slime's own actor has the gradients of the long way, for all five methods, however it is split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from slime_plugin.config.cell import Cell
from slime_plugin.config.cluster import Cluster
from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.config.rollout import Rollout
from slime_plugin.config.trainer import Trainer
from slime_plugin.train.loss import Targets, policy_loss
from slime_plugin.train.ranks import run_ranks
from tests.slime.sources import needs_slime, slime_imports
from tests.train import oracle

if TYPE_CHECKING:
    from tests.slime.actor import Outcome

pytestmark = needs_slime

WEIGHT = 0.7
METHODS: dict[str, MethodSettings] = {
    "naive_compressed": NaiveCompressed(),
    "naive_full": NaiveFull(),
    "logittree": LogitTree(),
    "mask4d": Mask4d(),
    "mask4d budget": Mask4d(budget=40),
    "sdcc": Sdcc(weight=WEIGHT, warmup=0),
}
SPLITS = {
    "one": Trainer(batch_tokens=10_000),
    "tp2+sp pp2": Trainer(tp=2, pp=2, sp=True, batch_tokens=120),
    "cp2": Trainer(cp=2, batch_tokens=60),
    "dp2": Trainer(dp=2, batch_tokens=80),
    "pp3 vpp2": Trainer(pp=3, vpp=2, batch_tokens=100),
}


class Long:
    """The long way: policy and reference on the contexts of a method, one plain forward pass each."""

    def __init__(self, folder: Path) -> None:
        self.policy = oracle.make_model(folder / "policy", tied=True, layers=6, vocabulary=132)
        self.reference = oracle.make_model(folder / "reference", tied=True, layers=6, vocabulary=132, seed=5)
        self.rollouts = oracle.batch_of_rollouts(self.policy)
        self.objective = Objective(kl=0.1, entropy=0.05)

    def expected(self, method: MethodSettings) -> dict[str, torch.Tensor]:
        """Gradients. The old log-probabilities are those of the policy itself, as slime computes them."""
        score = {"naive_compressed": oracle.score_compressed, "naive_full": oracle.score_full}
        score["sdcc"] = oracle.score_compressed
        scored = score.get(method.type, oracle.score_live)
        policy = oracle.load_model(self.policy, torch.float64)
        reference = oracle.load_model(self.reference, torch.float64)
        scores = [scored(policy, rollout) for rollout in self.rollouts]
        with torch.no_grad():
            references = [_logprobs(scored(reference, r), len(r.record)) for r in self.rollouts]
            old = [_logprobs(of_rollout, len(r.record)) for of_rollout, r in zip(scores, self.rollouts, strict=True)]
        loss = oracle.grpo(scores, self.rollouts, references, self.objective, old)
        if isinstance(method, Sdcc):
            with torch.no_grad():
                teachers = [oracle.score_live(policy, rollout) for rollout in self.rollouts]
            loss = loss + WEIGHT * oracle.distillation(scores, teachers, self.rollouts)
        return oracle.gradients(policy, loss)


def _logprobs(scores: oracle.Scores, length: int) -> np.ndarray:
    values = np.full(length, np.nan)
    for position, (token, logits) in scores.items():
        values[position] = float(torch.log_softmax(logits, -1)[token])
    return values


@pytest.fixture(scope="module")
def long_way(tmp_path_factory: pytest.TempPathFactory) -> Long:
    return Long(tmp_path_factory.mktemp("long"))


def run_step(
    long_way: Long, trainer: Trainer, method: MethodSettings, folder: Path, *, sleeps: bool = False
) -> list[Outcome]:
    from tests.slime.actor import SlimeJob, prepare, train

    cell = Cell(
        model=long_way.policy,
        method=method,
        objective=long_way.objective,
        rollout=Rollout(questions=folder / "questions.jsonl", samples=4),
        trainer=trainer.model_copy(update={"prompts": 2, "steps": 1, "iterations": 1, "dp": 1}),
        cluster=Cluster(nodes=2, rollout_nodes=1, gpus=trainer.ranks, megatron=long_way.reference),
    )
    records = [rollout.record for rollout in long_way.rollouts]
    job = SlimeJob(cell, folder, records, long_way.reference, sleeps=sleeps)
    prepare(job)
    (parts,) = run_ranks(1, _parts, job)
    return run_ranks(trainer.ranks, train, job, parts)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_the_long_way(long_way: Long, tmp_path: Path, split: str, name: str) -> None:
    outcomes = run_step(long_way, SPLITS[split], METHODS[name], tmp_path / "run")
    found: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        found.update(outcome.gradients)
    expected = long_way.expected(METHODS[name])
    assert found.keys() == expected.keys()
    worst = max(float((found[key] - expected[key]).norm() / expected[key].norm()) for key in expected)
    assert worst < 3e-5, worst  # in float32
    for outcome in outcomes:
        begun = ["init", *["model_provider"] * SPLITS[split].vpp, "rollout_data_postprocess", "before_train_step"]
        assert outcome.calls[: len(begun)] == begun
        assert set(outcome.calls[len(begun) :]) <= {"loss"}


@pytest.mark.parametrize("split", ["tp2+sp pp2", "cp2"])
@pytest.mark.parametrize("method", [Mask4d(), Sdcc(weight=WEIGHT, warmup=0)], ids=["mask4d", "sdcc"])
def test_the_next_step_is_the_same_after_sleep(
    long_way: Long, tmp_path: Path, split: str, method: MethodSettings
) -> None:
    """Every tensor is given away and comes back, and slime destroys and creates all process groups."""
    for outcome in run_step(long_way, SPLITS[split], method, tmp_path / "run", sleeps=True):
        assert outcome.repeated is not None
        assert outcome.repeated.keys() == outcome.gradients.keys() != set()
        assert all(torch.equal(outcome.repeated[name], x) for name, x in outcome.gradients.items())


def test_the_reference_kl_is_slimes_estimator() -> None:
    slime_imports()
    from slime.utils.ppo_utils import compute_approx_kl

    log_ratios = torch.linspace(-15, 15, 1001, dtype=torch.float32)
    found = []
    for ours in (True, False):
        logprobs = torch.zeros(1001, requires_grad=True)
        if ours:
            ones = torch.ones(1001)
            targets = Targets(0 * ones, ones, logprobs.detach(), log_ratios)
            loss, _ = policy_loss(logprobs, 0 * ones, targets, Objective(kl=1.0))
        else:
            loss = compute_approx_kl(logprobs, log_ratios, "low_var_kl").sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        found.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(*found)


def _parts(report: object, job: object) -> object:
    from tests.slime.actor import train_data

    return train_data(job)  # type: ignore[arg-type]  # a SlimeJob
