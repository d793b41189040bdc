"""What a training process keeps between slime's hooks.

The order: a batch is received (teacher rows are taken out of it); before each update SDCC's teacher runs with exactly
the weights of that update; then the loss of every micro-batch finds the teacher's states by rollout and leaf. slime has
no hook behind an update, so what follows from one (guard rails, moving average) is settled before the next.
"""

from __future__ import annotations

import contextlib
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Sdcc
from slime_plugin.errors import ConfigError
from slime_plugin.megatron.batch import Item
from slime_plugin.megatron.loss import Leaves, update_loss
from slime_plugin.megatron.model import TreeGPTModel, build_model
from slime_plugin.megatron.objective import SdccSchedule, Targets
from slime_plugin.megatron.parallel import context_group
from slime_plugin.megatron.teacher import MovingAverage, TeacherStates, run_teacher
from slime_plugin.megatron.vocabulary import Shard
from slime_plugin.methods import Row
from slime_plugin.seam.args import cell_of
from slime_plugin.seam.memory import NAME, ScheduleMemory
from slime_plugin.seam.model import PackedTreeModel
from slime_plugin.seam.packed import Batch, Share, Trained, joined, trained_tokens
from slime_plugin.seam.refusals import check_args
from slime_plugin.seam.retention import remove_outdated

_log = logging.getLogger(__name__)
OBSERVED = ("leaves", "leaf_kl", "entropy_gap")
"""Sums of a step that SDCC's guard rails look at."""


