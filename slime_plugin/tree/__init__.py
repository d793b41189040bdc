"""Derived from a record: layers, branches, prefix tree, diverging leaves, counts. Loops over layers, never tokens."""

from slime_plugin.tree.branches import Branch, branch_of, branches_of
from slime_plugin.tree.counts import Counts, count
from slime_plugin.tree.leaves import diverging_leaves, off_context
from slime_plugin.tree.split import split_branches
from slime_plugin.tree.trajectory import Trajectory
from slime_plugin.tree.trie import Trie, build_trie

__all__ = [
    "Branch",
    "Counts",
    "Trajectory",
    "Trie",
    "branch_of",
    "branches_of",
    "build_trie",
    "count",
    "diverging_leaves",
    "off_context",
    "split_branches",
]
