"""SDCC: the last view with gradient, and a teacher row without, joined by a forward KL at the diverging leaves.

The student is exactly Naive-Compressed, the teacher row that of :mod:`slime_plugin.methods.teacher`. Where nothing
diverges there is no teacher and nothing more to compute.
"""

from __future__ import annotations

from dataclasses import replace

from slime_plugin.config.method import Sdcc
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.naive_compressed import NaiveCompressedMethod
from slime_plugin.methods.row import Layout
from slime_plugin.methods.teacher import teachers_of
from slime_plugin.tree import Trajectory, diverging_leaves


class SdccMethod(NaiveCompressedMethod[Sdcc]):
    Settings = Sdcc

    @property
    def distillation(self) -> Sdcc:
        return self.settings

    def lay_out(self, trajectory: Trajectory) -> Layout:
        leaves = diverging_leaves(trajectory)
        return replace(self.lay_out_with(trajectory, leaves), teachers=teachers_of(trajectory, leaves))

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        return replace(
            super().cost(work, context_tokens),
            teacher_tokens=work.teacher_tokens,
            teacher_pairs=work.teacher_tokens * work.live / 2,
            leaves=work.leaves / work.final,
        )


METHOD = SdccMethod
