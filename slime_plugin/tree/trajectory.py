"""A record unrolled into its layers: the arrays that methods and counts start from.

Legend: L tape tokens, K edits, n_k tokens of view k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_plugin.record import Record
from slime_plugin.record.arrays import BoolArray, IntArray, read_only


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The layers of a record.

    In the paper's running example (see :mod:`slime_plugin.record.schema`) y9, at tape position 9, has ``born[9] ==
    1`` and ``depth[9] == 8``: it was sampled in layer 1, after eight live tokens.
    """

    record: Record
    views: tuple[IntArray, ...]
    """K+1 arrays [n_k]: tape positions in context order."""
    born: IntArray
    """[L] first layer that holds the position; for a sampled token, the layer it was sampled in."""
    depth: IntArray
    """[L] number of tokens before it in the view of that layer; for a sampled token, the length of its live prefix."""
    junctions: tuple[int, ...]
    """K numbers J_k: tape tokens that existed when edit k fired."""

    @classmethod
    def of(cls, record: Record) -> Trajectory:
        views = tuple(record.view_positions(k) for k in range(len(record.views)))
        born = np.full(len(record), -1, dtype=np.int32)
        depth = np.zeros(len(record), dtype=np.int32)
        junctions, existing = [], 0
        for k, view in enumerate(views):
            ranks = np.flatnonzero(born[view] < 0).astype(np.int32)
            born[view[ranks]] = k
            depth[view[ranks]] = ranks
            existing += ranks.size
            junctions.append(existing)
        for array in (*views, born, depth):
            read_only(array)
        return cls(record, views, born, depth, tuple(junctions[:-1]))

    @property
    def layers(self) -> int:
        """K+1."""
        return len(self.views)

    def in_view(self, k: int) -> BoolArray:
        """[L] whether the position is in view k."""
        mask = np.zeros(len(self.record), dtype=np.bool_)
        mask[self.views[k]] = True
        return mask

    def sampled_in(self, k: int) -> BoolArray:
        """[n_k] which tokens of view k were sampled in layer k."""
        view = self.views[k]
        sampled: BoolArray = self.record.generated[view] & (self.born[view] == k)
        return sampled

    def evicted(self, k: int) -> IntArray:
        """E_k: the positions of view k that view k+1 no longer holds, in context order."""
        view = self.views[k]
        return view[~self.in_view(k + 1)[view]]

    def restored(self, k: int) -> IntArray:
        """The positions that edit k restored: in view k+1, not in view k, but seen before."""
        view = self.views[k + 1]
        return view[~self.in_view(k)[view] & (view < self.junctions[k])]
