"""The *place* of a sampled token: the last edit before it, and whether the token is among the first ``NEAR`` after it.

Logdiff is summed by place, since edits cause it. Edit kinds of users share the places ``custom``: the keys of metrics
are fixed, because slime's reducer adds them by position.
"""

from __future__ import annotations

import numpy as np

from slime_plugin.record import KINDS
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree.trajectory import Trajectory

NEAR = 16
_KINDS = (*KINDS, "custom")
PLACES = ("start", *(f"{kind}/{where}" for kind in _KINDS for where in ("near", "far")))


def places_of(trajectory: Trajectory, near: int = NEAR) -> IntArray:
    """[L] index in ``PLACES`` of every tape token; 0 for tokens that were not sampled."""
    record = trajectory.record
    places = np.zeros(len(record), dtype=np.int32)
    for k, edit in enumerate(record.edits, start=1):
        view = trajectory.views[k]
        sampled = view[trajectory.sampled_in(k)]
        kind = 1 + 2 * _KINDS.index(edit.kind if edit.kind in KINDS else "custom")
        places[sampled] = np.where(np.arange(sampled.size) < near, kind, kind + 1)
    return places
