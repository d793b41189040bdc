"""Forward passes without gradient: log-probabilities, and the KL at diverging leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from slime_plugin.megatron.batch import MicroBatch
from slime_plugin.megatron.parallel import context_group
from slime_plugin.megatron.step import Predictions, run
from slime_plugin.megatron.teacher import TeacherStates, leaf_divergence
from slime_plugin.megatron.vocabulary import Shard, token_statistics


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one micro-batch, whole on every rank of the last stage."""

    logprobs: Tensor
    """[M] of the predicted tokens."""
    leaf_kl: Tensor
    """[D] KL(teacher || student) at the diverging leaves; NaN without a teacher."""


def evaluate(
    models: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    groups: ProcessGroupCollection,
    vocabulary: int,
    teacher: TeacherStates | None = None,
    top_k: int | None = None,
) -> list[Evaluation]:
    """One per micro-batch on the last stage, nothing on the others."""

    def consume(predictions: Predictions) -> tuple[Tensor, Evaluation]:
        batch, share = predictions.batch, predictions.share
        shard = Shard.of(vocabulary, predictions.rows.shape[1], groups.tp)
        logprobs, _ = token_statistics(predictions.rows, predictions.targets(), shard)
        every = logprobs.new_zeros(len(batch.predicted))
        every[share] = logprobs
        kl = logprobs.new_zeros(len(batch.leaves))
        if teacher is None:
            kl.fill_(torch.nan)
        else:
            divergence = leaf_divergence(predictions, teacher, shard, top_k)
            if divergence is not None:
                kl[predictions.own_leaves] = divergence.kl
        group = context_group(groups)
        if group is not None:
            dist.all_reduce(every, group=group)
            dist.all_reduce(kl, group=group)
        return logprobs.new_zeros(()), Evaluation(every, kl)

    with torch.no_grad():
        return run(models, batches, consume, groups, forward_only=True)
