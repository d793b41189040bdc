"""An update of the cell on given rollouts: hooks and passes of training. The weights stay as they are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_plugin.config.method import MethodSettings
from slime_plugin.hooks import train as hooks
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.rank import Rank, reduced_sums
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import Batch
from slime_plugin.slime.packed_batch import ContextPart
from slime_plugin.train.process_groups import context_group
from slime_plugin.verify.settings import Verification

REFERENCE_GAP = 0.1
"""Nats by which the reference differs, so that its KL has a gradient."""


@dataclass(frozen=True, slots=True)
class Update:
    """Rollouts laid out for a rank whose model is wrapped for training, so that only what a trainer does is left."""

    args: Namespace
    data: Mapping[str, Any]
    """With slime's keys."""

    @classmethod
    def of(cls, verification: Verification, rank: Rank, batch: Batch, method: MethodSettings) -> Update:
        """Prepare a batch that was laid out by ``method``, or in another way and is trained as by it."""
        cell = verification.one_replica().model_copy(update={"method": method})
        (data,) = split_batch(
            batch.train_data(),
            replicas=1,
            steps=1,
            batch_tokens=cell.trainer.batch_tokens * cell.trainer.cp,
            multiple=cell.trainer.parallel.micro_batch_multiple,
        )
        part = ContextPart.of(context_group(rank.groups))
        own = [
            logged[torch.from_numpy(part.predicted(length, response)[1]).long()]
            for logged, length, response in _columns(data, "rollout_log_probs", "total_lengths", "response_lengths")
        ]
        data["rollout_log_probs"] = own
        data["ref_log_probs"] = [logged - REFERENCE_GAP for logged in own]
        data["advantages"] = [
            torch.full((len(logged),), 1.0 if rollout % 2 else -1.0)
            for logged, rollout in zip(own, data["rollout_ids"], strict=True)
        ]
        return cls(args_of(cell), data)

    @property
    def micro_batches(self) -> int:
        return len(self.data["micro_batch_indices"])

    def run(self, rank: Rank) -> float:
        """Leave the gradients in the buffers of the models, and return the loss. Collective; ends on all ranks at
        once."""
        rank.configure(self.args)
        data = dict(self.data)
        hooks.rollout_data_postprocess(self.args, 0, data)
        for model in rank.models:
            model.zero_grad_buffer()  # type: ignore[operator]  # Megatron's wrapper
        hooks.before_train_step(self.args, 0, 0, rank.models, None, None)
        sums = reduced_sums(rank.passes.update(data, 0), rank.groups)
        return sums["loss"] / int(data["global_batch_sizes"][0])

    def logprobs(self, rank: Rank) -> list[Tensor] | None:
        """Compute log-probabilities, as of the old policy before the first update of an iteration. Collective."""
        rank.configure(self.args)
        return rank.passes.logprobs(dict(self.data))


def _columns(data: Mapping[str, Any], *keys: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(data[key] for key in keys), strict=True)
