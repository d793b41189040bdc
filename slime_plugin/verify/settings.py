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
    """Without what grows with the position (:attr:`Verification.rope_limit`)."""
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
    ratio: float
    """Of a policy to itself: a pass without gradient and one with it."""
    reference_kl: float
    """Nats, of a policy to itself."""


LIMITS = {
    "float64": Limits(
        attention=1e-12, attention_gradient=1e-12, rope=1e-5, statistics=1e-10, statistics_gradient=1e-10,
        divergence=1e-10, head=1e-10, logprob=1e-5, made_up=1e-5, loss=1e-5, gradient=1e-4, engine=1e-5, ratio=1e-4,
        reference_kl=1e-6,
    ),
    "float32": Limits(
        attention=2e-6, attention_gradient=1e-5, rope=1e-5, statistics=1e-4, statistics_gradient=1e-5,
        divergence=1e-4, head=1e-5, logprob=1e-5, made_up=1e-5, loss=1e-5, gradient=1e-4, engine=1e-5, ratio=1e-4,
        reference_kl=1e-6,
    ),
    "bfloat16": Limits(
        attention=5e-3, attention_gradient=1e-2, rope=5e-3, statistics=1e-4, statistics_gradient=1e-2,
        divergence=5e-2, head=5e-2, logprob=1e-2, made_up=3e-2, loss=1e-2, gradient=1e-1, engine=4e-2, ratio=1e-2,
        reference_kl=1e-3,
    ),
}  # fmt: skip
"""By data type of the model. Statistics are float32 at least."""

ANGLE_ROUNDING = 1e-8
"""Of a turn by one radian in float32, as a root mean square over the frequencies of a head."""


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
        """Return the split of one replica: the others compute the same. Virtual stages are joined, because rollouts are
        scored without them."""
        return self.one_replica().trainer.parallel

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
        """Return the limit of RoPE: angles are float32 whatever the model is, and their rounding grows with them."""
        return self.limits.rope + ANGLE_ROUNDING * self.positions

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def one_replica(self) -> Cell:
        """Return the cell with the ranks and the data type that are verified."""
        trainer = self.cell.trainer.model_copy(update={"dp": 1, "vpp": 1, "dtype": self.dtype})
        return self.cell.model_copy(update={"trainer": trainer})