@dataclass
class Training:
    """One process of the trainer."""

    cell: Cell
    groups: ProcessGroupCollection
    architecture: Architecture
    config: TransformerConfig
    schedule: SdccSchedule | None
    """Of SDCC's KL; None for other methods."""
    checkpoints: Path | None = None
    """Where slime saves them; it removes none."""
    memory: ScheduleMemory | None = None
    """Of the schedule, where nobody else keeps it."""
    average: MovingAverage | None = None
    """The teacher's weights, if they are not the current ones."""
    weight: float = 0.0
    """Of SDCC's KL in the current step."""
    teacher: TeacherStates | None = None
    """Of the current step, on the last stage."""
    teacher_rows: list[list[Item]] = field(default_factory=list)
    """Of the current batch, per step."""
    observed: Tensor | None = None
    """[3] sums of the update that is not settled yet."""

    @classmethod
    def of(cls, args: Namespace, groups: ProcessGroupCollection, config: TransformerConfig) -> Training:
        cell = cell_of(args)
        if cell.model is None:
            raise ConfigError("model: missing; name the folder of a Hugging Face checkpoint")
        method = cell.method
        schedule = SdccSchedule(method, cell.trainer.total_steps) if isinstance(method, Sdcc) else None
        return cls(cell, groups, Architecture.read(cell.model), config, schedule)

    def model(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> TreeGPTModel:
        """The part of the model that a pipeline stage holds, without weights."""
        model = build_model(
            self.config,
            self.groups,
            self.architecture,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            kind=PackedTreeModel,
        )
        model.context = context_group(self.groups)
        return model

    def receive(self, rollout_data: dict[str, Any]) -> None:
        """A batch of this rank, before its first update."""
        teachers = rollout_data.pop("prompt", None) or [None] * len(rollout_data["rollout_ids"])
        self.teacher_rows, at = [], 0
        for number in rollout_data["num_microbatches"]:
            of_step = [i for batch in rollout_data["micro_batch_indices"][at : at + number] for i in batch]
            self.teacher_rows.append(
                [_teacher_item(rollout_data["rollout_ids"][i], teachers[i]) for i in of_step if teachers[i] is not None]
            )
            at += number

    def before_step(self, iteration: int, step: int, models: Sequence[torch.nn.Module]) -> None:
        """With the weights of the update, before its first micro-batch."""
        self.settle()
        if step == 0 and self.checkpoints is not None and dist.get_rank() == 0:
            remove_outdated(self.checkpoints, self.cell.trainer.keep)
        self.teacher, self.weight = None, 0.0
        method = self.cell.method
        if self.schedule is None or not isinstance(method, Sdcc):
            return
        if self.memory is not None and step == 0:
            self.memory.begin(iteration, self.schedule)
        self.observed = torch.zeros(len(OBSERVED), dtype=torch.float64, device=_device(models))
        if method.ema is not None and self.average is None:
            self.average = MovingAverage(models, method.ema)
        self.weight = self.schedule.weight(iteration * len(self.teacher_rows) + step)
        if self.weight:
            trainer = self.cell.trainer
            with contextlib.nullcontext() if self.average is None else self.average.in_place():
                self.teacher = run_teacher(
                    models,
                    self.teacher_rows[step],
                    self.groups,
                    budget=trainer.batch_tokens,
                    multiple=trainer.parallel.multiple,
                )

    def settle(self) -> None:
        """What follows from an update once its weights are changed. Collective; does nothing the second time."""
        if self.observed is None or self.schedule is None:
            return
        dist.all_reduce(self.observed, group=self.groups.dp_cp)
        dist.all_reduce(self.observed, group=self.groups.pp)
        was_on = self.schedule.why_off is None
        self.schedule.observe(*self.observed.tolist())
        if was_on and self.schedule.why_off is not None and dist.get_rank() == 0:
            _log.warning("SDCC's KL is switched off for the rest of the run: %s", self.schedule.why_off)
        self.observed = None
        if self.average is not None:
            self.average.update()

    def loss(self, batch: Batch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a micro-batch: the sum over rollouts of the means over their trained tokens; sums with constant keys."""
        rows, trained = self.predictions(batch, logits)
        device = logits.device
        extra: Mapping[str, Tensor] = batch["multimodal_train_inputs"]

        def of(key: str) -> Tensor:
            return joined(batch[key], device)[trained.response]

        logged = of("rollout_log_probs")
        old = logged if batch.get("log_probs") is None else of("log_probs")
        reference = None if batch.get("ref_log_probs") is None else of("ref_log_probs")
        weight = extra["weight"].to(trained.weight)[trained.stream] if "weight" in extra else None
        targets = Targets(of("advantages"), trained.weight, old, reference, weight)
        places = extra["place"].to(device)[trained.stream].long()
        shard = Shard.of(self.architecture.vocabulary, rows.shape[1], self.groups.tp)
        leaves = self._leaves(extra, trained)
        loss, sums = update_loss(rows, trained.tokens, targets, logged, places, self.cell.objective, shard, leaves)
        if self.observed is not None:
            self.observed += torch.stack([sums[key].to(self.observed) for key in OBSERVED])
        return loss, sums

    def predictions(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Trained]:
        """[M, V/tp] logits of this rank in front of trained tokens, from [1, T, V/tp], and which tokens those are."""
        trained = trained_tokens(batch, Share.of(context_group(self.groups)), logits.device)
        return logits[0].index_select(0, trained.logits), trained

    def _leaves(self, extra: Mapping[str, Tensor], trained: Trained) -> Leaves | None:
        method = self.cell.method
        if self.teacher is None or not isinstance(method, Sdcc):
            return None
        leaf = extra["leaf"].to(trained.stream.device)[trained.stream]
        rows = (leaf >= 0).nonzero()[:, 0]
        rollout = extra["rollout"].to(rows.device)[trained.stream[rows]]
        numbers, which = torch.unique(rollout, return_inverse=True)
        starts = torch.tensor([self.teacher.places[number].start for number in numbers.tolist()], device=rows.device)
        hidden = self.teacher.hidden[starts[which] + leaf[rows]] if len(rows) else self.teacher.hidden[:0]
        return Leaves(rows, hidden, self.teacher.weight, self.weight, method.top_k)


def _teacher_item(rollout: int, teacher: Mapping[str, Any]) -> Item:
    tokens, parent, leaves = (np.asarray(teacher[key], dtype=np.int32) for key in ("tokens", "parent", "leaves"))
    untrained = np.zeros(len(tokens), dtype=np.bool_)
    unknown = np.full(len(tokens), np.nan, dtype=np.float32)
    index = np.arange(len(tokens), dtype=np.int32)
    row = Row(tokens, index, parent, index, untrained, unknown)  # positions follow from the parents
    return Item(row, rollout, leaves, np.zeros(0, dtype=np.int32))


def _device(models: Sequence[torch.nn.Module]) -> torch.device:
    return next(models[0].parameters()).device


_CURRENT: list[Training] = []


def open_training(args: Namespace, groups: ProcessGroupCollection, config: TransformerConfig) -> Training:
    """Begin the training of this process; hooks without arguments of their own find it by :func:`current`."""
    _CURRENT[:] = [Training.of(args, groups, config)]
    return _CURRENT[0]


def open_under_slime(args: Namespace) -> Training:
    """From the groups and arguments that Megatron has by then, in a process that slime has started."""
    from megatron.training.arguments import core_transformer_config_from_args

    check_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    training = open_training(args, groups, core_transformer_config_from_args(args))
    if args.save is not None:
        training.checkpoints = Path(args.save)
        training.memory = ScheduleMemory(Path(args.save).parent / NAME, writes=dist.get_rank() == 0)
    return training


def current() -> Training:
    if not _CURRENT:
        raise ConfigError(
            "no training has been opened in this process; under slime, --custom-megatron-init-path "
            "slime_plugin.hooks.train.init does that"
        )
    return _CURRENT[0]
