"""What a conversation is made of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """Text that enters the context from outside. What the policy says is tokens, never a message to be rendered."""

    role: Role
    content: str
    name: str | None = None
    """Which tool answered."""
    note: bool = False
    """Of role tool, but not a tool result: an editor's acknowledgement, or what stands in place of something."""


@dataclass(frozen=True, slots=True)
class Question:
    """One task of a rollout: what is asked, and what counts as right."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Every one of them is right."""

    @property
    def digest(self) -> str:
        """Tells it from another question that goes by the same id."""
        return hashlib.blake2b(repr((self.text, self.answers)).encode(), digest_size=6).hexdigest()
