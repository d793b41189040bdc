"""The packed 4D mask: all branches in one forward pass. Three packings:

* ``trie`` (default) computes every distinct (prefix, token) pair once. Exact, and as small as a row with one loss per
  token can be.
* ``replicated`` puts the branches side by side, as the paper's own implementation does. Exact.
* ``union`` keeps each tape token once and hides it outside its lifetime: the paper's mask equation taken literally.
  **Not exact**: a survivor sampled before an eviction keeps a hidden state that has seen the evicted span, and one
  position id where each branch needs its own. Kept as a diagnostic.

A tree over ``budget`` tokens is split into several trees, one row each; which tokens are trained, and with which
weight, stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from slime_plugin.config.method import Mask4d
from slime_plugin.methods.base import Method
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.row import Layout, Row, chain_row, forest_row, make_row, trie_row
from slime_plugin.record.arrays import BoolArray, IntArray, read_only
from slime_plugin.tree import Branch, Trajectory, branches_of, build_trie, split_branches

SettingsType = TypeVar("SettingsType", bound=Mask4d)


class Mask4dMethod(Method[SettingsType], Generic[SettingsType]):
    Settings = Mask4d
    trees = True

    @property
    def exact(self) -> bool:
        return not self.only_scored

    @property
    def only_scored(self) -> bool:
        return self.settings.packing == "union"

    @property
    def description(self) -> str:
        return f"{self.name}, packing {self.settings.packing}"

    @property
    def budget(self) -> int | None:
        return self.settings.budget

    @property
    def splits(self) -> bool:
        return self.settings.packing == "trie"

    def lay_out(self, trajectory: Trajectory) -> Layout:
        branches = branches_of(trajectory)
        rows: tuple[Row, ...] = ()
        if branches and self.only_scored:
            rows = (_union_row(trajectory, 1 + int(branches[-1].tape[-1])),)
        elif branches:
            rows = tuple(self._pack(trajectory, group) for group in self._groups(trajectory, branches))
        return Layout(self.name, rows, off_context=0 if self.exact else None)

    def _groups(self, trajectory: Trajectory, branches: list[Branch]) -> list[list[Branch]]:
        """One group of branches per row."""
        if self.budget is None:
            return [branches]
        return split_branches(trajectory.record.tokens, branches, self.budget, trajectory.record.label)

    def _pack(self, trajectory: Trajectory, branches: list[Branch]) -> Row:
        record = trajectory.record
        if self.settings.packing == "trie":
            return trie_row(record, build_trie(record.tokens, branches))
        return forest_row(record, [chain_row(record, branch.tape, branch.trained) for branch in branches])

    def problems(self, vocabulary: int | None) -> Iterator[str]:
        if self.only_scored:
            yield "method.packing: union is a diagnostic for score and is not exact; use packing trie"

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        one_branch = work.branches == 1
        if self.settings.packing != "trie":
            longest = work.longest_tape * work.branch_tokens / work.tape
            return Computed.chains(work.branch_tokens, work.live, context_tokens if one_branch else longest)
        # The new tokens of a branch hang at its end, so on average at its length minus half of them.
        pairs = work.trie_tokens * (work.branch_tokens - work.trie_tokens / 2) / work.branches
        longest = self.budget or work.longest_tape * work.trie_tokens / work.tape
        gathered = 0.0 if one_branch else work.branch_tokens / work.trie_tokens
        return Computed(work.trie_tokens, pairs, 0, 0, context_tokens if one_branch else round(longest), gathered, 0.0)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Which tokens a query of the union row may see: those before it in the view of its own layer."""

    layer: IntArray
    """[N] the layer in which the token first appears."""
    rank: IntArray
    """[K+1, N] its index in each view, -1 where it is not in it."""

    def mask(self) -> BoolArray:
        rank_of_key = self.rank[self.layer]  # [N, N] index of key j in the view of query i
        own = np.diagonal(rank_of_key)[:, None]
        return (rank_of_key >= 0) & (rank_of_key <= own)

    def to_json(self) -> dict[str, Any]:
        return {"layer": self.layer.tolist(), "rank": self.rank.tolist()}


def _union_row(trajectory: Trajectory, stop: int) -> Row:
    """The first ``stop`` tape tokens, each following the one before it in the view of its own layer."""
    record = trajectory.record
    tape = np.arange(stop, dtype=np.int32)
    parent = np.full(stop, -1, dtype=np.int32)
    rank = np.full((trajectory.layers, stop), -1, dtype=np.int32)
    for k, view in enumerate(trajectory.views):
        kept = view[view < stop]
        rank[k, kept] = np.flatnonzero(view < stop)
        follows = np.concatenate(([-1], view[:-1])).astype(np.int32)
        here = (trajectory.born[view] == k) & (view < stop)
        parent[view[here]] = follows[here]
    lifetimes = Lifetimes(trajectory.born[:stop], read_only(rank))
    return make_row(record, tape, parent, trajectory.depth[:stop], record.generated[:stop], lifetimes)


METHOD = Mask4dMethod
