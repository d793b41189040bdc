"""What a rollout amounts to, in tokens, and what each method makes of it: estimated, or counted in records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from slime_plugin.config.method import LogitTree, Mask4d, Method, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory, count


@dataclass(frozen=True, slots=True)
class Workload:
    """One rollout, on average over those of an iteration. ``docs/layouts.md`` defines L, C, R, D and the sums."""

    turns: float
    """Turns of the policy."""
    sampled: float
    """R: tokens that the engine samples."""
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
    """Tokens of SDCC's teacher row."""
    leaves: float
    """D: tokens at which SDCC compares."""
    longest_tape: int
    """Tokens of the longest tape that has to fit; of a single rollout, not on average."""

    @property
    def live(self) -> float:
        """Tokens of a live context at its end."""
        return self.branch_tokens / self.branches

    @classmethod
    def counted(cls, records: Iterable[Record]) -> Workload:
        """The means over recorded rollouts, and their longest tape."""
        trajectories = [Trajectory.of(record) for record in records if record.generated.any()]
        if not trajectories:
            raise MemoryWalkerError("no record with a sampled token to count")
        counts = [count(trajectory) for trajectory in trajectories]
        return cls(
            turns=fmean(_turns(trajectory.record) for trajectory in trajectories),
            sampled=fmean(c.R for c in counts),
            tape=fmean(c.L for c in counts),
            final=fmean(c.C for c in counts),
            branches=fmean(c.K + 1 for c in counts),
            branch_tokens=fmean(c.branch_tokens for c in counts),
            trie_tokens=fmean(c.trie_tokens for c in counts),
            teacher_tokens=fmean(lay_out(trajectory, Sdcc()).teacher_tokens for trajectory in trajectories),
            leaves=fmean(c.D for c in counts),
            longest_tape=max(c.L for c in counts),
        )


def _turns(record: Record) -> int:
    """Runs of sampled tokens on the tape."""
    generated = record.generated
    return int(generated[0]) + int((generated[1:] & ~generated[:-1]).sum())


# A rollout of ten turns: a prompt of 1,000 tokens, 300 sampled in each turn, 900 in each tool result. At thirty turns
# that is 36,100 tokens, where the paper's control has 36,370 as its longest request; ten turns, and 300 to 900, are
# estimates. Edits: three pops of the oldest result; a fold into 300 sampled tokens above 3,000; two offloads and a
# restore before the answer, so that there are about as many segments as the paper counts (3.90, 3.23, 4.10). Black
# boxes begin with 15,000 tokens of instructions and tools, hear 1,500 per call, and compact once.
# The longest tapes are the paper's: Max tok. of its matrix, and the 121k that AgentFold folds at most.
WORKLOADS = {
    "search_r1": Workload(10, 3_000, 12_100, 12_100, 1, 12_100, 12_100, 0, 0, 36_370),
    "tc_rag": Workload(10, 3_000, 12_100, 9_400, 4, 26_200, 21_400, 13_900, 2_100, 40_182),
    "agentfold": Workload(10, 4_200, 13_540, 2_800, 5, 18_740, 14_740, 4_060, 300, 121_000),
    "memexrl": Workload(10, 3_000, 12_140, 12_100, 4, 26_560, 17_840, 7_040, 1_500, 65_630),
    "claude_code": Workload(10, 3_600, 32_100, 19_500, 2, 47_700, 32_700, 28_200, 600, 82_779),
    "opencode": Workload(10, 3_600, 32_100, 19_500, 2, 47_700, 32_700, 28_200, 600, 76_807),
}
"""By harness. None of them was measured; ``--records`` counts those of a run instead."""
OTHERS = WORKLOADS["tc_rag"]
"""For an editor of one's own."""


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
    """Rows of SDCC's KL, per token of a row."""


def computed(method: Method, work: Workload, context_tokens: int) -> Computed:
    """``context_tokens`` is the longest live context that a rollout may have."""

    def row(tokens: float, pairs: float, longest: float, gathered: float = 0.0) -> Computed:
        unedited = work.branches == 1  # all methods compute the live context
        return Computed(tokens, pairs, 0, 0, context_tokens if unedited else round(longest), gathered, 0)

    match method:
        case NaiveCompressed():
            return row(work.final, work.final**2 / 2, context_tokens)
        case NaiveFull():
            return row(work.tape, work.tape**2 / 2, work.longest_tape)
        case LogitTree():
            return row(work.branch_tokens, work.branch_tokens * work.live / 2, context_tokens)
        case Mask4d(packing="trie"):
            # The new tokens of a branch hang at its end, so on average at its length less half of them.
            pairs = work.trie_tokens * (work.branch_tokens - work.trie_tokens / 2) / work.branches
            longest = method.budget or work.longest_tape * work.trie_tokens / work.tape
            gathered = work.branch_tokens / work.trie_tokens if work.branches > 1 else 0.0
            return row(work.trie_tokens, pairs, longest, gathered)
        case Mask4d():
            longest = work.longest_tape * work.branch_tokens / work.tape
            return row(work.branch_tokens, work.branch_tokens * work.live / 2, longest)
        case Sdcc():
            return Computed(
                work.final,
                work.final**2 / 2,
                work.teacher_tokens,
                work.teacher_tokens * work.live / 2,
                context_tokens,
                0.0,
                work.leaves / work.final,
            )
