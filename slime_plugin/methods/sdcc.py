"""SDCC: the last view with gradient, and a teacher row without, joined by a forward KL at the diverging leaves.

The student is exactly Naive-Compressed. The teacher row is the prefix tree of the live contexts that hold a diverging
leaf, each cut after the last of them. Where nothing diverges there is no teacher and nothing more to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from slime_plugin.config.method import Sdcc
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.naive_compressed import NaiveCompressedMethod
from slime_plugin.methods.row import Layout, Teacher, trie_row
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory, branch_of, build_trie, diverging_leaves


class SdccMethod(NaiveCompressedMethod[Sdcc]):
    Settings = Sdcc

    @property
    def distillation(self) -> Sdcc:
        return self.settings

    def lay_out(self, trajectory: Trajectory) -> Layout:
        leaves = diverging_leaves(trajectory)
        return replace(self.lay_out_with(trajectory, leaves), teachers=_teachers(trajectory, leaves))

    def problems(self, vocabulary: int | None) -> Iterator[str]:
        if vocabulary is not None and (self.settings.top_k or 0) > vocabulary:
            yield (
                f"method.top_k: {self.settings.top_k} of a vocabulary of {vocabulary}; "
                "leave it out to compare the whole vocabulary"
            )

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        return replace(
            super().cost(work, context_tokens),
            teacher_tokens=work.teacher_tokens,
            teacher_pairs=work.teacher_tokens * work.live / 2,
            leaves=work.leaves / work.final,
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
    index = np.zeros(len(record), dtype=np.int32)  # [L] of the leaves in the teacher row
    target = np.flatnonzero(trie.trained)
    index[trie.tape[target]] = target
    student = np.flatnonzero(is_leaf[trajectory.views[-1]]).astype(np.int32)
    return (Teacher(trie_row(record, trie, trained=False), student, index[leaves]),)


METHOD = SdccMethod
