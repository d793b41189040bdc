"""The teacher of the diverging leaves: the live contexts in which they were sampled, for methods that distil."""

from __future__ import annotations

import numpy as np

from slime_plugin.methods.row import Teacher, trie_row
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory, branch_of, build_trie


def teachers_of(trajectory: Trajectory, leaves: IntArray) -> tuple[Teacher, ...]:
    """Return the teacher row of a student that trains the last view: the prefix tree of the live contexts that hold a
    diverging leaf, each cut after the last of them. Without leaves there is none."""
    if not leaves.size:
        return ()
    record = trajectory.record
    is_leaf = np.zeros(len(record), dtype=np.bool_)
    is_leaf[leaves] = True
    branches = [
        branch_of(k, view, is_leaf[view] & (trajectory.born[view] == k)) for k, view in enumerate(trajectory.views)
    ]
    trie = build_trie(record.tokens, [branch for branch in branches if len(branch)])
    index = np.zeros(len(record), dtype=np.int32)  # [L] of the leaves in the teacher row
    target = np.flatnonzero(trie.trained)
    index[trie.tape[target]] = target
    student = np.flatnonzero(is_leaf[trajectory.views[-1]]).astype(np.int32)
    return (Teacher(trie_row(record, trie, trained=False), student, index[leaves]),)
