"""What a conversation is made of."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Question:
    """One task of a rollout: what is asked, and what counts as right."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Every one of them is right."""
