"""One update: from rollouts to gradients, under any method. An optimizer then applies them.

Rewards become credit over the whole batch; a replica computes only the rollouts that are dealt to it. SDCC's teacher
runs before its students, with the weights of the step, and only where a leaf diverges and its KL has a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Sdcc
from slime_plugin.config.parallel import Parallelism
from slime_plugin.megatron.batch import idle_batch, pack_within, student_items, teacher_items
from slime_plugin.megatron.diagnostics import add_sums
from slime_plugin.megatron.loss import SUM_KEYS, Distillation, TokenTable, UpdateLoss
from slime_plugin.megatron.objective import SdccSchedule
from slime_plugin.megatron.parallel import is_last_stage
from slime_plugin.megatron.step import run
from slime_plugin.megatron.teacher import MovingAverage, run_teacher
from slime_plugin.methods import Layout, assign_credit, lay_out
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory
from slime_plugin.tree.places import places_of


@dataclass(frozen=True, slots=True)
class Updates:
    """How updates of a run are computed on this rank."""

    models: Sequence[torch.nn.Module]
    """Wrapped for training: gradients end up in their ``main_grad``."""
    groups: ProcessGroupCollection
    parallel: Parallelism
    vocabulary: int
    cell: Cell
    batch_tokens: int
    """Per micro-batch; a larger row gets one of its own."""
    schedule: SdccSchedule | None
    """Of SDCC's KL; None for other methods."""
    average: MovingAverage | None
    """The teacher's weights, if they are not the current ones."""

    @classmethod
    def of(
        cls,
        models: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        parallel: Parallelism,
        cell: Cell,
        *,
        vocabulary: int,
        batch_tokens: int,
        steps: int,
    ) -> Updates:
        """``steps`` is the number of update steps of the whole run."""
        method = cell.method
        schedule = SdccSchedule(method, steps) if isinstance(method, Sdcc) else None
        average = MovingAverage(models, method.ema) if isinstance(method, Sdcc) and method.ema is not None else None
        return cls(models, groups, parallel, vocabulary, cell, batch_tokens, schedule, average)

    def gradients(
        self,
        records: Sequence[Record],
        mine: Sequence[int],
        step: int,
        *,
        old: TokenTable | None = None,
        reference: TokenTable | None = None,
    ) -> dict[str, float]:
        """Gradients of a batch, summed over all ranks, and the sums of its loss and diagnostics, the same on all ranks.

        Every replica gets all ``records``, because groups share their baseline, and trains those numbered ``mine``.
        """
        trajectories = [Trajectory.of(record) for record in records]
        layouts = [lay_out(trajectory, self.cell.method) for trajectory in trajectories]
        loss = UpdateLoss(
            self.cell.objective,
            assign_credit([record.meta for record in records], layouts, std=self.cell.std),
            TokenTable([places_of(trajectory) for trajectory in trajectories]),
            self.vocabulary,
            self.groups.tp,
            old=old,
            reference=reference,
            distillation=self._distillation(layouts, mine, step),
        )
        items = [item for item in student_items(layouts) if item.rollout in mine]
        batches = pack_within(items, self.batch_tokens, self.parallel.multiple) or [idle_batch(self.parallel.multiple)]
        results = run(self.models, batches, loss, self.groups, forward_only=False)
        sums = self._everywhere(add_sums(results))
        if self.schedule is not None:
            self.schedule.observe(sums["leaves"], sums["leaf_kl"], sums["entropy_gap"])
        return sums

    def applied(self) -> None:
        """After the optimizer has changed the weights."""
        if self.average is not None:
            self.average.update()

    def _distillation(self, layouts: Sequence[Layout], mine: Sequence[int], step: int) -> Distillation | None:
        method = self.cell.method
        weight = 0.0 if self.schedule is None else self.schedule.weight(step)
        if not weight or not isinstance(method, Sdcc):
            return None
        items = [item for item in teacher_items(layouts) if item.rollout in mine]
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            teacher = run_teacher(
                self.models, items, self.groups, budget=self.batch_tokens, multiple=self.parallel.multiple
            )
        return None if teacher is None else Distillation(weight, teacher, method.top_k)

    def _everywhere(self, sums: dict[str, float]) -> dict[str, float]:
        """From the last stage of every replica to all ranks."""
        device = next(self.models[0].parameters()).device
        vector = torch.zeros(len(SUM_KEYS), dtype=torch.float64, device=device)
        if is_last_stage(self.groups):
            vector += torch.tensor([sums[key] for key in SUM_KEYS], dtype=torch.float64, device=device)
        dist.all_reduce(vector, group=self.groups.dp_cp)
        dist.all_reduce(vector, group=self.groups.pp)
        return dict(zip(SUM_KEYS, vector.tolist(), strict=True))
