"""What the ranks of a test world do: build the sharded model from a Hugging Face folder, and run one update's loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from slime_plugin.config.method import Method, Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.megatron.architecture import Architecture
from slime_plugin.megatron.batch import pack_within, student_items, teacher_items
from slime_plugin.megatron.diagnostics import add_sums, places_of
from slime_plugin.megatron.launch import Report
from slime_plugin.megatron.loss import Distillation, TokenTable, UpdateLoss
from slime_plugin.megatron.model import TreeGPTModel, build_model
from slime_plugin.megatron.parallel import Parallelism, is_first_stage, is_last_stage, start
from slime_plugin.megatron.step import run, wrap_for_training
from slime_plugin.megatron.teacher import run_teacher
from slime_plugin.megatron.weights import gather_tensors, load_weights
from slime_plugin.methods import assign_credit, lay_out
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory


@dataclass(frozen=True)
class Job:
    """One update step on some records."""

    folder: Path
    records: Sequence[Record]
    references: Sequence[np.ndarray]
    """[L] reference log-probabilities of each record."""
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    budget: int = 64
    """Tokens per micro-batch."""
    objective: Objective = field(default_factory=lambda: Objective(kl=0.1, entropy=0.05))
    backend: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Of one rank; loss and sums on the last stage, gradients those of its own stage."""

    sums: dict[str, float]
    gradients: dict[str, torch.Tensor]
    micro_batches: int
    teacher_ran: bool


def update(report: Report, job: Job, methods: Sequence[Method], distil: float = 1.0) -> list[Outcome]:
    """The loss and gradients of each method, with the same model. ``distil`` is the step's weight of SDCC's KL."""
    groups = start(job.parallel)
    architecture = Architecture.read(job.folder)
    model = sharded_model(job, architecture, groups)
    config = model.config
    wrapped = wrap_for_training(config, [model], groups)
    return [_update(job, method, distil, wrapped, architecture, groups) for method in methods]


def sharded_model(job: Job, architecture: Architecture, groups: ProcessGroupCollection) -> TreeGPTModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about what is not installed
        model = build_model(
            architecture.to_megatron(job.parallel, job.dtype, recompute=job.recompute),
            groups,
            vocabulary=architecture.padded_vocabulary(job.parallel.tp),
            rotary_base=architecture.rotary_base,
            max_positions=architecture.max_positions,
            tied=architecture.tied,
            pre_process=is_first_stage(groups),
            post_process=is_last_stage(groups),
            backend=job.backend,
        )
    load_weights([model], architecture, job.folder, groups)
    return model


def _update(
    job: Job,
    method: Method,
    distil: float,
    models: list[Any],
    architecture: Architecture,
    groups: ProcessGroupCollection,
) -> Outcome:
    trajectories = [Trajectory.of(record) for record in job.records]
    layouts = [lay_out(trajectory, method) for trajectory in trajectories]
    credits = assign_credit([record.meta for record in job.records], layouts)
    mine = range(groups.dp.rank(), len(layouts), groups.dp.size())  # rollouts are dealt out to the replicas
    batches = pack_within([i for i in student_items(layouts) if i.rollout in mine], job.budget, job.parallel.multiple)
    teacher = None
    if isinstance(method, Sdcc) and distil:
        own = [item for item in teacher_items(layouts) if item.rollout in mine]
        teacher = run_teacher(models, own, groups, budget=job.budget, multiple=job.parallel.multiple)
    top_k = method.top_k if isinstance(method, Sdcc) else None
    loss = UpdateLoss(
        job.objective,
        credits,
        TokenTable([places_of(trajectory) for trajectory in trajectories]),
        architecture.vocabulary,
        groups.tp,
        reference=TokenTable(job.references),
        distillation=None if teacher is None else Distillation(distil, teacher, top_k),
    )
    for model in models:
        model.zero_grad_buffer()
    sums = add_sums(run(models, batches, loss, groups, forward_only=False))
    gradients = gather_tensors(models, architecture, groups, _gradient)
    return Outcome(sums, gradients, len(batches), teacher is not None)


def _gradient(parameter: Any) -> torch.Tensor:
    gradient: torch.Tensor = parameter.main_grad.clone()
    return gradient
