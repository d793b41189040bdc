"""Naive-Compressed: one chain over the last view, as most pipelines train today. **Not exact.**

Pitfall A, time-travel leakage: a token is scored as if every later edit had already happened, so without what it
had read. Sampled tokens that an edit removed are not trained at all; they are counted by the kind of edit that
removed them.
"""

from __future__ import annotations

from slime_plugin.config.method import NaiveCompressed
from slime_plugin.methods.row import Layout, Row, chain_row
from slime_plugin.tree import Trajectory, branch_of, diverging_leaves


def lay_out(trajectory: Trajectory, method: NaiveCompressed) -> Layout:
    return Layout(
        method.type,
        compressed_rows(trajectory),
        lost=lost_to_eviction(trajectory),
        off_context=diverging_leaves(trajectory).size,
    )


def compressed_rows(trajectory: Trajectory) -> tuple[Row, ...]:
    """The last view, cut after its last trained token; no row if it holds none."""
    last = trajectory.views[-1]
    trained = trajectory.record.generated[last]
    trained[:1] = False  # nothing precedes the first token, so nothing predicts it
    branch = branch_of(trajectory.layers - 1, last, trained)
    return (chain_row(trajectory.record, branch.tape, branch.trained),) if len(branch) else ()


def lost_to_eviction(trajectory: Trajectory) -> dict[str, int]:
    """Sampled tokens that the last view does not hold, by the edit that took them last, or cannot train."""
    record = trajectory.record
    lost: dict[str, int] = {}
    gone = record.generated & ~trajectory.in_view(trajectory.layers - 1)
    for k in reversed(range(trajectory.layers - 1)):
        evicted = trajectory.evicted(k)
        taken = int(gone[evicted].sum())
        gone[evicted] = False
        if taken:
            cause = f"evicted by {record.edits[k].kind}"
            lost[cause] = lost.get(cause, 0) + taken
    if record.generated[trajectory.views[-1][0]]:
        lost["no prefix left"] = 1
    return lost
