"""What is minimised: a clipped policy gradient, a KL to the reference, an entropy bonus; and how much SDCC's KL counts.

Every trained token has a weight, which is its share of the batch: one over the number of rollouts, over the number of
trained tokens of its rollout. The loss of a batch is the weighted sum over all its tokens, so it does not matter how
they are spread over rows, micro-batches and ranks. A diverging leaf weighs as much as any other token of its rollout.
What a record says its tokens count is a factor on top, on all that they contribute to the loss; shares stay the same.
Legend: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime_plugin.config.method import Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Targets:
    """What the trained tokens of a micro-batch are scored against, each [M]."""

    advantage: Tensor
    weight: Tensor
    """Its share of the batch."""
    old_logprobs: Tensor
    """Under the weights that the policy had when the batch was started."""
    reference_logprobs: Tensor | None = None
    """Under the reference model; needed if the objective has a KL."""
    factor: Tensor | None = None
    """What its record says it counts; 1 if not given."""

    @property
    def in_loss(self) -> Tensor:
        """[M] what all terms of the loss are multiplied with."""
        return self.weight if self.factor is None else self.weight * self.factor


POLICY_KEYS = ("policy", "entropy", "reference_kl", "clipped", "ratio")


def policy_loss(
    logprobs: Tensor, entropy: Tensor, targets: Targets, objective: Objective
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch and its parts, all weighted sums: they add up over micro-batches and ranks.

    ``policy`` is the part of the loss. The other parts describe the policy, in nats per token, shares and ratios: they
    are means over the trained tokens, whatever factors those have.
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
        parts["reference_kl"] = low_variance_kl(logprobs, targets.reference_logprobs)
        total = total + objective.kl * parts["reference_kl"]
    sums = {name: (targets.weight * part.detach()).sum() for name, part in parts.items()}
    sums["policy"] = (targets.in_loss * surrogate.detach()).sum()
    return (targets.in_loss * total).sum(), sums


def low_variance_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[M] an estimate of KL(policy || reference) that is never negative: ``exp(x) - x - 1``, x = reference - policy."""
    gap = reference - logprobs
    return gap.expm1() - gap


@dataclass(slots=True)
class SdccSchedule:
    """How much SDCC's KL counts at each update step. It ramps up linearly, and it can be switched off, once for all.

    The guard rails: a step has diverged if its mean KL per leaf or the mean distance between the entropies of teacher
    and student is over its limit or is not a number. ``patience`` such steps in a row switch the KL off; what remains
    is naive_compressed, and ``why_off`` says why.
    """

    config: Sdcc
    steps: int
    """Update steps of the whole run."""
    why_off: str | None = field(default=None, init=False)
    diverged: int = field(default=0, init=False)
    """Diverged steps in a row, so far."""

    def weight(self, step: int) -> float:
        """The coefficient at update step ``step``, counted from 0. 0 means: no teacher pass, no KL, no difference."""
        if self.why_off is not None:
            return 0.0
        ramp = self.config.warmup * self.steps
        return self.config.weight * (min(1.0, step / ramp) if ramp else 1.0)

    def state(self) -> dict[str, str | int | None]:
        """What a checkpoint has to keep; :meth:`restore` takes it."""
        return {"steps": self.steps, "why_off": self.why_off, "diverged": self.diverged}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Its ramp goes on as it began, also if the run has become longer since."""
        self.steps, self.why_off, self.diverged = state["steps"], state["why_off"], state["diverged"]

    def observe(self, leaves: float, kl: float, entropy_gap: float) -> None:
        """Sums over all leaves of a step, on all ranks: their number, KL, and |student entropy - teacher entropy|."""
        if not leaves:
            return
        found = {
            "mean KL per leaf": (kl / leaves, self.config.kl_limit),
            "mean entropy gap": (entropy_gap / leaves, self.config.entropy_gap_limit),
        }
        over = [
            f"{name} {value:.3g} where {limit:g} is the limit"
            for name, (value, limit) in found.items()
            if not value <= limit
        ]
        self.diverged = self.diverged + 1 if over else 0
        if self.diverged >= self.config.patience and self.why_off is None:
            self.why_off = f"{' and '.join(over)} in {self.diverged} steps in a row"
