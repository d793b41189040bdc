"""What a record implies: layers, branches, the prefix tree, diverging leaves, and the numbers that describe them.

Everything here is derived from the record alone and computed in numpy, with loops over layers but never over tokens.
"""

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
