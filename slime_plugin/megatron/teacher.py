"""SDCC's teacher: the policy itself, without gradient, on the contexts the diverging leaves were really sampled in.

One forward-only pass over the teacher rows of all rollouts, before the update step and so with exactly its weights, on
the same pipeline schedule. What is kept of it is the last hidden state in front of each leaf, [D, h], on the last
stage; the loss forms logits from those one chunk at a time. Where nothing diverges there is no pass at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from slime_plugin.megatron.batch import Item, MicroBatch, pack_within
from slime_plugin.megatron.model import output_weight
from slime_plugin.megatron.parallel import is_last_stage
from slime_plugin.megatron.step import Predictions, run
from slime_plugin.megatron.vocabulary import Divergence, Shard, forward_kl


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """Last hidden states in front of the leaves of a batch, on the last stage."""

    hidden: Tensor
    """[D, h] over all rollouts, in their order."""
    weight: Tensor
    """[V/tp, h] the output weight that turns them into logits."""
    places: Mapping[int, slice]
    """Where the leaves of each rollout are among them."""

    def of(self, batch: MicroBatch, leaves: slice) -> Tensor:
        """[d, h] for some of the leaves of a student micro-batch, which holds all leaves of a rollout or none."""
        rollouts = dict.fromkeys(batch.rollout[batch.leaves].tolist())  # a rollout has one student row
        return torch.cat([self.hidden[self.places[rollout]] for rollout in rollouts])[leaves]


def leaf_divergence(
    predictions: Predictions, teacher: TeacherStates, shard: Shard, top_k: int | None = None
) -> Divergence | None:
    """Teacher against student at the leaves among some predicted rows; None if there are none."""
    rows = predictions.leaf_rows()
    if not len(rows):
        return None
    states = teacher.of(predictions.batch, predictions.own_leaves)
    return forward_kl(predictions.rows[rows], states, teacher.weight, shard, top_k=top_k)


def run_teacher(
    models: Sequence[torch.nn.Module],
    items: Sequence[Item],
    groups: ProcessGroupCollection,
    *,
    budget: int,
    multiple: int,
) -> TeacherStates | None:
    """From ``batch.teacher_items``. None if there are none, and on all stages but the last."""
    if not items:
        return None

    def keep(predictions: Predictions) -> tuple[Tensor, Tensor]:
        return predictions.rows.new_zeros(()), predictions.rows.clone()

    with torch.no_grad():
        parts = run(models, pack_within(items, budget, multiple), keep, groups, forward_only=True, project=False)
    if not is_last_stage(groups):
        return None
    ends = np.cumsum([len(item.predicted) for item in items]).tolist()
    places = {item.rollout: slice(end - len(item.predicted), end) for item, end in zip(items, ends, strict=True)}
    weight = output_weight(models[-1]).detach()
    # Megatron's wrapper for bfloat16 hands out float32; there is nothing more in it.
    return TeacherStates(torch.cat(parts).to(weight.dtype), weight, places)


class Snapshot:
    """A second set of weights beside the ones that are trained: as they are when it is made."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self.weights = [parameter.detach().clone() for parameter in self._parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the models compute with these weights."""
        current = [parameter.data for parameter in self._parameters]
        try:
            for parameter, weight in zip(self._parameters, self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, data in zip(self._parameters, current, strict=True):
                parameter.data = data


class MovingAverage(Snapshot):
    """Weights that follow the trained ones, for a teacher that changes more slowly than the student."""

    def __init__(self, models: Sequence[torch.nn.Module], decay: float) -> None:
        super().__init__(models)
        self.decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """After each update step."""
        for average, parameter in zip(self.weights, self._parameters, strict=True):
            average.lerp_(parameter, 1.0 - self.decay)
