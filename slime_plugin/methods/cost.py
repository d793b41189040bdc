"""What a method computes of an average rollout. The planner multiplies it by a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_plugin.config.workload import Workload as Workload
from slime_plugin.methods.row import Layout, Row


@dataclass(frozen=True, slots=True)
class Computed:
    """What a method computes of one rollout."""

    tokens: float
    """With gradient."""
    pairs: float
    """Query-key pairs of these."""
    teacher_tokens: float
    """Without gradient."""
    teacher_pairs: float
    longest: int
    """Tokens of the longest row that has to fit."""
    gathered: float
    """Keys that tree attention gathers at most, per token of a row: each branch once; 0 for chains."""
    leaves: float
    """Rows of the KL to the teacher, per token of a row."""

    @classmethod
    def counted(cls, layouts: Sequence[Layout]) -> Computed:
        """Sums over rollouts that are laid out, without what is gathered and the rows of leaves."""
        rows = [row for layout in layouts for row in layout.rows]
        teachers = [teacher.row for layout in layouts for teacher in layout.teachers]
        tokens, teacher_tokens = (sum(map(len, part)) for part in (rows, teachers))
        longest = max(map(len, rows), default=0)
        return cls(tokens, _pairs(rows), teacher_tokens, _pairs(teachers), longest, 0.0, 0.0)

    @classmethod
    def chains(cls, tokens: float, length: float, longest: float) -> Computed:
        """Plain sequences of ``length`` tokens."""
        return cls(tokens, tokens * length / 2, 0, 0, round(longest), 0.0, 0.0)


def _pairs(rows: Sequence[Row]) -> int:
    """A token sees its ancestors and itself."""
    return sum(int(row.position.sum(dtype=np.int64)) + len(row) for row in rows)
