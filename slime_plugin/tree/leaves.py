"""Off-context tokens: sampled tokens that have another prefix in a flat sequence than when they were sampled.

On the last view these are the paper's diverging leaves, where SDCC has its KL. Prefixes are compared as token
sequences, so a span that was replaced by equal tokens makes no difference.
"""

from __future__ import annotations

import numpy as np

from slime_plugin.record.arrays import IntArray
from slime_plugin.tree.trajectory import Trajectory


def off_context(trajectory: Trajectory, sequence: IntArray) -> IntArray:
    """The sampled tokens of a sequence of tape positions whose prefix in it is not their live prefix.

    Never the first token of the sequence: nothing predicts it there, so it cannot be trained.

    In the paper's running example ``y9`` was sampled after ``s y1 y2 y3 y4 y6 y7 y8``. The last view has lost y8 and
    the tape still has y5, so y9 is off context in both.
    """
    tokens = trajectory.record.tokens
    rank = np.arange(sequence.size)
    sampled = trajectory.record.generated[sequence] & (rank > 0)
    layer = trajectory.born[sequence]
    same_length = trajectory.depth[sequence] == rank
    off = np.zeros(sequence.size, dtype=np.bool_)
    for k, view in enumerate(trajectory.views):
        n = min(view.size, sequence.size)
        differs = np.flatnonzero(tokens[view[:n]] != tokens[sequence[:n]])
        agree = int(differs[0]) if differs.size else n  # the live context and the sequence are equal up to here
        off |= sampled & (layer == k) & ~(same_length & (rank <= agree))
    return sequence[off]


def diverging_leaves(trajectory: Trajectory) -> IntArray:
    """Tape positions of the diverging leaves, in the order of the last view."""
    return off_context(trajectory, trajectory.views[-1])
