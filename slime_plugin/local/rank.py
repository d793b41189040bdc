"""One process of the trainer. Every method is collective: all ranks are asked the same thing at the same time."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from slime_plugin.config.architecture import Architecture
from slime_plugin.hooks import train as hooks
from slime_plugin.local.checkpoint import load_state, rng_state, save_state, set_rng_state, writing
from slime_plugin.local.optimizer import Optimizer
from slime_plugin.local.passes import Passes, RolloutData
from slime_plugin.megatron.architecture import transformer_config
from slime_plugin.megatron.diagnostics import add_sums, drift_sums
from slime_plugin.megatron.loss import SUM_KEYS
from slime_plugin.megatron.model import TreeGPTModel
from slime_plugin.megatron.parallel import context_group, is_first_stage, is_last_stage, start_groups
from slime_plugin.megatron.score import DTYPES
from slime_plugin.megatron.step import wrap_for_training
from slime_plugin.megatron.teacher import MovingAverage, Snapshot
from slime_plugin.megatron.weights import load_weights, save_weights
from slime_plugin.seam.args import cell_of
from slime_plugin.seam.packed import Share
from slime_plugin.seam.training import open_training


class Rank:
    """In an initialised torch.distributed world."""

    def __init__(self, args: Namespace) -> None:
        cell = cell_of(args)
        assert cell.model is not None  # or there is nothing to train
        self._args = args
        self._cell, self._trainer = cell, cell.trainer
        self._groups = start_groups(self._trainer.parallel)
        torch.manual_seed(self._trainer.seed)  # nothing is drawn here yet; a user's own hook may
        dtype = DTYPES[self._trainer.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")]
        self._training = open_training(
            args,
            self._groups,
            transformer_config(
                Architecture.read(cell.model), self._trainer.parallel, dtype, recompute=self._trainer.recompute
            ),
        )
        models = provided_models(self._groups, self._trainer.vpp)
        load_weights(models, self._training.architecture, cell.model, self._groups)
        self._models = wrap_for_training(models[0].config, models, self._groups)
        self._reference = Snapshot(self._models) if cell.objective.kl else None
        self._optimizer = Optimizer(self._models, self._trainer, self._groups)
        self._passes = Passes(args, self._training, self._models)

    def replica(self) -> int:
        """Which part of a batch is this rank's."""
        return int(self._groups.dp.rank())

    def train(self, iteration: int, data: RolloutData) -> dict[str, Any]:
        """All updates of an iteration, in slime's order of calls.

        ``steps`` has the sums and the gradient norm of every update, ``drift`` the sums before the first one, both on
        those ranks of each replica's last stage that add up (``tells``), and ``seconds`` what took how long.
        """
        clock = _Clock()
        self._keep_own_share(data)
        if self._reference is not None:
            with self._reference.in_place():
                data["ref_log_probs"] = self._passes.logprobs(data)
        clock.lap("reference")
        data["log_probs"] = self._passes.logprobs(data)
        clock.lap("old")
        data["advantages"] = [
            torch.full((len(logged),), reward)
            for logged, reward in zip(data["rollout_log_probs"], data["rewards"], strict=True)
        ]
        hooks.rollout_data_postprocess(self._args, iteration, data)
        steps = [self._step(iteration, step, data) for step in range(len(data["num_microbatches"]))]
        self._training.settle()
        clock.lap("train")
        groups = self._groups
        tells = is_last_stage(groups) and groups.tp.rank() == 0
        return {
            "tells": tells,
            "steps": steps,
            "drift": self._drift(data) if tells else None,
            "seconds": clock.laps,
        }

    def _keep_own_share(self, data: RolloutData) -> None:
        """Of what was logged per response token, a context-parallel rank keeps what its logits predict, as in slime."""
        data["rollout_log_probs"] = [
            logged[own] for logged, own in zip(data["rollout_log_probs"], self._own(data), strict=True)
        ]

    def _own(self, data: RolloutData) -> Iterator[Tensor]:
        """For each row, which of its response tokens are this rank's."""
        share = Share.of(context_group(self._groups))
        for length, response in zip(data["total_lengths"], data["response_lengths"], strict=True):
            yield torch.from_numpy(share.predicted(length, response)[1]).long()

    def _drift(self, data: RolloutData) -> dict[str, float]:
        """How far the trainer was from the rollout before the first update: sums, and the largest distance."""
        rows = zip(data["loss_masks"], data["multimodal_train_inputs"], self._own(data), strict=True)
        own = [(mask[tokens], inputs["place"][-len(mask) :][tokens]) for mask, inputs, tokens in rows]
        masks = torch.cat([mask for mask, _ in own]).bool()
        places = torch.cat([place for _, place in own])[masks]
        trained = torch.cat(data["log_probs"]).cpu()[masks]
        rolled_out = torch.cat(data["rollout_log_probs"])[masks]
        sums: dict[str, Tensor] = drift_sums(trained, rolled_out, places)
        largest = float((trained - rolled_out).abs().max()) if len(trained) else 0.0
        return {**{key: float(value) for key, value in sums.items()}, "max": largest}

    def _step(self, iteration: int, step: int, data: RolloutData) -> dict[str, Any]:
        for model in self._models:
            model.zero_grad_buffer()  # type: ignore[operator]  # Megatron's wrapper
        self._optimizer.optimizer.zero_grad()
        hooks.before_train_step(
            self._args, iteration, step, self._models, self._optimizer.optimizer, self._optimizer.scheduler
        )
        rate, weight = self._optimizer.rate, self._training.weight
        sums = self._everywhere(add_sums(self._passes.update(data, step)))
        schedule = self._training.schedule
        return {
            "sums": sums,
            "rollouts": data["global_batch_sizes"][step],
            "grad_norm": self._optimizer.apply(),
            "lr": rate,
            "sdcc_weight": weight,
            "sdcc_off": None if schedule is None else schedule.why_off,
        }

    def _everywhere(self, sums: dict[str, float]) -> dict[str, float]:
        """From the last stage of every replica to all ranks."""
        vector = torch.zeros(len(SUM_KEYS), dtype=torch.float64, device=next(self._models[0].parameters()).device)
        if sums:
            vector += torch.tensor([sums[key] for key in SUM_KEYS], dtype=torch.float64, device=vector.device)
        dist.all_reduce(vector, group=self._groups.dp_cp)
        dist.all_reduce(vector, group=self._groups.pp)
        return dict(zip(SUM_KEYS, vector.tolist(), strict=True))

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, without what belongs beside them."""
        with writing(folder):
            save_weights(self._models, self._training.architecture, folder, self._groups)
        dist.barrier()

    def save(self, folder: Path) -> None:
        """Everything that training goes on from."""
        training = self._training
        save_state(
            {
                "model": [dict(model.named_parameters()) for model in self._models],
                "optimizer": self._optimizer.optimizer.state_dict(),
                "scheduler": self._optimizer.scheduler.state_dict(),
                "sdcc": None if training.schedule is None else training.schedule.state(),
                "average": None if training.average is None else training.average.weights,
                "rng": rng_state(),
            },
            folder,
            dist.get_rank(),
        )

    def load(self, folder: Path) -> None:
        """What :meth:`save` wrote. The reference stays what it is: the model that the run was begun with."""
        state = load_state(folder, dist.get_rank())
        with torch.no_grad():
            for model, tensors in zip(self._models, state["model"], strict=True):
                for name, parameter in model.named_parameters():
                    parameter.copy_(tensors[name])
        self._optimizer.optimizer.load_state_dict(state["optimizer"])
        self._optimizer.scheduler.load_state_dict(state["scheduler"])
        if self._training.schedule is not None:
            self._training.schedule.restore(state["sdcc"])
        if state["average"] is not None:
            assert self._training.schedule is not None
            self._training.average = MovingAverage(self._models, self._training.schedule.config.ema or 0.0)
            self._training.average.weights = state["average"]
        set_rng_state(state["rng"])


def provided_models(groups: ProcessGroupCollection, virtual: int = 1) -> list[TreeGPTModel]:
    """What the model provider gives a rank: one model, or one for each of its virtual stages."""
    if virtual == 1:
        return [hooks.model_provider(is_first_stage(groups), is_last_stage(groups))]
    return [
        hooks.model_provider(
            is_first_stage(groups) and stage == 0, is_last_stage(groups) and stage == virtual - 1, vp_stage=stage
        )
        for stage in range(virtual)
    ]


class RankActor:
    """A rank as a Ray actor."""

    def __init__(self, settings: dict[str, Any], rank: int, log: str) -> None:
        redirect(Path(log))
        self._args, self._number = Namespace(**settings), rank
        self._rank: Rank | None = None

    def pid(self) -> int:
        return os.getpid()

    def start(self, meeting: str, world: int) -> int:
        """Join the others, who know the same file, and load the model. Which replica this is."""
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray shows each rank its own
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=self._number, world_size=world)
        self._rank = Rank(self._args)
        return self._rank.replica()

    def train(self, iteration: int, boxed: list[Any]) -> dict[str, Any]:
        """``boxed`` has the reference to this replica's part of the batch, so that fetching it can be timed."""
        import ray  # only the actor needs it

        begun = time.perf_counter()
        data = dict(ray.get(boxed[0]))
        fetched = time.perf_counter() - begun
        result = self._ready.train(iteration, data)
        result["seconds"]["transfer"] = fetched
        return result

    def export(self, folder: str) -> None:
        self._ready.export(Path(folder))

    def save(self, folder: str) -> None:
        self._ready.save(Path(folder))

    def load(self, folder: str) -> None:
        self._ready.load(Path(folder))

    @property
    def _ready(self) -> Rank:
        assert self._rank is not None  # started first
        return self._rank


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def redirect(log: Path) -> None:
    """What this process says goes into a file from now on."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
