"""Logdiff: the trainer's log-probability of a sampled token minus the logged one, in nats, and where it is large.

Everything is a sum over tokens under a fixed set of keys in a fixed order, so that sums of micro-batches, ranks and
steps can be added by position, which is what slime's reducer does. Means are formed at the very end, by :func:`means`.
A maximum is not a sum; the reducer gets counts of tokens above some thresholds instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime_plugin.train.vocabulary import Divergence
from slime_plugin.tree.places import PLACES

THRESHOLDS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
LOGDIFF_KEYS = (
    *("tokens", "logdiff", "signed_logdiff", "k3", "multiplicative_error"),
    *(f"above/{threshold:g}" for threshold in THRESHOLDS),
    *(f"{place}/{name}" for name in ("tokens", "logdiff") for place in PLACES),
)
LEAF_KEYS = ("leaves", "leaf_kl", "pinsker", "student_entropy", "teacher_entropy", "entropy_gap")


def logdiff_sums(trainer: Tensor, logged: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Return sums over m tokens, from log-probabilities of the trainer [m], logged ones [m], and places [m].

    ``logdiff`` is the absolute difference, ``k3`` estimates the KL of the two policies, ``multiplicative_error`` is
    exp(logdiff): 1 where they agree.
    """
    signed = (trainer.detach() - logged).to(torch.float64)
    size = signed.abs()
    sums = {
        "tokens": torch.ones_like(size).sum(),
        "logdiff": size.sum(),
        "signed_logdiff": signed.sum(),
        "k3": ((-signed).expm1() + signed).sum(),
        "multiplicative_error": size.exp().sum(),
    }
    for threshold in THRESHOLDS:
        sums[f"above/{threshold:g}"] = (size > threshold).sum().to(size.dtype)
    for name, values in (("tokens", torch.ones_like(size)), ("logdiff", size)):
        by_place = size.new_zeros(len(PLACES)).index_add_(0, places.long(), values)
        sums.update({f"{place}/{name}": by_place[i] for i, place in enumerate(PLACES)})
    return sums


def leaf_sums(divergence: Divergence | None, device: torch.device) -> dict[str, Tensor]:
    """Return sums over diverging leaves; ``pinsker`` bounds the total variation of teacher and student at a leaf."""
    if divergence is None:
        return {name: torch.zeros((), dtype=torch.float64, device=device) for name in LEAF_KEYS}
    kl = divergence.kl.detach().to(torch.float64)
    student, teacher = (x.to(torch.float64) for x in (divergence.student_entropy, divergence.teacher_entropy))
    columns = (torch.ones_like(kl), kl, (kl.clamp_min(0) / 2).sqrt(), student, teacher, (student - teacher).abs())
    return {name: column.sum() for name, column in zip(LEAF_KEYS, columns, strict=True)}


def add_sums(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Add the sums of several micro-batches; every one has the same keys. The host waits for the device once."""
    if not parts:
        return {}
    totals = torch.stack([torch.stack([part[key].double() for part in parts]).sum() for key in parts[0]])
    return dict(zip(parts[0], totals.tolist(), strict=True))


def means(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Return means per token, per token of a place, and per leaf; None where there is nothing to average over."""
    result: dict[str, float | None] = {}
    for key, value in sums.items():
        counter = _counter(key)
        count = sums[counter]
        result[key] = value if key == counter else value / count if count else None
    return result


def _counter(key: str) -> str:
    """The key that counts what this one sums over."""
    if key in LEAF_KEYS:
        return "leaves"
    place = key.rpartition("/")[0]
    return f"{place}/tokens" if place in PLACES else "tokens"
