"""Advantages count rollouts, never rows.

One reward per rollout enters the baseline of its group, and its advantage goes to all its rows. So a rollout that is
split into many rows weighs exactly as much as one that is not.

Aborted and failed rollouts are excluded from the baseline: no reward is not a reward of 0. In a group with equal
rewards, or with one rollout, all advantages are exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slime_plugin.errors import LayoutError, nearest
from slime_plugin.record import STATUSES, Meta
from slime_plugin.record.schema import record_label

_EPSILON = 1e-6
"""Added to the standard deviation, as slime does."""


def group_advantages(metas: Sequence[Meta], *, std: bool = True) -> np.ndarray:
    """[rollouts] reward minus the mean of the group; NaN for an excluded rollout."""
    _check(metas)
    advantages = np.full(len(metas), np.nan)
    groups: dict[object, list[int]] = {}
    for i, meta in enumerate(metas):
        if not meta.excluded:
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
        if meta.excluded:
            continue
        if meta.group is None:
            raise LayoutError(f"{label}: no group; set meta.group to the prompt it was sampled for")
        if meta.reward is None or not math.isfinite(meta.reward):
            what = "no reward" if meta.reward is None else f"reward {meta.reward}"
            raise LayoutError(f"{label}: status {meta.status} but {what}; score it, or mark it aborted to leave it out")
