"""Adam on Megatron's gradient buffers, with gradient clipping and a constant learning rate after warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime_plugin.config.trainer import Trainer

DECAY_STEPS = 1
"""Megatron requires some, also for a constant rate."""


class Optimizer:
    """Megatron's optimizer and scheduler of this rank."""

    def __init__(self, models: Sequence[torch.nn.Module], trainer: Trainer) -> None:
        self._clip = trainer.clip_grad
        config = OptimizerConfig(
            optimizer="adam",
            lr=trainer.lr,
            weight_decay=trainer.weight_decay,
            adam_beta1=trainer.betas[0],
            adam_beta2=trainer.betas[1],
            clip_grad=0.0,  # Megatron's own clipping takes CUDA tensors only, so apply() clips, by Megatron's norm
            bf16=next(models[0].parameters()).dtype == torch.bfloat16,
            use_distributed_optimizer=False,
        )
        self.optimizer: Any = get_megatron_optimizer(config, list(models), use_gloo_process_groups=False)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=trainer.lr,
            min_lr=trainer.lr,
            lr_warmup_steps=trainer.lr_warmup,
            lr_decay_steps=trainer.lr_warmup + DECAY_STEPS,
            lr_decay_style="constant",
            start_wd=trainer.weight_decay,
            end_wd=trainer.weight_decay,
            wd_incr_steps=DECAY_STEPS,
            wd_incr_style="constant",
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def apply(self) -> float:
        """Update the weights by the gradients in the buffers. Return the norm of the gradient before clipping."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if self._clip and norm > self._clip:
            for parameter in self.optimizer.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._clip / (norm + 1e-6))
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)
        return norm
