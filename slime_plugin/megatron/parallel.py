"""Process groups: the one place that asks Megatron for them. All else takes them as arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from slime_plugin.errors import ConfigError
from slime_plugin.megatron.cpu import bridge_to_cpu


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a model and its data are split over ranks. Data parallelism takes the ranks that are left."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: bool = False
    """Sequence parallelism, within the tensor-parallel group."""

    def __post_init__(self) -> None:
        if self.sp and self.tp == 1:
            raise ConfigError(
                "sequence parallelism splits activations over tensor-parallel ranks; with tp 1 leave it off"
            )

    @property
    def ranks(self) -> int:
        """Of one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def multiple(self) -> int:
        """What the tokens of a row have to be a multiple of."""
        return self.cp * (self.tp if self.sp else 1)


def start(parallel: Parallelism) -> ProcessGroupCollection:
    """Make Megatron's groups in an initialised torch.distributed world; without CUDA, bridge to the CPU."""
    world = dist.get_world_size()
    if world % parallel.ranks:
        raise ConfigError(
            f"{world} processes cannot hold replicas of tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = "
            f"{parallel.ranks} ranks; start a multiple of {parallel.ranks}"
        )
    bridge_to_cpu()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        create_gloo_process_groups=not torch.cuda.is_available(),
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def context_group(groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """The context-parallel group, or None if it has one member."""
    return groups.cp if groups.cp.size() > 1 else None


def is_first_stage(groups: ProcessGroupCollection) -> bool:
    return bool(groups.pp.rank() == 0)


def is_last_stage(groups: ProcessGroupCollection) -> bool:
    return bool(groups.pp.rank() == groups.pp.size() - 1)
