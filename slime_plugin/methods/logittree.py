"""LogitTree: one chain per branch, each sampled token trained on the branch it was sampled on. Exact.

Each branch is an ordinary sequence, so it works with any model and any kernel. The shared trunk is computed once per
branch.
"""

from __future__ import annotations

from slime_plugin.config.method import LogitTree
from slime_plugin.methods.base import Method
from slime_plugin.methods.row import Layout, chain_row
from slime_plugin.tree import Trajectory, branches_of


class LogitTreeMethod(Method[LogitTree]):
    Settings = LogitTree

    @property
    def exact(self) -> bool:
        return True

    def lay_out(self, trajectory: Trajectory) -> Layout:
        record = trajectory.record
        rows = tuple(chain_row(record, branch.tape, branch.trained) for branch in branches_of(trajectory))
        return Layout(self.name, rows)


METHOD = LogitTreeMethod
