"""Optimisation and parallelism: the ``trainer:`` block of a configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from slime_plugin.config.frozen import Frozen
from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import ConfigError

Dtype = Literal["float32", "float64", "bfloat16"]


class Trainer(Frozen):
    """GRPO with the paper's settings: 4 prompts of 16 rollouts each, trained in 8 steps of 8."""

    iterations: int = Field(default=200, ge=1)
    """Iterations of sampling rollouts and training on them."""
    prompts: int = Field(default=4, ge=1)
    """Questions per iteration, with ``rollout.samples`` rollouts each."""
    steps: int = Field(default=8, ge=1)
    """Update steps per iteration, each on an equal share of its rollouts."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the order of questions."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    lr_warmup: int = Field(default=0, ge=0)
    """Update steps over which the learning rate ramps up from 0; it is constant afterwards."""
    betas: tuple[float, float] = Field(default=(0.9, 0.98), strict=False)  # YAML has lists
    """Adam's decay of the first and the second moment, each at least 0 and less than 1."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of Adam, as a multiple of the learning rate."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm. 0: no clipping."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    vpp: int = Field(default=1, ge=1)
    """Virtual stages of each pipeline stage: shorter stages, interleaved, so that ranks wait less."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel ranks."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas."""
    sp: bool = False
    """Sequence parallelism, within the tensor-parallel ranks."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Limit on the tokens of a micro-batch; a longer row gets one of its own."""
    dtype: Dtype | None = None
    """Data type of the model. float32 on a CPU and bfloat16 on a GPU if not set; float64 is for checks of exactness."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of storing them."""

    save_every: int = Field(default=10, ge=1)
    """Iterations between two checkpoints; there is always one of the last iteration."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints to keep; older ones are removed once a new one is complete."""

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        for name, beta in zip(("first", "second"), betas, strict=True):
            if not 0 <= beta < 1:
                raise ValueError(f"the {name} is {beta:g}, and has to be at least 0 and less than 1")
        return betas

    @model_validator(mode="after")
    def _split_makes_sense(self) -> Self:
        try:
            _ = self.parallel
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def parallel(self) -> Parallelism:
        return Parallelism(self.tp, self.pp, self.cp, self.sp, self.vpp)

    @property
    def ranks(self) -> int:
        """Processes of the whole trainer."""
        return self.parallel.ranks * self.dp

    @property
    def total_steps(self) -> int:
        """Update steps of the whole run."""
        return self.iterations * self.steps
