"""LogitTree: one chain per branch, each sampled token trained on the branch it was sampled on. Exact.

It works with any model and any kernel, because each branch is an ordinary sequence; it pays for the shared trunk
once per branch.
"""

from __future__ import annotations

from slime_plugin.config.method import LogitTree
from slime_plugin.methods.row import Layout, chain_row
from slime_plugin.tree import Trajectory, branches_of


def lay_out(trajectory: Trajectory, method: LogitTree) -> Layout:
    record = trajectory.record
    rows = tuple(chain_row(record, branch.tape, branch.trained) for branch in branches_of(trajectory))
    return Layout(method.type, rows)
