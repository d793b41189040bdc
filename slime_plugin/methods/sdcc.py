"""SDCC: the compressed walk with gradient, and a teacher row without, joined by a forward KL at the diverging leaves.

The student is exactly Naive-Compressed. The teacher row is the prefix tree of the live contexts that hold a
diverging leaf, each cut after the last of them; where nothing diverges there is no teacher and nothing extra to
compute.
"""

from __future__ import annotations

import numpy as np

from slime_plugin.config.method import Sdcc
from slime_plugin.methods.naive_compressed import compressed_rows, lost_to_eviction
from slime_plugin.methods.row import Layout, Teacher, trie_row
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory, branch_of, build_trie, diverging_leaves


def lay_out(trajectory: Trajectory, method: Sdcc) -> Layout:
    leaves = diverging_leaves(trajectory)
    return Layout(
        method.type,
        compressed_rows(trajectory),
        teachers=_teachers(trajectory, leaves),
        lost=lost_to_eviction(trajectory),
        off_context=leaves.size,
    )


def _teachers(trajectory: Trajectory, leaves: IntArray) -> tuple[Teacher, ...]:
    if not leaves.size:
        return ()
    record = trajectory.record
    is_leaf = np.zeros(len(record), dtype=np.bool_)
    is_leaf[leaves] = True
    branches = [
        branch_of(k, view, is_leaf[view] & (trajectory.born[view] == k)) for k, view in enumerate(trajectory.views)
    ]
    trie = build_trie(record.tokens, [branch for branch in branches if len(branch)])
    place = np.zeros(len(record), dtype=np.int32)  # [L] where the leaves stand in the teacher row
    target = np.flatnonzero(trie.trained)
    place[trie.tape[target]] = target
    student = np.flatnonzero(is_leaf[trajectory.views[-1]]).astype(np.int32)
    return (Teacher(trie_row(record, trie, trained=False), student, place[leaves]),)
