"""SDCC between slime's hooks: the teacher rows of a batch, and of a step the teacher's states and the KL's coefficient.

:class:`Distiller` decides when the teacher of :mod:`slime_plugin.train.distillation` runs. slime has no hook after an
update, so what follows from one (guard rails, moving average) happens before the next step.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from slime_plugin.config.method import Distillation
from slime_plugin.config.trainer import Trainer
from slime_plugin.slime.packed_batch import TrainedIndices
from slime_plugin.train.distillation import SdccSchedule, TeacherRow, TeacherStates, run_teacher
from slime_plugin.train.loss import Leaves
from slime_plugin.train.process_groups import sum_over_ranks
from slime_plugin.train.snapshot import MovingAverage

_log = logging.getLogger(__name__)
OBSERVED = ("leaves", "leaf_kl", "entropy_gap")
"""Sums of a step that the guard rails read."""
SCHEDULE_FILE = "sdcc.jsonl"


@dataclass
class ScheduleFile:
    """Persists SDCC's schedule across restarts of a slime job, whose checkpoints hold nothing of a plugin.

    The state at the start of each iteration is a line. A resumed job restores the line of its first iteration: guard
    rails that switched the KL off keep it off, and the ramp continues. Every rank reads the file, one writes it.
    """

    path: Path
    writes: bool
    restored: bool = False
    """Whether it has been read in this process."""

    def begin(self, iteration: int, schedule: SdccSchedule) -> None:
        """Call before the first step of an iteration."""
        if not self.restored:
            self.restored = True
            found = self._read(iteration)
            if found is not None:
                schedule.restore(found)
        if self.writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                cut_off = file.tell() > 0 and not self.path.read_bytes().endswith(b"\n")
                file.write("\n" * cut_off + json.dumps({"iteration": iteration, **schedule.state()}) + "\n")

    def _read(self, iteration: int) -> dict[str, Any] | None:
        """Return the last line of that iteration, or of the last one before it: an interrupted iteration is repeated,
        and a job may have ended between two. Incomplete lines are skipped."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        states = []
        for line in lines:
            with contextlib.suppress(ValueError):
                states.append(json.loads(line))
        before = [state for state in states if state["iteration"] <= iteration]
        return max(reversed(before), key=lambda state: int(state["iteration"]), default=None)


@dataclass
class Distiller:
    """The teacher in one training process. Order of calls: on_batch, then per step before_step, leaves and observe of
    its micro-batches, after_step."""

    settings: Distillation
    trainer: Trainer
    groups: ProcessGroupCollection
    schedule: SdccSchedule
    schedule_file: ScheduleFile | None = None
    """Under slime; a local run persists the schedule in its checkpoints."""
    average: MovingAverage | None = None
    """The teacher's weights, if they are not the current ones."""
    coefficient: float = 0.0
    """Coefficient of the KL in the current step."""
    states: TeacherStates | None = None
    """States of the current step, on the last stage."""
    rows: list[list[TeacherRow]] = field(default_factory=list)
    """Teacher rows of the current batch, per step."""
    observed: Tensor | None = None
    """[3] sums of the step that after_step has not processed yet."""

    @classmethod
    def of(cls, settings: Distillation, trainer: Trainer, groups: ProcessGroupCollection) -> Distiller:
        return cls(settings, trainer, groups, SdccSchedule(settings, trainer.total_steps))

    def on_batch(self, rollout_data: Mapping[str, Any], teachers: Sequence[Mapping[str, Any] | None]) -> None:
        """Sort the teacher rows of a batch into its steps."""
        self.rows, begin = [], 0
        for number in rollout_data["num_microbatches"]:
            of_step = [i for batch in rollout_data["micro_batch_indices"][begin : begin + number] for i in batch]
            rollouts = rollout_data["rollout_ids"]
            self.rows.append([TeacherRow.of(rollouts[i], row) for i in of_step if (row := teachers[i]) is not None])
            begin += number

    def before_step(self, iteration: int, step: int, models: Sequence[torch.nn.Module]) -> None:
        """Set the coefficient and run the teacher, with exactly the weights of the step."""
        self.states = None
        if self.schedule_file is not None and step == 0:
            self.schedule_file.begin(iteration, self.schedule)
        device = next(models[0].parameters()).device
        self.observed = torch.zeros(len(OBSERVED), dtype=torch.float64, device=device)
        self.open_average(models)
        self.coefficient = self.schedule.coefficient(iteration * len(self.rows) + step)
        if self.coefficient:
            self.run_teacher(step, models)

    def open_average(self, models: Sequence[torch.nn.Module]) -> None:
        """Begin the moving average with these weights, if there is to be one and there is none."""
        if self.settings.ema is not None and self.average is None:
            self.average = MovingAverage(models, self.settings.ema)

    def run_teacher(self, step: int, models: Sequence[torch.nn.Module]) -> None:
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            self.states = run_teacher(
                models,
                self.rows[step],
                self.groups,
                batch_tokens=self.trainer.batch_tokens,
                multiple=self.trainer.parallel.multiple,
            )

    def leaves(self, inputs: Mapping[str, Tensor], trained: TrainedIndices) -> Leaves | None:
        """Return the diverging leaves among the trained tokens of a micro-batch."""
        if self.states is None:
            return None
        leaf = inputs["leaf"].to(trained.stream.device)[trained.stream]
        rows = (leaf >= 0).nonzero()[:, 0]
        rollout = inputs["rollout"].to(rows.device)[trained.stream[rows]]
        hidden = self.states.at(rollout, leaf[rows])
        return Leaves(rows, hidden, self.states.output_weight, self.coefficient, self.settings.top_k)

    def observe(self, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of a micro-batch."""
        if self.observed is not None:
            self.observed += torch.stack([sums[key].to(self.observed) for key in OBSERVED])

    def after_step(self) -> None:
        """Apply guard rails and moving average to the last update. Collective; a second call does nothing."""
        if self.observed is None:
            return
        was_on = self.schedule.off_reason is None
        self.schedule.observe(*sum_over_ranks(self.observed, self.groups).tolist())
        if was_on and self.schedule.off_reason is not None and dist.get_rank() == 0:
            _log.warning("SDCC's KL is switched off for the rest of the run: %s", self.schedule.off_reason)
        self.observed = None
        if self.average is not None:
            self.average.update()
