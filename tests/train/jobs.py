"""What the ranks of a test world do: one update through slime's hooks, from records to gradients."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Mask4d, MethodSettings, Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.config.parallel import Parallelism
from slime_plugin.config.trainer import Trainer
from slime_plugin.hooks import train as hooks
from slime_plugin.hooks.rollout import convert_samples
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.passes import Passes
from slime_plugin.local.rank import provided_models, reduced_sums
from slime_plugin.local.sample import recorded_samples
from slime_plugin.methods import lay_out
from slime_plugin.methods.row import idle_row
from slime_plugin.record import Record
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import Batch
from slime_plugin.slime.training import open_training
from slime_plugin.train import tree_model
from slime_plugin.train.attention import BACKENDS
from slime_plugin.train.attention.flash import attend_flash
from slime_plugin.train.hf_weights import gather_tensors, load_weights
from slime_plugin.train.loss import ROLLOUT_KEYS
from slime_plugin.train.pipeline import wrap_for_training
from slime_plugin.train.process_groups import is_first_stage, is_last_stage, start_groups
from slime_plugin.train.ranks import OnProgress
from slime_plugin.train.transformer_config import transformer_config
from slime_plugin.train.tree_model import TreeGPTModel, build_model
from tests.train.flash_reference import use_flash
from tests.train.fused_rope import fused_rope_thd


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
    ones: bool = False
    """Every token travels with a weight of 1, which is not sent for its own sake."""
    fused_rope: bool = False
    """With Megatron's fused RoPE, whose kernel is that of :mod:`tests.train.fused_rope`."""
    wrapped: bool = False
    """In the wrapper that Megatron puts around models in bfloat16, and slime therefore around ours."""
    flash: int | None = None
    """With the flash backend, around the reference of this version of FlashAttention."""
    transformer_engine: bool = False
    """With its layers and its fused RoPE, as on a GPU; on ranks of :mod:`tests.train.te_world`."""

    def trainer(self, replicas: int) -> Trainer:
        p = self.parallel
        split = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "sp": p.sp, "vpp": p.vpp, "dp": replicas}
        return Trainer(**split, batch_tokens=self.batch_tokens, recompute=self.recompute)  # type: ignore[arg-type]  # pydantic checks


@dataclass(frozen=True)
class Outcome:
    """Of one rank: means and sums over all ranks, and the gradients of its own stage."""

    sums: dict[str, float]
    gradients: dict[str, torch.Tensor]


def update(on_progress: OnProgress, job: Job, methods: Sequence[MethodSettings]) -> list[Outcome]:
    """The loss and gradients of each method."""
    groups = start_groups(job.parallel)
    architecture = Architecture.read(job.folder)
    trainer = job.trainer(groups.dp.size())
    outcomes = []
    for method in methods:
        args = args_of(Cell(model=job.folder, method=method, objective=job.objective, trainer=trainer))
        config = transformer_config(architecture, trainer.parallel, job.dtype, recompute=trainer.recompute)
        if job.fused_rope:
            rope_utils.fused_apply_rotary_pos_emb_thd = fused_rope_thd
            config.apply_rope_fusion = True
        if job.flash is not None:
            use_flash(pytest.MonkeyPatch(), job.flash)
            BACKENDS["sdpa"] = attend_flash
        if job.transformer_engine:
            use_transformer_engine(config)
        training = open_training(args, groups, config)
        if job.backend is None:
            provided = provided_models(groups, trainer.vpp)
        else:
            provided = [training.model(is_first_stage(groups), is_last_stage(groups), None, job.backend)]
        load_weights(provided, architecture, job.folder, groups)
        inner = [Float16Module(model.config, model) for model in provided] if job.wrapped else provided
        models: list[Any] = wrap_for_training(provided[0].config, inner, groups)
        for model in models:
            model.zero_grad_buffer()
        data = _batch(job, args, method, trainer, groups.cp.rank())[groups.dp.rank()]
        hooks.rollout_data_postprocess(args, 0, data)
        hooks.before_train_step(args, 0, 0, models, None, None)
        sums = reduced_sums(Passes(args, training, models).update(data, 0), groups)
        sums = {key: value / (len(job.records) if key in ROLLOUT_KEYS else 1) for key, value in sums.items()}
        outcomes.append(Outcome(sums, gather_tensors(models, architecture, groups, _gradient)))
    return outcomes


