"""A training process. Every method is collective: all ranks get the same call at the same time."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.architecture import Architecture
from slime_plugin.hooks import train as hooks
from slime_plugin.local.actors import StepResult, TrainResult, redirect
from slime_plugin.local.checkpoint import load_state, rng_state, save_state, set_rng_state, writing
from slime_plugin.local.optimizer import Optimizer
from slime_plugin.local.passes import Passes, RolloutData
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.packed_model import PackedTreeModel
from slime_plugin.slime.training import open_training
from slime_plugin.train.hf_weights import load_weights, save_weights
from slime_plugin.train.logdiff import add_sums, logdiff_sums
from slime_plugin.train.loss import SUM_KEYS
from slime_plugin.train.pipeline import wrap_for_training
from slime_plugin.train.process_groups import (
    is_first_stage,
    is_last_stage,
    start_groups,
    sum_over_ranks,
)
from slime_plugin.train.ranks import join_world
from slime_plugin.train.snapshot import MovingAverage, Snapshot
from slime_plugin.train.transformer_config import torch_dtype, transformer_config

if TYPE_CHECKING:  # or it would be imported, and warn, before slime_plugin.train keeps it quiet
    from megatron.core.process_groups_config import ProcessGroupCollection


class Rank:
    """A rank in an initialised torch.distributed world."""

    def __init__(self, args: Namespace, *, updates: bool = True) -> None:
        """Without ``updates`` the rank can only score: it has no gradient buffers, optimizer or reference."""
        cell = cell_of(args)
        model, trainer = cell.require_model(), cell.trainer
        self.groups = start_groups(trainer.parallel)
        torch.manual_seed(trainer.seed)  # a user's own hook may draw random numbers
        self._architecture, dtype = Architecture.read(model), torch_dtype(trainer.dtype)
        self._config = transformer_config(self._architecture, trainer.parallel, dtype, recompute=trainer.recompute)
        open_training(args, self.groups, self._config)
        models = provided_models(self.groups, trainer.vpp)
        load_weights(models, self._architecture, model, self.groups)
        self.models: list[torch.nn.Module] = [*models]
        if updates:
            self.models = wrap_for_training(models[0].config, models, self.groups)
            self._reference = Snapshot(self.models) if cell.objective.kl else None
            self._optimizer = Optimizer(self.models, trainer)
        self.configure(args)

    def configure(self, args: Namespace) -> None:
        """Train or score with these arguments from now on, with the same model."""
        self._args = args
        self.training = open_training(args, self.groups, self._config)
        self.passes = Passes(args, self.training, self.models)

    def open_average(self) -> None:
        """Copy the weights for a teacher that is their moving average, where there is one."""
        if self.training.distiller is not None:
            self.training.distiller.open_average(self.models)

    def load_weights(self, model: Path) -> None:
        """Load another checkpoint of the same shape."""
        load_weights(self.models, self._architecture, model, self.groups)

    def replica(self) -> int:
        """Return the index of this rank's part of a batch."""
        return int(self.groups.dp.rank())

    def train(self, iteration: int, data: RolloutData) -> TrainResult:
        """Run all updates of an iteration, in slime's order of calls."""
        clock = _Clock()
        data["rollout_log_probs"] = [  # as in slime, a context-parallel rank keeps what its logits predict
            logged[own] for logged, own in zip(data["rollout_log_probs"], self._own(data), strict=True)
        ]
        if self._reference is not None:
            with self._reference.in_place():
                data["ref_log_probs"] = self.passes.logprobs(data)
        clock.lap("reference")
        data["log_probs"] = self.passes.logprobs(data)
        clock.lap("old")
        data["advantages"] = [
            torch.full((len(logged),), reward)
            for logged, reward in zip(data["rollout_log_probs"], data["rewards"], strict=True)
        ]
        hooks.rollout_data_postprocess(self._args, iteration, data)
        steps = [self._step(iteration, step, data) for step in range(len(data["num_microbatches"]))]
        self.training.after_step()
        clock.lap("train")
        return TrainResult(steps, self._logdiff(data) if self.has_tokens else None, clock.laps)

    @property
    def has_tokens(self) -> bool:
        """Whether this is one of the ranks that together have every token once: those of each last stage, without
        tensor-parallel copies."""
        return is_last_stage(self.groups) and self.groups.tp.rank() == 0

    def _own(self, data: RolloutData) -> Iterator[Tensor]:
        """Yield for each row which of its response tokens are this rank's."""
        part = self.training.context_part
        for length, response in zip(data["total_lengths"], data["response_lengths"], strict=True):
            yield torch.from_numpy(part.predicted(length, response)[1]).long()

    def _logdiff(self, data: RolloutData) -> dict[str, float]:
        """Return sums before the first update, and the maximum."""
        rows = zip(data["loss_masks"], data["multimodal_train_inputs"], self._own(data), strict=True)
        own = [(mask[tokens], inputs["place"][-len(mask) :][tokens]) for mask, inputs, tokens in rows]
        masks = torch.cat([mask for mask, _ in own]).bool()
        places = torch.cat([place for _, place in own])[masks]
        trainer = torch.cat(data["log_probs"]).cpu()[masks]
        logged = torch.cat(data["rollout_log_probs"])[masks]
        largest = float((trainer - logged).abs().max()) if len(trainer) else 0.0
        return {**{key: float(value) for key, value in logdiff_sums(trainer, logged, places).items()}, "max": largest}

    def _step(self, iteration: int, step: int, data: RolloutData) -> StepResult:
        optimizer, distiller = self._optimizer, self.training.distiller
        for model in self.models:
            model.zero_grad_buffer()  # type: ignore[operator]  # Megatron's wrapper
        optimizer.optimizer.zero_grad()
        hooks.before_train_step(self._args, iteration, step, self.models, optimizer.optimizer, optimizer.scheduler)
        rate = optimizer.rate
        sums = reduced_sums(self.passes.update(data, step), self.groups)
        return StepResult(
            sums=sums,
            rollouts=data["global_batch_sizes"][step],
            grad_norm=optimizer.apply(),
            lr=rate,
            sdcc_weight=0.0 if distiller is None else distiller.coefficient,
            sdcc_off=None if distiller is None else distiller.schedule.off_reason,
        )

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, without configuration and tokenizer."""
        with writing(folder):
            save_weights(self.models, self._architecture, folder, self.groups)
        dist.barrier()

    def save(self, folder: Path) -> None:
        """Write the state that training resumes from."""
        distiller = self.training.distiller
        average = None if distiller is None else distiller.average
        save_state(
            {
                "model": [dict(model.named_parameters()) for model in self.models],
                "optimizer": self._optimizer.optimizer.state_dict(),
                "scheduler": self._optimizer.scheduler.state_dict(),
                "sdcc": None if distiller is None else distiller.schedule.state(),
                "average": None if average is None else average.weights,
                "rng": rng_state(),
            },
            folder,
            dist.get_rank(),
        )

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote. The reference stays the model that the run began with."""
        state = load_state(folder, dist.get_rank())
        with torch.no_grad():
            for model, tensors in zip(self.models, state["model"], strict=True):
                for name, parameter in model.named_parameters():
                    parameter.copy_(tensors[name])
        self._optimizer.optimizer.load_state_dict(state["optimizer"])
        self._optimizer.scheduler.load_state_dict(state["scheduler"])
        distiller = self.training.distiller
        if distiller is not None:
            distiller.schedule.restore(state["sdcc"])
            if state["average"] is not None:
                distiller.average = MovingAverage(self.models, distiller.settings.ema or 0.0)
                distiller.average.weights = state["average"]
        set_rng_state(state["rng"])


