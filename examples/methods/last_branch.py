"""A method of your own: train what was sampled after the last edit, without tokens of a large logdiff.

Used by import path::

    method: {type: "examples.methods.last_branch:LastBranch", max_logdiff: 2}

``docs/extend.md`` walks through it; ``tests/train/test_own_method.py`` proves values and gradients.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from slime_plugin.config.frozen import Frozen
from slime_plugin.methods import Computed, Layout, Method, TrainedTokens, Workload, chain_row
from slime_plugin.tree import Trajectory, branches_of


class LastBranchSettings(Frozen):
    max_logdiff: float | None = Field(default=None, gt=0)
    """Tokens whose |logdiff| is larger, in nats, get no loss. No limit if not set."""


class LastBranch(Method[LastBranchSettings]):
    """One chain per rollout: the branch of the last layer. Cheap, and exact for what it trains."""

    Settings = LastBranchSettings

    @property
    def exact(self) -> bool:
        return True  # the branch is the context that its tokens were sampled under

    def lay_out(self, trajectory: Trajectory) -> Layout:
        record, last = trajectory.record, trajectory.layers - 1
        rows = tuple(
            chain_row(record, branch.tape, branch.trained) for branch in branches_of(trajectory) if branch.layer == last
        )
        lost = int(record.generated.sum()) - sum(int(row.loss_mask.sum()) for row in rows)
        return Layout(self.name, rows, lost={"before the last edit": lost} if lost else {})

    def token_factors(self, tokens: TrainedTokens) -> Any | None:
        limit = self.settings.max_logdiff
        return None if limit is None else (tokens.old - tokens.logged).abs() <= limit

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        return Computed.chains(work.final, work.final, context_tokens)
