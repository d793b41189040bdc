"""Process groups. The only module that asks Megatron for them; all others take them as arguments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import ConfigError
from slime_plugin.train.megatron_on_cpu import patch_for_cpu


def start_groups(parallel: Parallelism) -> ProcessGroupCollection:
    """Create Megatron's groups in an initialised torch.distributed world; without CUDA, patch Megatron for the CPU."""
    world = dist.get_world_size()
    if world % parallel.ranks:
        raise ConfigError(
            f"{world} processes cannot hold replicas of tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = "
            f"{parallel.ranks} ranks; start a multiple of {parallel.ranks}"
        )
    patch_for_cpu()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        create_gloo_process_groups=not torch.cuda.is_available(),
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def context_group(groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """The context-parallel group, or None if it has one member."""
    return groups.cp if groups.cp.size() > 1 else None


def sum_over_ranks(values: torch.Tensor, groups: ProcessGroupCollection) -> torch.Tensor:
    """Add up in place what every replica, context-parallel rank and pipeline stage has, so that all have the sum."""
    dist.all_reduce(values, group=groups.dp_cp)
    dist.all_reduce(values, group=groups.pp)
    return values


def is_first_stage(groups: ProcessGroupCollection) -> bool:
    return bool(groups.pp.rank() == 0)


def is_last_stage(groups: ProcessGroupCollection) -> bool:
    return bool(groups.pp.rank() == groups.pp.size() - 1)
