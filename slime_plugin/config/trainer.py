"""How a policy is updated, and how the work is split: the ``trainer:`` block of a configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from slime_plugin.config.frozen import Frozen
from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import ConfigError


class Trainer(Frozen):
    """GRPO with the paper's settings: 4 prompts of 16 rollouts each, trained in 8 steps of 8."""

    iterations: int = Field(default=200, ge=1)
    """How often rollouts are sampled and trained on."""
    prompts: int = Field(default=4, ge=1)
    """Questions per iteration; each is asked ``rollout.samples`` times."""
    steps: int = Field(default=8, ge=1)
    """Update steps per iteration, each on an equal share of its rollouts."""
    seed: int = Field(default=0, ge=0)
    """Of the order in which questions are asked."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    lr_warmup: int = Field(default=0, ge=0)
    """Update steps over which the learning rate ramps up from 0; it is constant afterwards."""
    betas: tuple[float, float] = Field(default=(0.9, 0.98), strict=False)
    """Adam's decay of the first and the second moment, each at least 0 and less than 1."""
    weight_decay: float = Field(default=0.01, ge=0)
    """How fast Adam pulls weights towards 0, as a share of the learning rate."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of a gradient; a longer one is shortened to it. 0 leaves all as they are."""

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
    """Most tokens of one micro-batch; a larger row gets one of its own."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What to compute in. float32 on a CPU and bfloat16 on a GPU if not set."""
    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them."""

    save_every: int = Field(default=10, ge=1)
    """Iterations between two checkpoints; the last one always has one."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints that are kept; older ones are removed once a new one is whole."""

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
