"""What slime calls in its training processes. Needs no engine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_plugin.slime.packed_batch import PackedBatch
from slime_plugin.slime.packed_model import PackedTreeModel
from slime_plugin.slime.training import current, open_under_slime


def init(args: Namespace) -> None:
    """``--custom-megatron-init-path``"""
    open_under_slime(args)


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> PackedTreeModel:
    """``--custom-model-provider-path``"""
    return current().model(pre_process, post_process, vp_stage)


def rollout_data_postprocess(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path``"""
    current().on_batch(rollout_data)


def before_train_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """``--custom-megatron-before-train-step-hook-path``"""
    current().before_step(rollout_id, step_id, model)


def loss(
    args: Namespace, batch: PackedBatch, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """``--custom-loss-function-path``. Means over rollouts are formed from the batch itself, as ``sum_of_sample_mean``
    would, because the sums for the metrics need the same weights."""
    return current().loss(batch, logits)
