"""Advantages and loss weights count rollouts, never rows.

One reward per rollout enters the baseline of its group, its advantage goes to all its rows, and its tokens are
averaged over all its trained tokens. So a rollout that is split into many rows weighs exactly as much as one that
is not.

Aborted and failed rollouts leave the baseline: they are not zeros in disguise. A group in which all rewards are
equal, or which has one rollout, says nothing about what to prefer: its advantages are exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_plugin.errors import LayoutError, nearest
from slime_plugin.methods.row import Layout
from slime_plugin.record import STATUSES, Meta
from slime_plugin.record.schema import record_label

LEFT_OUT = frozenset({"aborted", "failed"})
"""Statuses whose rollouts are neither in the baseline nor trained."""
_EPSILON = 1e-6
"""Added to the standard deviation, as slime does."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What every trained token of one rollout gets."""

    included: bool
    """False for a rollout that is neither in the baseline nor trained; its numbers are 0 and mean nothing."""
    advantage: float
    """Relative to the group."""
    token_weight: float
    """Factor of each trained token in the batch loss."""


def assign_credit(metas: Sequence[Meta], layouts: Sequence[Layout], *, std: bool = True) -> list[Credit]:
    """GRPO over rollouts.

    The batch loss is ``sum over rollouts, over trained tokens: token_weight * token loss``, the mean over rollouts of
    the mean over each rollout's trained tokens. Every rollout that is not left out counts, also one that has nothing
    to train under this method, so that methods are compared on the same scale. ``std`` divides advantages by the
    group's standard deviation.
    """
    advantages = group_advantages(metas, std=std)
    rollouts = int(np.count_nonzero(~np.isnan(advantages)))
    credits = []
    for advantage, layout in zip(advantages, layouts, strict=True):
        if math.isnan(advantage):
            credits.append(Credit(included=False, advantage=0.0, token_weight=0.0))
        else:
            weight = 1.0 / (rollouts * layout.trained) if layout.trained else 0.0
            credits.append(Credit(included=True, advantage=float(advantage), token_weight=weight))
    return credits


def group_advantages(metas: Sequence[Meta], *, std: bool = True) -> np.ndarray:
    """[rollouts] reward less the mean of the group; NaN for a rollout that is left out."""
    _check(metas)
    advantages = np.full(len(metas), np.nan)
    groups: dict[object, list[int]] = {}
    for i, meta in enumerate(metas):
        if meta.status not in LEFT_OUT:
            groups.setdefault(meta.group, []).append(i)
    for members in groups.values():
        rewards = np.array([metas[i].reward for i in members], dtype=np.float64)
        if np.ptp(rewards) == 0:  # also a group of one; the mean would leave a rounding error behind
            advantages[members] = 0.0
            continue
        centred = rewards - rewards.mean()
        advantages[members] = centred / (rewards.std(ddof=1) + _EPSILON) if std else centred
    return advantages


def _check(metas: Sequence[Meta]) -> None:
    seen: set[str | int] = set()
    for meta in metas:
        label = record_label(meta)
        if meta.id is not None and meta.id in seen:
            raise LayoutError(f"{label}: in the batch twice; a rollout counts once, whatever the number of its rows")
        if meta.id is not None:
            seen.add(meta.id)
        if meta.status not in STATUSES:
            raise LayoutError(
                f"{label}: status {meta.status!r:.40} gets no credit; use {nearest(meta.status, STATUSES)}"
            )
        if meta.status in LEFT_OUT:
            continue
        if meta.group is None:
            raise LayoutError(f"{label}: no group; set meta.group to the prompt it was sampled for")
        if meta.reward is None or not math.isfinite(meta.reward):
            what = "no reward" if meta.reward is None else f"reward {meta.reward}"
            raise LayoutError(f"{label}: status {meta.status} but {what}; score it, or mark it aborted to leave it out")
