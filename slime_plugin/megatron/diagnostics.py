"""How far the trainer's log-probabilities are from those of the rollout, and where.

Everything is a sum over tokens under a fixed set of keys in a fixed order, so that sums of micro-batches, ranks and
steps can be added by position, which is what slime's reducer does. Means are formed at the very end, by :func:`means`.
A maximum is not a sum; for the reducer its place is taken by counts of tokens above some thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime_plugin.megatron.vocabulary import Divergence
from slime_plugin.tree.places import PLACES

THRESHOLDS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
DRIFT_KEYS = (
    *("tokens", "logdiff", "signed_logdiff", "k3", "multiplicative_error"),
    *(f"above/{threshold:g}" for threshold in THRESHOLDS),
    *(f"{place}/{name}" for name in ("tokens", "logdiff") for place in PLACES),
)
LEAF_KEYS = ("leaves", "leaf_kl", "pinsker", "student_entropy", "teacher_entropy", "entropy_gap")


def drift_sums(trained: Tensor, rolled_out: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Sums over tokens: log-probabilities of the trainer [m], of the rollout [m], and places [m].

    ``k3`` estimates the KL of the two policies, ``multiplicative_error`` is exp(|difference|): 1 where they agree.
    """
    gap = (trained.detach() - rolled_out).to(torch.float64)
    distance = gap.abs()
    sums = {
        "tokens": torch.ones_like(gap).sum(),
        "logdiff": distance.sum(),
        "signed_logdiff": gap.sum(),
        "k3": ((-gap).expm1() + gap).sum(),
        "multiplicative_error": distance.exp().sum(),
    }
    for threshold in THRESHOLDS:
        sums[f"above/{threshold:g}"] = (distance > threshold).sum().to(gap.dtype)
    for name, values in (("tokens", torch.ones_like(gap)), ("logdiff", distance)):
        by_place = gap.new_zeros(len(PLACES)).index_add_(0, places.long(), values)
        sums.update({f"{place}/{name}": by_place[i] for i, place in enumerate(PLACES)})
    return sums


def leaf_sums(divergence: Divergence | None, device: torch.device) -> dict[str, Tensor]:
    """Sums over diverging leaves; ``pinsker`` bounds the total variation between teacher and student at a leaf."""
    if divergence is None:
        return {name: torch.zeros((), dtype=torch.float64, device=device) for name in LEAF_KEYS}
    kl = divergence.kl.detach().to(torch.float64)
    student, teacher = (x.to(torch.float64) for x in (divergence.student_entropy, divergence.teacher_entropy))
    columns = (torch.ones_like(kl), kl, (kl.clamp_min(0) / 2).sqrt(), student, teacher, (student - teacher).abs())
    return {name: column.sum() for name, column in zip(LEAF_KEYS, columns, strict=True)}


def add_sums(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The sums of several micro-batches; every one has the same keys."""
    return {key: float(sum(part[key] for part in parts)) for key in parts[0]} if parts else {}


def means(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Means per token, per token of a place, and per leaf; None where there is nothing to average over."""
    result: dict[str, float | None] = {}
    for key, value in sums.items():
        counter = _counter(key)
        if key != counter:
            count = sums[counter]
            result[key] = value / count if count else None
        else:
            result[key] = value
    return result


def _counter(key: str) -> str:
    """The key that counts what this one sums over."""
    if key in LEAF_KEYS:
        return "leaves"
    place = key.rpartition("/")[0]
    return f"{place}/tokens" if place in PLACES else "tokens"