def _batch(
    job: Job, args: Namespace, method: MethodSettings, trainer: Trainer, context_rank: int
) -> list[dict[str, Any]]:
    """The part of each replica, with numbers per token as float64: nothing but the logged ones is rounded."""
    if method == UNION:  # which is not trained, and is converted only to show that it would be wrong
        data = Batch.of(recorded_samples(job.records, 1000), Cell(method=method)).train_data()
    else:
        data = convert_samples(args, recorded_samples(job.records, 1000))
    if job.ones:
        for inputs, tokens in zip(data["multimodal_train_inputs"], data["tokens"], strict=True):
            inputs["weight"] = np.ones(len(tokens), dtype=np.float32)
    rows = [
        (r, row)
        for r, record in enumerate(job.records)
        for row in ([idle_row(record)] if is_left_out(record) else lay_out(record, method).rows)
    ]
    per_token = {"ref_log_probs": job.references} | ({} if job.old is None else {"log_probs": job.old})
    for key, columns in per_token.items():
        data[key] = [
            columns[r][row.tape[-length:]] for (r, row), length in zip(rows, data["response_lengths"], strict=True)
        ]
    data["advantages"] = [
        np.full(length, x) for length, x in zip(data["response_lengths"], data["rewards"], strict=True)
    ]
    budget = 1 if method == UNION else trainer.batch_tokens
    parts = split_batch(
        data, replicas=trainer.dp, steps=1, batch_tokens=budget, multiple=trainer.parallel.micro_batch_multiple
    )
    for part in parts:
        for key in ("rollout_log_probs", "advantages", *per_token):
            sizes = zip(part[key], part["total_lengths"], part["response_lengths"], strict=True)
            part[key] = [
                torch.as_tensor(np.array(value[-response:]))[own_response(length, response, context_rank, trainer.cp)]
                for value, length, response in sizes
            ]
    return parts


def is_left_out(record: Record) -> bool:
    return record.meta.status == "aborted" or record.meta.report.removed


def own_response(length: int, response: int, rank: int, ranks: int) -> list[int]:
    """The response tokens of a row that a context-parallel rank predicts: those behind a token in one of its chunks."""
    chunk = math.ceil(length / (2 * ranks)) if ranks > 1 else length
    mine = [place for place in range(length) if place // chunk in (rank, 2 * ranks - 1 - rank)]
    first = length - response
    return [place + 1 - first for place in mine if first <= place + 1 < length]


def use_transformer_engine(config: TransformerConfig) -> None:
    """What is chosen where there is CUDA, in this process from now on."""
    tree_model._layer_spec = lambda config, groups, backend, vp_stage: tree_model._transformer_engine_spec(
        config, backend
    )
    config.use_cpu_initialization = False
    config.apply_rope_fusion = True


def _gradient(parameter: Any) -> torch.Tensor:
    gradient: torch.Tensor = parameter.main_grad.clone()
    return gradient


UNION = Mask4d(packing="union")


def distilling(weight: float, **settings: Any) -> Sdcc:
    """SDCC with its full weight from the first step."""
    return Sdcc(weight=weight, warmup=0, **settings)


def load_model(
    folder: Path, groups: ProcessGroupCollection, parallel: Parallelism, dtype: torch.dtype = torch.float32
) -> TreeGPTModel:
    """This rank's part of a Hugging Face checkpoint."""
    architecture = Architecture.read(folder)
    model = build_model(
        transformer_config(architecture, parallel, dtype),
        groups,
        architecture,
        pre_process=is_first_stage(groups),
        post_process=is_last_stage(groups),
        kind=TreeGPTModel,
    )
    load_weights([model], architecture, folder, groups)
    return model
