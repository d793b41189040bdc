"""What the ranks of a test world do: load their part of a model, and compute the gradients of one update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Method, Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.config.parallel import Parallelism
from slime_plugin.megatron.launch import Report
from slime_plugin.megatron.loss import TokenTable
from slime_plugin.megatron.parallel import start_groups
from slime_plugin.megatron.step import wrap_for_training
from slime_plugin.megatron.update import Updates
from slime_plugin.megatron.weights import gather_tensors, load_model
from slime_plugin.record import Record


@dataclass(frozen=True)
class Job:
    """One update step on some records."""

    folder: Path
    records: Sequence[Record] = ()
    references: Sequence[np.ndarray] = ()
    """[L] reference log-probabilities of each record."""
    old: Sequence[np.ndarray] | None = None
    """[L] log-probabilities before the update, if not those of the rollout."""
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    batch_tokens: int = 64
    objective: Objective = field(default_factory=lambda: Objective(kl=0.1, entropy=0.05))
    backend: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Of one rank: sums over all ranks, and the gradients of its own stage."""

    sums: dict[str, float]
    gradients: dict[str, torch.Tensor]


def update(report: Report, job: Job, methods: Sequence[Method]) -> list[Outcome]:
    """The loss and gradients of each method, with the same model."""
    groups = start_groups(job.parallel)
    architecture = Architecture.read(job.folder)
    model = load_model(job.folder, groups, job.parallel, job.dtype, recompute=job.recompute, backend=job.backend)
    models: list[Any] = wrap_for_training(model.config, [model], groups)
    mine = range(groups.dp.rank(), len(job.records), groups.dp.size())  # rollouts are dealt out to the replicas
    outcomes = []
    for method in methods:
        models[0].zero_grad_buffer()
        updates = Updates.of(
            models,
            groups,
            job.parallel,
            Cell(method=method, objective=job.objective),
            vocabulary=architecture.vocabulary,
            batch_tokens=job.batch_tokens,
            steps=1,
        )
        old = None if job.old is None else TokenTable(job.old)
        sums = updates.gradients(job.records, mine, step=0, old=old, reference=TokenTable(job.references))
        outcomes.append(Outcome(sums, gather_tensors(models, architecture, groups, _gradient)))
    return outcomes


def distilling(weight: float, **settings: Any) -> Sdcc:
    """SDCC with its full weight from the first step."""
    return Sdcc(weight=weight, warmup=0, **settings)


def _gradient(parameter: Any) -> torch.Tensor:
    gradient: torch.Tensor = parameter.main_grad.clone()
    return gradient
