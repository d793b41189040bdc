"""The packed 4D mask: all branches in one forward pass. Three packings:

* ``trie`` (default) computes every distinct (prefix, token) pair once. Exact, and as small as a row with one loss per
  token can be.
* ``replicated`` puts the branches side by side, as the paper's own implementation does. Exact.
* ``union`` keeps each tape token once and hides it outside its lifetime: the paper's mask equation taken literally.
  **Not exact** - a survivor decoded before an eviction keeps a hidden state that has seen the evicted span, and one
  position id where each branch needs its own. It is kept as a diagnostic.

A tree over ``budget`` tokens is split into several trees, one row each; which tokens are trained, and with which
weight, stays the same.
"""

from __future__ import annotations

from slime_plugin.config.method import Mask4d
from slime_plugin.methods.row import Layout, Row, chain_row, forest_row, trie_row, union_row
from slime_plugin.tree import Branch, Trajectory, branches_of, build_trie, split_branches


def lay_out(trajectory: Trajectory, method: Mask4d) -> Layout:
    rows: tuple[Row, ...] = ()
    branches = branches_of(trajectory)
    if branches and method.packing == "union":
        rows = (union_row(trajectory, 1 + int(branches[-1].tape[-1])),)
    elif branches:
        rows = tuple(_pack(trajectory, group, method.packing) for group in _groups(trajectory, branches, method))
    return Layout(method.type, rows, packing=method.packing, off_context=None if method.packing == "union" else 0)


def _groups(trajectory: Trajectory, branches: list[Branch], method: Mask4d) -> list[list[Branch]]:
    if method.budget is None:
        return [branches]
    return split_branches(trajectory.record.tokens, branches, method.budget, trajectory.record.label)


def _pack(trajectory: Trajectory, branches: list[Branch], packing: str) -> Row:
    record = trajectory.record
    if packing == "trie":
        return trie_row(record, build_trie(record.tokens, branches))
    return forest_row(record, [chain_row(record, branch.tape, branch.trained) for branch in branches])
