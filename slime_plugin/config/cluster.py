"""Where slime runs a cell: the ``cluster:`` block of a configuration. Nothing else reads it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from slime_plugin.config.frozen import File, Frozen

Setting = bool | int | float | str
"""The value of a flag; true for one that takes none, and false to leave out one that would be there."""


class Cluster(Frozen):
    """One node of 8 GPUs that engines and trainer take turns on, if nothing else is said."""

    nodes: int = Field(default=1, ge=1)
    """Machines."""
    gpus: int = Field(default=8, ge=1)
    """GPUs of each."""
    memory: float = Field(default=80.0, gt=0)
    """GB of each GPU; only ``memorywalker plan`` reads it."""
    rollout_nodes: int = Field(default=0, ge=0)
    """How many of the nodes are for engines alone. 0: engines and trainer share all GPUs and take turns."""
    engine_gpus: int = Field(default=1, ge=1)
    """GPUs of one engine: its tensor parallelism."""
    engine_memory: float = Field(default=0.7, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache of an engine."""

    megatron: File | None = None
    """The model as a Megatron checkpoint, which ``launch/prepare.sh`` writes: the reference of the KL, and where
    training begins. MODEL_torch_dist beside the model if not set."""
    replay: File | None = None
    """Folder of a run whose recorded rollouts are trained on again, without engines."""
    flags: dict[str, Setting | list[Setting]] = Field(default_factory=dict)
    """Further flags of slime, Megatron and SGLang by their names, such as ``use-wandb: true``. They are checked against
    the flags there are, because slime drops a misspelt one without a word."""

    @model_validator(mode="after")
    def _engines_fit(self) -> Self:
        if self.rollout_nodes >= self.nodes:
            raise ValueError(
                f"rollout_nodes is {self.rollout_nodes} of {self.nodes} nodes, which leaves none to train on; use at "
                f"most {self.nodes - 1}, or 0 to share all of them"
            )
        if self.rollout_gpus % self.engine_gpus:
            raise ValueError(
                f"{self.rollout_gpus} GPUs cannot be dealt out to engines of engine_gpus {self.engine_gpus}; choose a "
                f"divisor of {self.rollout_gpus}"
            )
        return self

    @property
    def shared(self) -> bool:
        """Engines and trainer take turns on the same GPUs."""
        return self.rollout_nodes == 0

    @property
    def trainer_nodes(self) -> int:
        return self.nodes - self.rollout_nodes

    @property
    def trainer_gpus(self) -> int:
        return self.trainer_nodes * self.gpus

    @property
    def rollout_gpus(self) -> int:
        return (self.rollout_nodes or self.nodes) * self.gpus

    @property
    def engines(self) -> int:
        return self.rollout_gpus // self.engine_gpus
