"""The loss of one update step on one micro-batch: everything the last stage does with its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from slime_plugin.config.objective import Objective
from slime_plugin.megatron.batch import MicroBatch
from slime_plugin.megatron.diagnostics import DRIFT_KEYS, LEAF_KEYS, drift_sums, leaf_sums
from slime_plugin.megatron.objective import POLICY_KEYS, Targets, policy_loss
from slime_plugin.megatron.step import Predictions
from slime_plugin.megatron.teacher import TeacherStates
from slime_plugin.megatron.vocabulary import Shard, forward_kl, statistics_dtype, token_statistics
from slime_plugin.methods import Credit

ROLLOUT_KEYS = ("loss", "drift", *POLICY_KEYS)
"""Sums over rollouts of means over their tokens: over the rollouts of a step they are means, in slime's log too."""
SUM_KEYS = (*ROLLOUT_KEYS, *DRIFT_KEYS, *LEAF_KEYS)
"""Of what the loss returns besides itself, in this order, whatever the method and the micro-batch."""


class TokenTable:
    """A number for every tape token of every rollout in a batch, whatever rows and micro-batches they are in."""

    def __init__(self, columns: Sequence[NDArray[Any]]) -> None:
        """One column [L] per rollout; NaN where there is no number yet."""
        lengths = [len(column) for column in columns]
        self._starts = np.cumsum(lengths) - lengths
        self._values: NDArray[np.float64] = np.concatenate(columns).astype(np.float64)

    @classmethod
    def empty(cls, lengths: Sequence[int]) -> TokenTable:
        return cls([np.full(length, np.nan) for length in lengths])

    def put(self, batch: MicroBatch, values: Tensor) -> None:
        """[M] one for each predicted token."""
        self._values[self._starts[batch.rollout] + batch.tape] = values.cpu().double().numpy()

    def get(self, batch: MicroBatch, share: slice) -> NDArray[np.float64]:
        """[m] for a share of the predicted tokens."""
        values: NDArray[np.float64] = self._values[self._starts[batch.rollout[share]] + batch.tape[share]]
        return values


@dataclass(frozen=True, slots=True)
class Distillation:
    """SDCC's part of an update step. Without it, or with weight 0, a student is trained as naive_compressed."""

    weight: float
    """Of this step: :meth:`slime_plugin.megatron.objective.SdccSchedule.weight`."""
    teacher: TeacherStates
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Leaves:
    """The diverging leaves among M trained tokens, and what their teacher saw."""

    rows: Tensor
    """[d] which of the M they are."""
    hidden: Tensor
    """[d, h] last hidden states of the teacher in front of them."""
    weight: Tensor
    """[V/tp, h] the output weight that turns these into logits."""
    coefficient: float
    """Of the KL in this step."""
    top_k: int | None = None


def update_loss(
    logits: Tensor,
    tokens: Tensor,
    targets: Targets,
    logged: Tensor,
    places: Tensor,
    objective: Objective,
    shard: Shard,
    leaves: Leaves | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """From the logits in front of M trained tokens [M, V/tp] and their ids [M]: a scalar to minimise, and ``SUM_KEYS``.

    ``logged`` [M] are the log-probabilities of the rollout, ``places`` [M] those of
    :func:`slime_plugin.tree.places.places_of`. Every method of training ends here, whatever carried its tokens.
    """
    logprobs, entropy = token_statistics(logits, tokens, shard)
    loss, sums = policy_loss(logprobs, entropy, targets, objective)
    divergence = None
    if leaves is not None and len(leaves.rows):
        divergence = forward_kl(logits[leaves.rows], leaves.hidden, leaves.weight, shard, top_k=leaves.top_k)
        loss = loss + leaves.coefficient * (targets.in_loss[leaves.rows] * divergence.kl).sum()
    apart = (targets.weight * (logprobs.detach() - logged).abs()).sum()
    drift = drift_sums(logprobs, logged, places)
    return loss, {"loss": loss.detach(), "drift": apart, **sums, **drift, **leaf_sums(divergence, loss.device)}


@dataclass(frozen=True, slots=True)
class UpdateLoss:
    """Call it with predictions: a scalar to minimise, and sums with constant keys."""

    objective: Objective
    credits: Sequence[Credit]
    """One per rollout."""
    places: TokenTable
    """Of :func:`slime_plugin.tree.places.places_of`."""
    vocabulary: int
    tp_group: dist.ProcessGroup
    old: TokenTable | None = None
    """Log-probabilities before the update; the rollout's own if not given."""
    reference: TokenTable | None = None
    distillation: Distillation | None = None

    def __call__(self, predictions: Predictions) -> tuple[Tensor, dict[str, Tensor]]:
        batch, share, logits = predictions.batch, predictions.share, predictions.rows
        return update_loss(
            logits,
            predictions.targets(),
            self._targets(batch, share, logits),
            _tensor(batch.rollout_logprobs[share], logits),
            _tensor(self.places.get(batch, share), logits).long(),
            self.objective,
            Shard.of(self.vocabulary, logits.shape[1], self.tp_group),
            self._leaves(predictions),
        )

    def _leaves(self, predictions: Predictions) -> Leaves | None:
        if self.distillation is None or not self.distillation.weight:
            return None
        rows, teacher = predictions.leaf_rows(), self.distillation.teacher
        if not len(rows):
            return None
        hidden = teacher.of(predictions.batch, predictions.own_leaves)
        return Leaves(rows, hidden, teacher.weight, self.distillation.weight, self.distillation.top_k)

    def _targets(self, batch: MicroBatch, share: slice, like: Tensor) -> Targets:
        rollout = batch.rollout[share]
        advantage = np.array([credit.advantage for credit in self.credits])[rollout]
        weight = np.array([credit.token_weight for credit in self.credits])[rollout]
        old = batch.rollout_logprobs[share] if self.old is None else self.old.get(batch, share)
        reference = None if self.reference is None else _tensor(self.reference.get(batch, share), like)
        factor = _tensor(batch.weight[share], like)
        return Targets(_tensor(advantage, like), _tensor(weight, like), _tensor(old, like), reference, factor)


def _tensor(values: NDArray[np.floating], like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64)).to(like.device, statistics_dtype(like))
