"""What a method computes of an average rollout. The planner multiplies it by a model."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugin.config.workload import Workload as Workload


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
    def chains(cls, tokens: float, length: float, longest: float) -> Computed:
        """Plain sequences of ``length`` tokens."""
        return cls(tokens, tokens * length / 2, 0, 0, round(longest), 0.0, 0.0)
