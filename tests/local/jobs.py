"""What the ranks of a test world do: one update through slime's hooks, from records to gradients."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.module import Float16Module

from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Method
from slime_plugin.config.objective import Objective
from slime_plugin.config.trainer import Trainer
from slime_plugin.hooks import train as hooks
from slime_plugin.hooks.rollout import convert_samples
from slime_plugin.local.passes import Passes
from slime_plugin.local.rank import provided_models
from slime_plugin.local.sample import Sample
from slime_plugin.local.schedule import split_batch
from slime_plugin.megatron.architecture import transformer_config
from slime_plugin.megatron.diagnostics import add_sums
from slime_plugin.megatron.launch import Report
from slime_plugin.megatron.parallel import start_groups
from slime_plugin.megatron.step import wrap_for_training
from slime_plugin.megatron.weights import gather_tensors, load_weights
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.seam.args import carry
from slime_plugin.seam.rollout import put_record
from slime_plugin.seam.training import open_training


@dataclass(frozen=True)
class Job:
    """One update step on some records."""

    folder: Path
    records: Sequence[Record]
    references: Sequence[np.ndarray]
    """[L] reference log-probabilities of each record."""
    objective: Objective
    trainer: Trainer
    dtype: torch.dtype = torch.float64
    ones: bool = False
    """Every token travels with a weight of 1, which is not sent for its own sake."""
    wrapped: bool = False
    """In the wrapper that Megatron puts around models in bfloat16, and slime therefore around ours."""


@dataclass(frozen=True)
class Outcome:
    """Of one rank: its own part of the loss, and the gradients of its own stage, summed over ranks."""

    loss: float
    gradients: dict[str, torch.Tensor]
    logprobs: list[torch.Tensor] | None


def update(report: Report, job: Job, methods: Sequence[Method]) -> list[Outcome]:
    groups = start_groups(job.trainer.parallel)
    architecture = Architecture.read(job.folder)
    outcomes = []
    for method in methods:
        cell = Cell(model=job.folder, method=method, objective=job.objective, trainer=job.trainer)
        args = Namespace(memorywalker=carry(cell))
        training = open_training(args, groups, transformer_config(architecture, job.trainer.parallel, job.dtype))
        provided = provided_models(groups, job.trainer.vpp)
        load_weights(provided, architecture, job.folder, groups)
        inner = [Float16Module(model.config, model) for model in provided] if job.wrapped else provided
        models: list[Any] = wrap_for_training(provided[0].config, inner, groups)
        for model in models:
            model.zero_grad_buffer()
        passes = Passes(args, training, models)
        data = _batch(job, args, method, groups.cp.rank())[groups.dp.rank()]
        logprobs = passes.logprobs(data)
        hooks.rollout_data_postprocess(args, 0, data)
        hooks.before_train_step(args, 0, 0, models, None, None)
        sums = add_sums(passes.update(data, 0))
        gradients = gather_tensors(models, architecture, groups, lambda p: p.main_grad.clone())  # type: ignore[attr-defined]  # Megatron's
        outcomes.append(Outcome(sums.get("loss", 0.0) / len(job.records), gradients, logprobs))
    return outcomes


def _batch(job: Job, args: Namespace, method: Method, context_rank: int) -> list[dict[str, Any]]:
    samples = []
    for i, record in enumerate(job.records):
        sample = Sample(index=1000 + i)
        put_record(sample, record)
        samples.append(sample)
    data = convert_samples(args, samples)
    if job.ones:
        for inputs, tokens in zip(data["multimodal_train_inputs"], data["tokens"], strict=True):
            inputs["weight"] = np.ones(len(tokens), dtype=np.float32)
    rows = [(r, row) for r, record in enumerate(job.records) for row in lay_out(record, method).rows]
    data["ref_log_probs"] = [
        job.references[r][row.tape[-length:]] for (r, row), length in zip(rows, data["response_lengths"], strict=True)
    ]
    data["advantages"] = [
        np.full(length, x) for length, x in zip(data["response_lengths"], data["rewards"], strict=True)
    ]
    trainer = job.trainer
    parts = split_batch(
        data, replicas=trainer.dp, steps=1, batch_tokens=trainer.batch_tokens, multiple=trainer.parallel.turns
    )
    for part in parts:
        for key in ("rollout_log_probs", "ref_log_probs", "advantages"):
            sizes = zip(part[key], part["total_lengths"], part["response_lengths"], strict=True)
            part[key] = [
                torch.as_tensor(np.array(value[-response:]))[own_response(length, response, context_rank, trainer.cp)]
                for value, length, response in sizes
            ]
    return parts


def own_response(length: int, response: int, rank: int, ranks: int) -> list[int]:
    """The response tokens of a row that a context-parallel rank predicts: those behind a token in one of its chunks."""
    chunk = math.ceil(length / (2 * ranks)) if ranks > 1 else length
    mine = [place for place in range(length) if place // chunk in (rank, 2 * ranks - 1 - rank)]
    first = length - response
    return [place + 1 - first for place in mine if first <= place + 1 < length]