def reduced_sums(parts: Sequence[Mapping[str, Tensor]], groups: ProcessGroupCollection) -> dict[str, float]:
    """Add up ``SUM_KEYS`` over micro-batches and ranks; only last stages have some."""
    sums = add_sums(parts)
    vector = torch.tensor([sums[key] if sums else 0.0 for key in SUM_KEYS], dtype=torch.float64)
    if torch.cuda.is_available():
        vector = vector.cuda()
    return dict(zip(SUM_KEYS, sum_over_ranks(vector, groups).tolist(), strict=True))


def provided_models(groups: ProcessGroupCollection, virtual: int = 1) -> list[PackedTreeModel]:
    """Build the model by the provider: one part, or one for each virtual stage."""
    if virtual == 1:
        return [hooks.model_provider(is_first_stage(groups), is_last_stage(groups))]
    return [
        hooks.model_provider(
            is_first_stage(groups) and stage == 0, is_last_stage(groups) and stage == virtual - 1, vp_stage=stage
        )
        for stage in range(virtual)
    ]


class RankActor(Rank):
    """A rank as a Ray actor. :class:`Rank` is initialised in :meth:`start`, when the world exists."""

    def __init__(self, settings: dict[str, Any], rank: int, log: Path) -> None:
        redirect(log)
        self._settings, self._number = settings, rank

    def pid(self) -> int:
        return os.getpid()

    def start(self, rendezvous: Path, world: int) -> int:
        """Join the other ranks by the same file, and load the model. Return the replica of this rank."""
        join_world(rendezvous, self._number, world, device=0)  # Ray shows each rank one GPU
        super().__init__(Namespace(**self._settings))
        return self.replica()

    def train_part(self, iteration: int, part: list[Any]) -> TrainResult:
        """Train on this replica's part of the batch. ``part`` holds Ray's reference to it."""
        import ray  # only the actor needs it

        started = time.perf_counter()
        data = dict(ray.get(part[0]))
        transfer_s = time.perf_counter() - started
        result = self.train(iteration, data)
        result.seconds["transfer"] = transfer_s
        return result


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
