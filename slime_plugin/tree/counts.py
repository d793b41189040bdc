"""Counts of a rollout, in the paper's notation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from slime_plugin.tree.branches import branches_of
from slime_plugin.tree.leaves import diverging_leaves
from slime_plugin.tree.trajectory import Trajectory
from slime_plugin.tree.trie import build_trie


@dataclass(frozen=True, slots=True)
class Counts:
    """One rollout. Field names are the keys of the JSON output."""

    K: int
    """Edits, so K+1 layers."""
    D: int
    """Diverging leaves."""
    E: tuple[int, ...]
    """|E_k|: positions that edit k evicted."""
    L: int
    """Tape tokens, |H_full|."""
    C: int
    """Tokens of the last view, |H_comp|."""
    R: int
    """Sampled tokens on the tape."""
    sampled: int
    """R and the untrained tokens."""
    longest_view: int
    """Tokens of the longest live context."""
    branch_tokens: int
    """Sum over the branches: tokens that LogitTree computes."""
    trie_tokens: int
    """Nodes of the prefix tree: distinct (prefix, token) pairs above a trained token, and twins."""
    evicted: int
    """Tape positions that left the live context at least once."""

    @property
    def compression(self) -> float:
        """Share of the tape that left the live context at least once; the paper's c_i."""
        return self.evicted / self.L

    @property
    def trie_ratio(self) -> float | None:
        """``trie_tokens / branch_tokens``; None if nothing was sampled."""
        return self.trie_tokens / self.branch_tokens if self.branch_tokens else None

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"compression": self.compression, "trie_ratio": self.trie_ratio}


def count(trajectory: Trajectory) -> Counts:
    record = trajectory.record
    branches = branches_of(trajectory)
    evictions = [trajectory.evicted(k) for k in range(trajectory.layers - 1)]
    ever = np.zeros(len(record), dtype=np.bool_)
    for evicted in evictions:
        ever[evicted] = True
    return Counts(
        K=trajectory.layers - 1,
        D=int(diverging_leaves(trajectory).size),
        E=tuple(int(evicted.size) for evicted in evictions),
        L=len(record),
        C=int(trajectory.views[-1].size),
        R=int(record.generated.sum()),
        sampled=record.sampled,
        longest_view=max(int(view.size) for view in trajectory.views),
        branch_tokens=sum(len(branch) for branch in branches),
        trie_tokens=len(build_trie(record.tokens, branches)),
        evicted=int(ever.sum()),
    )


def statistics_of(counts: Sequence[Counts]) -> dict[str, float | None]:
    """Means and sums over rollouts; what is undefined is None, never 0.

    ``frequency`` is the share of rollouts with an eviction, ``depth`` the mean share of the tape that these lost.
    """
    shares = [c.compression for c in counts if c.evicted]
    tape, evicted, branches, trie = (
        sum(getattr(c, key) for c in counts) for key in ("L", "evicted", "branch_tokens", "trie_tokens")
    )
    return {
        **{key: _mean([getattr(c, key) for c in counts]) for key in ("K", "D", "L", "C", "R")},
        "E": _mean([size for c in counts for size in c.E]),
        "frequency": len(shares) / len(counts) if counts else None,
        "depth": _mean(shares),
        "eviction_density": evicted / tape if tape else None,
        "branch_tokens": branches,
        "trie_tokens": trie,
        "trie_ratio": trie / branches if branches else None,
        "sampled": sum(c.sampled for c in counts),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
