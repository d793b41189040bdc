"""The staircase of live contexts: what each layer of a rollout held, and what the next edit changed.

One row per layer, one column per tape position, as in the paper's figure of the trajectory tree. The terminal and
the page draw the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from slime_plugin.errors import printable
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory


class TokenRole(IntEnum):
    """What a tape position is in a layer. Where several hold, the last of this list is shown."""

    ABSENT = 0
    CONTEXT = 1
    PROMPT = 2
    SAMPLED = 3
    RESTORED = 4
    EVICTED = 5
    SAMPLED_EVICTED = 6

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]

    @property
    def css(self) -> str:
        """``sampled evicted`` has the styles of both of its classes, and its own."""
        return self.name.lower().replace("_", " ")


_MEANINGS = {
    TokenRole.ABSENT: "not in the live context",
    TokenRole.PROMPT: "prompt",
    TokenRole.CONTEXT: "context",
    TokenRole.SAMPLED: "sampled here",
    TokenRole.EVICTED: "evicted next",
    TokenRole.SAMPLED_EVICTED: "sampled, evicted next",
    TokenRole.RESTORED: "restored",
}
SHOWN = (
    TokenRole.PROMPT,
    TokenRole.CONTEXT,
    TokenRole.SAMPLED,
    TokenRole.EVICTED,
    TokenRole.SAMPLED_EVICTED,
    TokenRole.RESTORED,
)
"""The roles of a live token, as a legend lists them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One edit, described by its string."""

    kind: str
    author: str | None
    junction: int
    evicted: IntArray
    restored: IntArray
    cause: str | None = None
    """Why, where it was recovered from what an agent sent."""
    conversation: str | None = None
    """The conversation that continues after it, where a rollout has several."""

    def __str__(self) -> str:
        author = f" by {printable(self.author, 40)}" if self.author else ""
        parts = [f"evicts {self.evicted.size}"] if self.evicted.size else []
        parts += [f"restores {self.restored.size}"] if self.restored.size else []
        cause = f" ({printable(self.cause, 40)})" if self.cause else ""
        where = f"; {printable(self.conversation, 40)} continues" if self.conversation else ""
        what = ", ".join(parts) or "inserts only"
        return f"{self.kind}{cause}{author} after {self.junction} tokens: {what}{where}"


@dataclass(frozen=True, slots=True)
class Staircase:
    """K+1 rows over L columns."""

    trajectory: Trajectory
    roles: NDArray[np.uint8]
    """[K+1, L] a :class:`TokenRole` each."""
    steps: tuple[Step, ...]
    pieces: tuple[str, ...]
    """[L] what to call each token: its text if the record has it, else its id."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Staircase:
        record = trajectory.record
        layers, length = trajectory.layers, len(record)
        roles = np.full((layers, length), TokenRole.ABSENT, dtype=np.uint8)
        first_sampled = int(record.generated.argmax()) if record.generated.any() else length
        steps = []
        for k, view in enumerate(trajectory.views):
            row = roles[k]
            row[view] = TokenRole.CONTEXT
            row[view[view < first_sampled]] = TokenRole.PROMPT
            sampled = view[trajectory.sampled_in(k)]
            row[sampled] = TokenRole.SAMPLED
            if k > 0:
                row[trajectory.restored(k - 1)] = TokenRole.RESTORED
            if k < layers - 1:
                evicted = trajectory.evicted(k)
                sampled_before = row[evicted] == TokenRole.SAMPLED
                row[evicted] = np.where(sampled_before, TokenRole.SAMPLED_EVICTED, TokenRole.EVICTED)
                edit = record.edits[k]
                values = [edit.extra.get(key) for key in ("cause", "conversation")]
                texts = [value if isinstance(value, str) else None for value in values]
                restored = trajectory.restored(k)
                steps.append(Step(edit.kind, edit.author, trajectory.junctions[k], evicted, restored, *texts))
        return cls(trajectory, roles, tuple(steps), _pieces(trajectory))

    @property
    def facts(self) -> dict[str, str | int | float]:
        """The record's meta data, except lists and mappings."""
        meta = self.trajectory.record.meta.to_json()
        return {name: value for name, value in meta.items() if isinstance(value, str | int | float)}

    def describe(self, k: int) -> str:
        """Describe layer k in a few words."""
        view = self.trajectory.views[k]
        order = ", reordered" if (np.diff(view) < 0).any() else ""
        return f"{view.size} live, {int(self.trajectory.sampled_in(k).sum())} sampled{order}"


def _pieces(trajectory: Trajectory) -> tuple[str, ...]:
    record = trajectory.record
    given = record.extra.get("pieces")
    if isinstance(given, list) and len(given) == len(record) and all(isinstance(piece, str) for piece in given):
        return tuple(given)
    return tuple(map(str, record.tokens.tolist()))
