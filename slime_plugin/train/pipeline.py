"""Micro-batches through Megatron's pipeline schedule and data-parallel wrapper, with gradients that are sums.

Losses are sums whose factors already say what each token counts, so nothing is divided afterwards: not by
micro-batches, not by data- or context-parallel ranks. The gradients of all ranks simply add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor


def run_schedule(
    models: Sequence[torch.nn.Module],
    batches: Sequence[Any],
    forward_step: Callable[..., Any],
    groups: ProcessGroupCollection,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run micro-batches of any kind and length through Megatron's schedule for these groups.

    ``forward_step(iterator, model)`` computes the next micro-batch on a stage and returns its output and a function. On
    the last stage that is called with the output, and returns a scalar, the number 1 and a result. Return the results
    on the last stage, an empty list elsewhere.
    """
    config = get_model_config(models[0])
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models] if len(models) > 1 else iter(batches),
        model=list(models),
        num_microbatches=len(batches),
        seq_length=0,  # micro-batches differ in length
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=P2PCommunicator(groups.pp, config),
        pg_collection=groups,
    )
    return results


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack rows into micro-batches of at most ``budget`` tokens; a longer row gets one of its own.

    >>> first_fit([3, 5, 2, 9], 6)
    [[0, 2], [1], [3]]
    """
    batches: list[list[int]] = []
    left: list[int] = []
    for row, length in enumerate(lengths):
        fit = next((i for i, room in enumerate(left) if length <= room), None)
        if fit is None:
            fit = len(batches)
            batches.append([])
            left.append(budget)
        batches[fit].append(row)
        left[fit] -= length
    return batches


def wrap_for_training(
    config: TransformerConfig, models: Sequence[torch.nn.Module], groups: ProcessGroupCollection
) -> list[torch.nn.Module]:
    """Wrap models for data parallelism, with gradients that are summed over ranks and divided by nothing."""
    config.finalize_model_grads_func = _finalize
    settings = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return [
        DistributedDataParallel(config, settings, model, disable_bucketing=i > 0, pg_collection=groups)
        for i, model in enumerate(models)
    ]


def _finalize(models: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's, without its division by the number of tokens."""
    finalize_model_grads(models, None, **kwargs)
