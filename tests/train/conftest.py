from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_plugin.config.objective import Objective
from tests.train import oracle
from tests.train.jobs import Job


@dataclass(frozen=True)
class Truth:
    """A batch of rollouts, and what the long way makes of it."""

    folder: Path
    rollouts: list[oracle.Rollout]
    references: list[np.ndarray]
    objective: Objective

    def weighted(self) -> Truth:
        """The same with weights for spans of all tapes but one, exact in float32; some count nothing."""
        rng = np.random.default_rng(2)
        rollouts = []
        for i, rollout in enumerate(self.rollouts):
            entries: list[list[float]] = []
            at = int(rng.integers(0, 3))
            while i != 1 and at < len(rollout.record):
                stop = min(at + int(rng.integers(1, 4)), len(rollout.record))
                entries.append([at, stop, float(rng.choice([0.0, 0.25, 0.5, 2.0, 3.0]))])
                at = stop + int(rng.integers(0, 4))
            rollouts.append(oracle.with_weights(rollout, entries) if entries else rollout)
        return replace(self, rollouts=rollouts)

    def left_out(self) -> Truth:
        """The same with a rollout of the first group that was aborted, and one of the second that a filter removed."""
        rollouts = list(self.rollouts)
        for number, changes in ((2, {"status": "aborted", "reward": None}), (5, {"extra": {"removed": True}})):
            record = rollouts[number].record
            rollouts[number] = replace(rollouts[number], record=record.with_meta(replace(record.meta, **changes)))
        return replace(self, rollouts=rollouts)

    def job(self, **settings: Any) -> Job:
        records = [rollout.record for rollout in self.rollouts]
        return Job(self.folder, records, self.references, objective=self.objective, **settings)

    def exact(self, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients with every token under its own context."""
        model = oracle.load_model(self.folder, dtype)
        scores = [oracle.score_live(model, rollout) for rollout in self.rollouts]
        loss = oracle.grpo(scores, self.rollouts, self.references, self.objective)
        return loss.item(), oracle.gradients(model, loss)

    def full(self, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients on the whole trace."""
        model = oracle.load_model(self.folder, dtype)
        scores = [oracle.score_full(model, rollout) for rollout in self.rollouts]
        loss = oracle.grpo(scores, self.rollouts, self.references, self.objective)
        return loss.item(), oracle.gradients(model, loss)

    def distilled(self, dtype: torch.dtype, weight: float) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of the compressed walk with a KL to the live contexts."""
        model = oracle.load_model(self.folder, dtype)
        students = [oracle.score_compressed(model, rollout) for rollout in self.rollouts]
        loss = oracle.grpo(students, self.rollouts, self.references, self.objective)
        if weight:
            with torch.no_grad():
                teachers = [oracle.score_live(model, rollout) for rollout in self.rollouts]
            loss = loss + weight * oracle.distillation(students, teachers, self.rollouts)
        return loss.item(), oracle.gradients(model, loss)


def make_truth(folder: Path, *, tied: bool, layers: int = 4) -> Truth:
    oracle.make_model(folder, tied=tied, layers=layers)
    rollouts = oracle.batch_of_rollouts(folder)
    rng = np.random.default_rng(1)
    # Around what was logged; a few so far from it that their KL is at its bound.
    references = [np.nan_to_num(r.record.logprobs) + rng.normal(0, 1.5, len(r.record)) for r in rollouts]
    return Truth(folder, rollouts, references, Objective(kl=0.1, entropy=0.05))


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """With an output layer that is the embedding."""
    return make_truth(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return make_truth(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """With as many layers as three stages of two virtual ones need."""
    return make_truth(tmp_path_factory.mktemp("deep"), tied=True, layers=6)
