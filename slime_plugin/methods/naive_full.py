"""Naive-Full: one chain over the whole tape. **Not exact.**

Pitfall B, stale-context leakage: a token is scored with everything that was ever visible before it, including what an
edit had already removed from its live context. Every sampled token is trained.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slime_plugin.config.method import NaiveFull
from slime_plugin.methods.base import Method
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.row import Layout, chain_row
from slime_plugin.tree import Trajectory, branch_of, off_context


class NaiveFullMethod(Method[NaiveFull]):
    Settings = NaiveFull

    def lay_out(self, trajectory: Trajectory) -> Layout:
        record = trajectory.record
        tape = np.arange(len(record), dtype=np.int32)
        cut = branch_of(0, tape, record.generated)
        rows = (chain_row(record, cut.tape, cut.trained),) if len(cut) else ()
        return Layout(self.name, rows, off_context=off_context(trajectory, tape).size)

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        return Computed.chains(work.tape, work.tape, context_tokens if work.branches == 1 else work.longest_tape)

    def plan_notes(self, work: Workload, rows: Computed) -> Iterator[str]:
        if work.branches > 1:
            yield (
                f"nothing bounds the row of naive_full but the rollout: {rows.longest:,} tokens are the longest tape "
                "expected"
            )


METHOD = NaiveFullMethod
