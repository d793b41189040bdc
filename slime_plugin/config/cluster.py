"""Machines and GPUs of a job under slime: the ``cluster:`` block of a configuration. Local runs ignore it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from slime_plugin.config.frozen import File, Frozen

Setting = bool | int | float | str
"""The value of a flag; true sets a flag without a value, false leaves a flag out."""


class Cluster(Frozen):
    """By default one node of 8 GPUs that engines and trainer take turns on."""

    nodes: int = Field(default=1, ge=1)
    """Machines."""
    gpus: int = Field(default=8, ge=1)
    """GPUs per node."""
    memory: float = Field(default=80.0, gt=0)
    """GB per GPU; only ``memorywalker plan`` reads it."""
    rollout_nodes: int = Field(default=0, ge=0)
    """Nodes that only run engines. 0: engines and trainer share all GPUs and take turns."""
    engine_gpus: int = Field(default=1, ge=1)
    """GPUs per engine: its tensor parallelism."""
    engine_memory: float = Field(default=0.7, gt=0, lt=1)
    """Share of a GPU's memory for the weights and KV cache of an engine."""

    megatron: File | None = None
    """The model as a Megatron checkpoint, written by ``launch/prepare.sh``: the initial policy and the reference of the
    KL. MODEL_torch_dist beside the model if not set."""
    replay: File | None = None
    """Folder of a run whose recorded rollouts are trained on, without engines."""
    flags: dict[str, Setting | list[Setting]] = Field(default_factory=dict)
    """Further flags of slime, Megatron and SGLang by name, such as ``use-wandb: true``. They are checked against the
    flags that exist, because slime silently ignores a misspelt one."""

    @model_validator(mode="after")
    def _engines_fit(self) -> Self:
        if self.rollout_nodes >= self.nodes:
            raise ValueError(
                f"rollout_nodes is {self.rollout_nodes} of {self.nodes} nodes, which leaves none to train on; use at "
                f"most {self.nodes - 1}, or 0 to share all of them"
            )
        if self.rollout_gpus % self.engine_gpus:
            raise ValueError(
                f"{self.rollout_gpus} GPUs cannot be divided among engines of engine_gpus {self.engine_gpus}; choose a "
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
