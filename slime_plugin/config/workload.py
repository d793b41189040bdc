"""The size of an average rollout, in tokens: what ``memorywalker plan`` multiplies by a model.

Every harness declares an estimate of its own (``config/harness.py``); ``plan --records`` counts recorded rollouts
instead. L, C, R, D and the sums over branches and tree are defined in ``docs/layouts.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rollout, on average over an iteration."""

    turns: float
    sampled: float
    """R: sampled tokens."""
    tape: float
    """L: tokens that were ever visible."""
    final: float
    """C: tokens of the last live context."""
    branches: float
    """K + 1: live contexts."""
    branch_tokens: float
    """Sum over the branches."""
    trie_tokens: float
    """N_trie: nodes of the prefix tree."""
    teacher_tokens: float
    """Tokens of the teacher row of a method that distils."""
    leaves: float
    """D: diverging leaves."""
    longest_tape: int
    """Longest tape that has to fit, of a single rollout."""

    @property
    def live(self) -> float:
        """Tokens of a live context at its end."""
        return self.branch_tokens / self.branches
