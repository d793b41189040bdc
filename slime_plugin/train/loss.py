"""The loss of a micro-batch: a clipped policy gradient, a KL to the reference, an entropy bonus, and SDCC's KL.

Every trained token has a share: one over the number of trained tokens of its rollout. The loss of a micro-batch is the
sum over its tokens, weighted by their shares; the trainer divides by the number of rollouts of the step. So it does not
matter how tokens are spread over rows, micro-batches and ranks. A token weight, from the record or the method, scales
everything a token contributes to the loss; shares stay the same. Legend: M trained tokens, V vocabulary, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_plugin.config.objective import Objective
from slime_plugin.errors import ConfigError
from slime_plugin.train.logdiff import LEAF_KEYS, LOGDIFF_KEYS, leaf_sums, logdiff_sums
from slime_plugin.train.vocabulary import Shard, forward_kl, token_statistics

MAX_REFERENCE_KL = 10.0
"""Per token. A token that has left the reference behind adds a constant and no gradient; slime clamps there too."""
POLICY_KEYS = ("policy", "entropy", "reference_kl", "clipped", "ratio")
ROLLOUT_KEYS = ("loss", "rollout_logdiff", "drift", *POLICY_KEYS)
"""Sums over rollouts of means over their trained tokens. Divided by the rollouts of the step they are means. ``drift``
is the name of ``rollout_logdiff`` in version 0.6, until 0.8."""
SUM_KEYS = (*ROLLOUT_KEYS, *LOGDIFF_KEYS, *LEAF_KEYS)
"""What the loss returns besides itself, in this order, whatever the method and the micro-batch."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the trained tokens of a micro-batch are scored against, each [M]."""

    advantage: Tensor
    share: Tensor
    """One over the trained tokens of its rollout."""
    old_logprobs: Tensor
    """Under the weights that the iteration started with."""
    reference_logprobs: Tensor | None = None
    """Under the reference model; needed if the objective has a KL."""
    weight: Tensor | None = None
    """Token weights; 1 if not given."""

    @property
    def in_loss(self) -> Tensor:
        """[M] factor of all terms of the loss."""
        return self.share if self.weight is None else self.share * self.weight


@dataclass(frozen=True, slots=True)
class Leaves:
    """The diverging leaves among M trained tokens, and the states of their teacher."""

    rows: Tensor
    """[d] which of the M they are."""
    hidden: Tensor
    """[d, h] last hidden states of the teacher in front of them."""
    output_weight: Tensor
    """[V/tp, h] turns these into logits."""
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
    """Return a scalar to minimise and ``SUM_KEYS``, from the logits [M, V/tp] in front of M trained tokens [M].

    ``logged`` [M] are the log-probabilities of the rollout, ``places`` [M] those of
    :func:`slime_plugin.tree.places.places_of`.
    """
    logprobs, entropy = token_statistics(logits, tokens, shard)
    loss, sums = policy_loss(logprobs, entropy, targets, objective)
    divergence = None
    if leaves is not None and len(leaves.rows):
        divergence = forward_kl(logits[leaves.rows], leaves.hidden, leaves.output_weight, shard, top_k=leaves.top_k)
        loss = loss + leaves.coefficient * (targets.in_loss[leaves.rows] * divergence.kl).sum()
    by_rollout = (targets.share * (logprobs.detach() - logged).abs()).sum()
    sums = {"loss": loss.detach(), "rollout_logdiff": by_rollout, "drift": by_rollout, **sums}
    return loss, {**sums, **logdiff_sums(logprobs, logged, places), **leaf_sums(divergence, loss.device)}


def policy_loss(
    logprobs: Tensor, entropy: Tensor, targets: Targets, objective: Objective
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss without SDCC's KL and its parts, all sums: they add up over micro-batches and ranks.

    ``policy`` is a part of the loss. The other parts describe the policy (nats per token, fractions, ratios): they are
    means over the trained tokens of a rollout, whatever their weights.
    """
    ratio = (logprobs - targets.old_logprobs).exp()
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    surrogate = -torch.minimum(ratio * targets.advantage, clipped * targets.advantage)
    parts = {
        "policy": surrogate,
        "entropy": entropy,
        "reference_kl": torch.zeros_like(logprobs),
        "clipped": (ratio * targets.advantage > clipped * targets.advantage).to(logprobs.dtype),
        "ratio": ratio,
    }
    total = surrogate
    if objective.entropy:
        total = total - objective.entropy * entropy
    if objective.kl:
        if targets.reference_logprobs is None:
            raise ConfigError(
                f"objective.kl is {objective.kl:g} but there are no reference log-probabilities; score them or set it 0"
            )
        # exp(x) - x - 1 with x = reference - policy: an estimate of KL(policy || reference) that is never negative. It
        # exceeds the limit long before x does; without a bound of x, exp(x) is infinite and its clamped gradient NaN.
        log_ratio = (targets.reference_logprobs - logprobs).clamp(-2 * MAX_REFERENCE_KL, 2 * MAX_REFERENCE_KL)
        parts["reference_kl"] = (log_ratio.expm1() - log_ratio).clamp(max=MAX_REFERENCE_KL)
        total = total + objective.kl * parts["reference_kl"]
    sums = {name: (targets.share * part.detach()).sum() for name, part in parts.items()}
    sums["policy"] = (targets.in_loss * surrogate.detach()).sum()
    return (targets.in_loss * total).sum(), sums
