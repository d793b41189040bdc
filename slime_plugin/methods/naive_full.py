"""Naive-Full: one chain over the whole tape. **Not exact.**

Pitfall B, stale-context leakage: a token is scored with everything that was ever visible before it, including what
an edit had already taken from its live context. Every sampled token is trained, many of them under a context that
never was.
"""

from __future__ import annotations

import numpy as np

from slime_plugin.config.method import NaiveFull
from slime_plugin.methods.row import Layout, chain_row
from slime_plugin.tree import Trajectory, branch_of, off_context


def lay_out(trajectory: Trajectory, method: NaiveFull) -> Layout:
    record = trajectory.record
    tape = np.arange(len(record), dtype=np.int32)
    cut = branch_of(0, tape, record.generated)
    rows = (chain_row(record, cut.tape, cut.trained),) if len(cut) else ()
    return Layout(method.type, rows, off_context=off_context(trajectory, tape).size)
