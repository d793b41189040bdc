"""Branch k: view k, cut after the last token that was sampled in layer k.

Tokens after it have no loss and condition nothing, so the cut changes no value and no gradient. A layer in which
nothing was sampled has an empty branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_plugin.record.arrays import BoolArray, IntArray
from slime_plugin.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Branch:
    """A root-to-leaf path, and which of its tokens have a loss."""

    layer: int
    tape: IntArray
    """[n] tape positions in context order."""
    trained: BoolArray
    """[n] sampled in this layer; the last entry is always True."""

    def __len__(self) -> int:
        return len(self.tape)


def branch_of(layer: int, tape: IntArray, trained: BoolArray) -> Branch:
    """Cut a path after its last trained token."""
    last = np.flatnonzero(trained)[-1:]
    stop = int(last[0]) + 1 if last.size else 0
    return Branch(layer, tape[:stop], trained[:stop])


def branches_of(trajectory: Trajectory) -> list[Branch]:
    """The non-empty branches, in the order of their layers."""
    every = (branch_of(k, trajectory.views[k], trajectory.sampled_in(k)) for k in range(trajectory.layers))
    return [branch for branch in every if len(branch)]
