"""State of a training process between slime's hooks: model, loss, and SDCC's teacher if the method has one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError
from slime_plugin.methods import Method, TrainedTokens, method_of
from slime_plugin.methods.base import OWN_COLUMN
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.distiller import SCHEDULE_FILE, Distiller, ScheduleFile
from slime_plugin.slime.packed_batch import ContextPart, PackedBatch, TrainedIndices, joined, trained_tokens
from slime_plugin.slime.packed_model import PackedTreeModel
from slime_plugin.slime.refusals import check_args
from slime_plugin.slime.retention import remove_outdated
from slime_plugin.train.loss import Targets, update_loss
from slime_plugin.train.process_groups import context_group
from slime_plugin.train.tree_model import build_model
from slime_plugin.train.vocabulary import Shard, forward_kl, token_statistics


@dataclass
class Training:
    """The state of a training process between hooks."""

    cell: Cell
    method: Method[Any]
    groups: ProcessGroupCollection
    architecture: Architecture
    config: TransformerConfig
    distiller: Distiller | None
    """None for a method without a teacher."""
    checkpoints: Path | None = None
    """Folder of slime's checkpoints, of which old ones are removed."""

    @classmethod
    def of(cls, args: Namespace, groups: ProcessGroupCollection, config: TransformerConfig) -> Training:
        cell = cell_of(args)
        method = method_of(cell.method)
        settings = method.distillation
        distiller = None if settings is None else Distiller.of(settings, cell.trainer, groups)
        return cls(cell, method, groups, Architecture.read(cell.require_model()), config, distiller)

    def model(
        self, pre_process: bool, post_process: bool, vp_stage: int | None, backend: str | None = None
    ) -> PackedTreeModel:
        """Build the part of the model on a pipeline stage, without weights."""
        model = build_model(
            self.config,
            self.groups,
            self.architecture,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            backend=backend,
            kind=PackedTreeModel,
        )
        model.context = context_group(self.groups)
        return model

    def on_batch(self, rollout_data: dict[str, Any]) -> None:
        """Call before the first step of a batch. Removes the teacher rows, which slime cannot log."""
        teachers = rollout_data.pop("prompt", None)
        if self.distiller is not None:
            self.distiller.on_batch(rollout_data, teachers or [None] * len(rollout_data["rollout_ids"]))

    def before_step(self, iteration: int, step: int, models: Sequence[torch.nn.Module]) -> None:
        """Call with the weights of the step, before its first micro-batch."""
        self.after_step()
        if step == 0 and self.checkpoints is not None and dist.get_rank() == 0:
            remove_outdated(self.checkpoints, self.cell.trainer.keep)
        if self.distiller is not None:
            self.distiller.before_step(iteration, step, models)

    def after_step(self) -> None:
        """Call once the weights have changed. Collective; a second call does nothing."""
        if self.distiller is not None:
            self.distiller.after_step()

    def loss(self, batch: PackedBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum over rollouts of the mean loss of their trained tokens in a micro-batch, and ``SUM_KEYS``."""
        rows, trained = self._predictions(batch, logits)
        inputs: Mapping[str, Tensor] = batch["multimodal_train_inputs"]

        def of(key: str) -> Tensor:
            return joined(batch[key], logits.device)[trained.response]

        logged = of("rollout_log_probs")
        old = logged if batch.get("log_probs") is None else of("log_probs")
        reference = None if batch.get("ref_log_probs") is None else of("ref_log_probs")
        advantage = of("advantages")
        weight = inputs["weight"].to(trained.share)[trained.stream] if "weight" in inputs else None
        columns = {
            key.removeprefix(OWN_COLUMN): column.to(logits.device)[trained.stream]
            for key, column in inputs.items()
            if key.startswith(OWN_COLUMN)
        }
        factors = self.method.token_factors(TrainedTokens(logged, old, advantage, columns))
        if factors is not None:
            weight = factors.to(trained.share) if weight is None else weight * factors
        targets = Targets(advantage, trained.share, old, reference, weight)
        places = inputs["place"].to(logits.device)[trained.stream].long()
        leaves = None if self.distiller is None else self.distiller.leaves(inputs, trained)
        objective, shard = self.cell.objective, self._shard(rows)
        loss, sums = update_loss(rows, trained.tokens, targets, logged, places, objective, shard, leaves)
        if self.distiller is not None:
            self.distiller.observe(sums)
        return loss, sums

    def logprobs(self, batch: PackedBatch, logits: Tensor) -> tuple[Tensor, TrainedIndices]:
        """Return [M] log-probabilities of the trained tokens that this rank's logits predict."""
        rows, trained = self._predictions(batch, logits)
        return token_statistics(rows, trained.tokens, self._shard(rows))[0], trained

    def leaf_kl(self, batch: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return [d] indices in the stream of the diverging leaves that this rank's logits predict, and [d]
        KL(teacher || student), with the teacher's states of the current step."""
        rows, trained = self._predictions(batch, logits)
        leaves = None
        if self.distiller is not None:
            leaves = self.distiller.leaves(batch["multimodal_train_inputs"], trained)
        if leaves is None or not len(leaves.rows):
            return trained.stream[:0], logits.new_zeros(0)
        found = forward_kl(
            rows[leaves.rows], leaves.hidden, leaves.output_weight, self._shard(rows), top_k=leaves.top_k
        )
        return trained.stream[leaves.rows], found.kl

    @property
    def context_part(self) -> ContextPart:
        """Which tokens of a row are this rank's."""
        return ContextPart.of(context_group(self.groups))

    def _predictions(self, batch: PackedBatch, logits: Tensor) -> tuple[Tensor, TrainedIndices]:
        """Select [M, V/tp] logits in front of trained tokens from this rank's [1, T, V/tp]."""
        trained = trained_tokens(batch, self.context_part, logits)
        return logits[0].index_select(0, trained.logits), trained

    def _shard(self, rows: Tensor) -> Shard:
        return Shard.of(self.architecture.vocabulary, rows.shape[1], self.groups.tp)


_current: Training | None = None


def open_training(args: Namespace, groups: ProcessGroupCollection, config: TransformerConfig) -> Training:
    """Set the training of this process; hooks find it with :func:`current`."""
    global _current  # noqa: PLW0603  # slime calls functions, and a process trains one model
    _current = Training.of(args, groups, config)
    return _current


def open_under_slime(args: Namespace) -> Training:
    """Open the training with Megatron's groups and arguments, in a process that slime has started."""
    from megatron.training.arguments import core_transformer_config_from_args

    check_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    training = open_training(args, groups, core_transformer_config_from_args(args))
    if args.save is not None:
        training.checkpoints = Path(args.save)
        if training.distiller is not None:
            path = Path(args.save).parent / SCHEDULE_FILE
            training.distiller.schedule_file = ScheduleFile(path, writes=dist.get_rank() == 0)
    return training


def current() -> Training:
    if _current is None:
        raise ConfigError(
            "no training has been opened in this process; under slime, set "
            "--custom-megatron-init-path to slime_plugin.hooks.train.init"
        )
    return _current
