"""Split a tree that exceeds a token budget into trees that fit, duplicating as few nodes as possible.

In lexicographic order consecutive branches span a subtree, whose size is the sum of the branches minus what each shares
with the one before. Choosing the cuts of that order is a shortest path over K+1 nodes: O(K^2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_plugin.errors import LayoutError
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree.branches import Branch
from slime_plugin.tree.trie import build_trie, sort_branches


def split_branches(
    tokens: IntArray, branches: Sequence[Branch], budget: int, label: str = "record"
) -> list[list[Branch]]:
    """Group branches so that the prefix tree of each group has at most ``budget`` nodes.

    Among all ways to cut the depth-first order of the branches into such groups, this is one with the fewest nodes in
    total (or close to it if there are twins, which are counted for every group). Every branch is in exactly one group,
    so every sampled token keeps exactly one loss. One group per branch is LogitTree; a branch that exceeds the budget
    cannot be split without losing its context.
    """
    longest = max(branches, key=len, default=None)
    if longest is None:
        return []
    if len(longest) > budget:
        raise LayoutError(
            f"{label}: the branch of layer {longest.layer} has {len(longest)} tokens, the budget is {budget}; "
            f"raise the budget to at least {len(longest)}, or leave this rollout out"
        )
    trie = build_trie(tokens, branches)
    if len(trie) <= budget:
        return [list(branches)]
    order, adjacent = sort_branches(tokens, branches)
    # Twins are counted in full: a group holds at most as many as the whole tree, so its size is never underestimated.
    lengths = np.array([len(branches[b]) for b in order])
    first = lengths + np.array(trie.twins)[order]  # nodes a branch adds as the first of its group
    further = first - np.concatenate(([0], adjacent))  # and behind its neighbour
    upto = np.concatenate(([0], np.cumsum(further)))  # so the group [i, j) has first[i] + upto[j] - upto[i + 1]
    fewest = np.zeros(len(order) + 1, dtype=np.int64)  # nodes that the first j branches need
    cut = np.zeros(len(order) + 1, dtype=np.intp)  # where the last of their groups begins
    for j in range(1, len(order) + 1):
        sizes = first[:j] + upto[j] - upto[1 : j + 1]  # of the groups [i, j) for every i
        sizes[-1] = lengths[j - 1]  # one branch has no twins
        total = np.where(sizes <= budget, fewest[:j] + sizes, np.iinfo(np.int64).max)
        cut[j] = int(np.argmin(total))
        fewest[j] = total[cut[j]]
    groups, stop = [], len(order)
    while stop:
        start = int(cut[stop])
        groups.append([branches[b] for b in sorted(order[start:stop])])
        stop = start
    return sorted(groups, key=lambda group: group[0].layer)
