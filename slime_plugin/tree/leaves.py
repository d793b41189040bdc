"""Diverging leaves: sampled tokens of the last view whose prefix there is not the one they were sampled under.

These are exactly the places where replaying the compressed walk scores a token in a context it never had, and so
exactly the places where SDCC puts its KL. Prefixes are compared as token sequences: a span that was replaced by
equal tokens does not diverge, because no model could tell.
"""

from __future__ import annotations

import numpy as np

from slime_plugin.record.arrays import IntArray
from slime_plugin.tree.trajectory import Trajectory


def diverging_leaves(trajectory: Trajectory) -> IntArray:
    """Tape positions of the diverging leaves, in the order of the last view.

    A leaf needs a prefix to be predicted from, so a sampled token that has become the very first of the last view
    is not one: it cannot be trained there at all.
    """
    tokens = trajectory.record.tokens
    last = trajectory.views[-1]
    rank = np.arange(last.size)
    sampled = trajectory.record.generated[last] & (rank > 0)
    layer = trajectory.born[last]
    diverges = np.zeros(last.size, dtype=np.bool_)
    for k in range(trajectory.layers - 1):
        view = trajectory.views[k]
        n = min(view.size, last.size)
        differs = np.flatnonzero(tokens[view[:n]] != tokens[last[:n]])
        agree = int(differs[0]) if differs.size else n  # the two contexts are equal up to here
        same_prefix = (trajectory.depth[last] == rank) & (rank <= agree)
        diverges |= sampled & (layer == k) & ~same_prefix
    return last[diverges]
