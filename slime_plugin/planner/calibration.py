"""Assumptions from measurements: the formulas of :mod:`.phases`, solved for what they assume.

A plan with these numbers gives the seconds that were measured, for what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugin.architecture import Architecture
from slime_plugin.config.trainer import Trainer
from slime_plugin.methods import Computed
from slime_plugin.planner.job import ASSUMPTIONS, Gpu
from slime_plugin.planner.memory import BF16
from slime_plugin.planner.phases import bubble, decoding_step, exchange_seconds, forward_flops, update_passes


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """An update of one replica, as a plan expects it."""

    model: Architecture
    trainer: Trainer
    gpu: Gpu
    rows: Computed
    """Sums over the rollouts of the update."""
    micro_batches: int

    @property
    def seconds(self) -> float:
        return (self._computing + self._exchange) * self._bubble

    def mfu(self, seconds: float) -> float | None:
        """Return ``Gpu.mfu`` that makes it take so long; None if exchanging hidden states alone is assumed to."""
        computing = seconds / self._bubble - self._exchange
        return self.gpu.mfu * self._computing / computing if computing > 0 else None

    @property
    def _computing(self) -> float:
        flops = update_passes(self.trainer) * forward_flops(self.model, self.rows.tokens, self.rows.pairs)
        flops += forward_flops(self.model, self.rows.teacher_tokens, self.rows.teacher_pairs)
        return flops / (self.trainer.parallel.ranks * self.gpu.flops * self.gpu.mfu)

    @property
    def _exchange(self) -> float:
        return exchange_seconds(self.model, self.trainer, self.gpu, self.rows.tokens, update_passes(self.trainer))

    @property
    def _bubble(self) -> float:
        return bubble(self.trainer, self.micro_batches)


def planned_decoding_step(model: Architecture, gpus: int, gpu: Gpu) -> float:
    """Return the seconds that a plan expects of a decoding step of one short rollout, which reads the weights."""
    return decoding_step(model, gpus, gpu, ASSUMPTIONS, BF16 * model.parameters / gpus)


def step_seconds(model: Architecture, gpus: int, gpu: Gpu, seconds: float) -> float:
    """Return ``Assumptions.step_seconds`` that makes such a step take so long; 0 if reading alone is assumed longer."""
    return max(0.0, seconds - planned_decoding_step(model, gpus, gpu) + ASSUMPTIONS.step_seconds)
