"""What is verified, and how exact it has to be. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.parallel import Parallelism
from slime_plugin.config.trainer import Dtype
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest differences that rounding explains. Those of tensors are relative, in the L2 norm."""

    attention: float
    attention_gradient: float
    rope: float
    """At positions below 1,000; see :meth:`Verification.rope_limit`."""
    statistics: float
    """Nats."""
    statistics_gradient: float
    divergence: float
    """Of SDCC's KL, relative: the teacher's logits are computed in the data type of the model."""
    head: float
    """Nats, a mean over tokens: logits are computed in the data type of the model."""
    logprob: float
    """Nats, a mean over tokens of recorded rollouts."""
    made_up: float
    """The same, of rollouts that no harness has made: their contexts are stranger and their tokens less likely."""
    loss: float
    gradient: float
    engine: float
    """Nats, a mean over tokens: two implementations of a model."""


LIMITS = {
    "float64": Limits(1e-12, 1e-12, 1e-5, 1e-10, 1e-10, 1e-10, 1e-10, 1e-5, 1e-5, 1e-5, 1e-4, 1e-5),
    "float32": Limits(2e-6, 1e-5, 1e-5, 1e-4, 1e-5, 1e-4, 1e-5, 1e-5, 1e-5, 1e-5, 1e-4, 1e-5),
    "bfloat16": Limits(5e-3, 1e-2, 5e-3, 1e-4, 1e-2, 5e-2, 5e-2, 1e-2, 3e-2, 1e-2, 1e-1, 2e-2),
}
"""By data type of the model. Statistics are float32 at least."""


@dataclass(frozen=True)
class Verification:
    """A cell on the device that will train it."""

    cell: Cell
    device: Device
    quick: bool = False
    records: Sequence[Record] = ()
    """Rollouts of the cell's model; some are made up if there are none."""
    seed: int = field(default=0, kw_only=True)

    @property
    def model(self) -> Path:
        """Return the folder of the model, if it is there."""
        model = self.cell.require_model()
        if not model.is_dir():
            raise ConfigError(f"model: there is no folder {model}; prepare it first (launch/prepare.sh says how)")
        return model

    @property
    def architecture(self) -> Architecture:
        return Architecture.read(self.model)

    @property
    def parallel(self) -> Parallelism:
        """Return the split of one replica: the others compute the same."""
        return self.cell.trainer.parallel

    @property
    def dtype(self) -> Dtype:
        return self.cell.trainer.dtype or ("bfloat16" if self.device == "cuda" else "float32")

    @property
    def limits(self) -> Limits:
        return LIMITS[self.dtype]

    @property
    def positions(self) -> int:
        """Return the number of positions that a live context may have."""
        return min(self.cell.rollout.context_tokens, self.architecture.max_positions)

    @property
    def rope_limit(self) -> float:
        """Angles are float32, whose rounding is a part of a turn that grows with the position."""
        return self.limits.rope * max(1.0, self.positions / 1000 if self.limits.rope < 1e-3 else 1.0)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def one_replica(self) -> Cell:
        """Return the cell with the ranks and the data type that are verified."""
        trainer = self.cell.trainer.model_copy(update={"dp": 1, "dtype": self.dtype})
        return self.cell.model_copy(update={"trainer": trainer})
