"""Where a sampled token stands: what happened last before it.

A token's *place* is nothing yet (``start``), or an edit of some kind and whether the token is one of the first ``NEAR``
sampled ones after it. Drift is summed by place, because edits are where it comes from.
"""

from __future__ import annotations

import numpy as np

from slime_plugin.record import KINDS
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree.trajectory import Trajectory

NEAR = 16
PLACES = ("start", *(f"{kind}/{where}" for kind in KINDS for where in ("near", "far")))


def places_of(trajectory: Trajectory, near: int = NEAR) -> IntArray:
    """[L] the place of every tape token, as an index of ``PLACES``; 0 for tokens that were not sampled."""
    record = trajectory.record
    places = np.zeros(len(record), dtype=np.int32)
    for k, edit in enumerate(record.edits, start=1):
        view = trajectory.views[k]
        sampled = view[trajectory.sampled_in(k)]
        kind = 1 + 2 * KINDS.index(edit.kind)
        places[sampled] = np.where(np.arange(sampled.size) < near, kind, kind + 1)
    return places
