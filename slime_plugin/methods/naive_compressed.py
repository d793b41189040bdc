"""Naive-Compressed: one chain over the last view, as most pipelines train today. **Not exact.**

Pitfall A, time-travel leakage: a token is scored as if every later edit had already happened, so without what it had
read. Sampled tokens that an edit removed are not trained; they are counted by the kind of edit that removed them.
"""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from slime_plugin.config.frozen import Frozen
from slime_plugin.config.method import NaiveCompressed
from slime_plugin.methods.base import Method
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.row import Layout, Row, chain_row
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory, branch_of, diverging_leaves

SettingsType = TypeVar("SettingsType", bound=Frozen)


class NaiveCompressedMethod(Method[SettingsType], Generic[SettingsType]):
    """Trains the last view, cut after its last sampled token."""

    Settings: ClassVar[type[Frozen]] = NaiveCompressed

    def lay_out(self, trajectory: Trajectory) -> Layout:
        return self.lay_out_with(trajectory, diverging_leaves(trajectory))

    def lay_out_with(self, trajectory: Trajectory, leaves: IntArray) -> Layout:
        """With the diverging leaves, which are the off-context tokens of the last view."""
        return Layout(self.name, _last_view(trajectory), lost=_lost_to_eviction(trajectory), off_context=leaves.size)

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        return Computed.chains(work.final, work.final, context_tokens)


def _last_view(trajectory: Trajectory) -> tuple[Row, ...]:
    """No row if the last view has no sampled token that something predicts."""
    last = trajectory.views[-1]
    trained = trajectory.record.generated[last]
    trained[:1] = False  # nothing precedes the first token, so nothing predicts it
    branch = branch_of(trajectory.layers - 1, last, trained)
    return (chain_row(trajectory.record, branch.tape, branch.trained),) if len(branch) else ()


def _lost_to_eviction(trajectory: Trajectory) -> dict[str, int]:
    """Sampled tokens outside the last view, by the edit that evicted them last, or without a prefix in it."""
    record = trajectory.record
    lost: dict[str, int] = {}
    missing = record.generated & ~trajectory.in_view(trajectory.layers - 1)
    for k in reversed(range(trajectory.layers - 1)):
        evicted = trajectory.evicted(k)
        number = int(missing[evicted].sum())
        missing[evicted] = False
        if number:
            cause = f"evicted by {record.edits[k].kind}"
            lost[cause] = lost.get(cause, 0) + number
    if record.generated[trajectory.views[-1][0]]:
        lost["no prefix left"] = 1
    return lost


METHOD = NaiveCompressedMethod
