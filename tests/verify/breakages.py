"""Ways to break what a check tests, in the processes that compute: each replaces a function where training finds it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_plugin.record.arrays import IntArray
from slime_plugin.slime import packed_model
from slime_plugin.train import attention, distillation, layers, loss, vocabulary
from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.train.tree_plan import TreePlan
from slime_plugin.verify import sleep


def run_broken(
    name: str, ranks: int, function: Callable[..., Any], *arguments: Any, on_progress: OnProgress = lambda done: None
) -> list[Any]:
    """``run_ranks``, with something broken on every rank."""
    return run_ranks(ranks, _break_and_run, name, function, *arguments, on_progress=on_progress)


def _break_and_run(on_progress: OnProgress, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    BREAKAGES[name]()
    return function(on_progress, *arguments)


def top_left_causality() -> None:
    """A varlen kernel that aligns causality to the begin of the keys, as FlashAttention did before 2.1."""

    def attend(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
        visible = torch.zeros(len(query), len(key), dtype=torch.bool)
        for block in plan.blocks:
            path = np.concatenate([np.arange(start, stop) for start, stop in block.path])
            for i in range(block.start, block.stop):
                visible[i - plan.window[0], path[: i - block.start + 1]] = True
        return attention.attend_masked(query, key, value, visible, scale)

    attention.BACKENDS["sdpa"] = attend


def index_for_depth() -> None:
    """A rotary table by index in the row, which is what stock Megatron has."""
    right = layers.DepthRotaryEmbedding.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return right(self, torch.arange(len(args[0])), *args[1:], **kwargs)

    layers.DepthRotaryEmbedding.forward = forward  # type: ignore[method-assign]


def another_base() -> None:
    """A rotary table of another rope_theta: every pass of the trainer is wrong in the same way."""
    right = layers.DepthRotaryEmbedding.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.inv_freq = 10_000.0 ** -torch.linspace(0, 1, len(self.inv_freq) + 1)[:-1]
        return right(self, *args, **kwargs)

    layers.DepthRotaryEmbedding.forward = forward  # type: ignore[method-assign]


def dropped_shard() -> None:
    """Statistics of the vocabulary that leave the other ranks out."""

    def gather(numbers: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return numbers.unsqueeze(0)

    vocabulary._gather = gather


def teacher_with_gradient() -> None:
    """SDCC's KL, computed in the open: the teacher is trained too."""

    def forward_kl(
        student: Tensor, hidden: Tensor, weight: Tensor, shard: vocabulary.Shard, **settings: Any
    ) -> vocabulary.Divergence:
        teacher, predicted = (
            torch.log_softmax(logits[:, : shard.size], dim=-1) for logits in (hidden @ weight.T, student)
        )
        kl = (teacher.exp() * (teacher - predicted)).sum(dim=-1)
        return vocabulary.Divergence(kl, kl.detach(), kl.detach())

    vocabulary.forward_kl = forward_kl  # type: ignore[assignment]


def trained_teacher() -> None:
    """The same in training: the states of the teacher carry gradient, too. For steps of one micro-batch."""
    teacher_with_gradient()
    vars(loss)["forward_kl"] = vocabulary.forward_kl
    vars(distillation)["torch"] = _TorchWithGradient()


class _TorchWithGradient:
    """The torch module, in which nothing is computed without gradient."""

    no_grad = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def wrong_parent() -> None:
    """Branches that hang one token too high."""
    right = packed_model.parents_of

    def parents_of(*args: Any) -> IntArray:
        parent = right(*args)
        return np.where((parent != np.arange(len(parent)) - 1) & (parent > 0), parent - 1, parent)

    packed_model.parents_of = parents_of  # type: ignore[assignment]


def only_parameters_wake() -> None:
    """What is no parameter comes back empty, such as the frequencies of the rotary table."""

    def wake(asleep: list[sleep.SleepingStorage]) -> None:
        kept = {p.untyped_storage()._cdata for p in gc.get_objects() if type(p) is torch.nn.Parameter}
        for sleeping in asleep:
            if sleeping.storage._cdata not in kept:
                sleeping.content.zero_()
        right(asleep)

    right, sleep.wake = sleep.wake, wake


def overflow() -> None:
    """Log-probabilities that are no numbers, in the loss."""
    right = vocabulary.token_statistics

    def token_statistics(*args: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropy = right(*args)
        return logprobs * torch.nan, entropy

    vars(loss)["token_statistics"] = token_statistics


def waiting_loss() -> None:
    """A loss that looks at a number while it is computed."""
    right = vocabulary.token_statistics

    def token_statistics(*args: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropy = right(*args)
        assert logprobs.detach().sum().item() <= 0
        return logprobs, entropy

    vars(loss)["token_statistics"] = token_statistics


BREAKAGES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        top_left_causality,
        index_for_depth,
        another_base,
        dropped_shard,
        teacher_with_gradient,
        trained_teacher,
        wrong_parent,
        only_parameters_wake,
        overflow,
        waiting_loss,
    )
}
