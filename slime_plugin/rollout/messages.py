"""Messages and questions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """Text that enters the context from outside. Turns of the policy are tokens, never rendered from text."""

    role: Role
    content: str
    name: str | None = None
    """Which tool answered."""
    note: bool = False
    """Role tool, but not a tool result: an editor's acknowledgement, or a placeholder."""


@dataclass(frozen=True, slots=True)
class Question:
    """The task of a rollout and its accepted answers."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Accepted answers; one is enough."""

    @property
    def digest(self) -> str:
        """Distinguishes questions that share an id."""
        return hashlib.blake2b(repr((self.text, self.answers)).encode(), digest_size=6).hexdigest()


def split_thought(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """Split a turn into the thought that it begins with, if there is one, and the rest.

    With ``opened``, the chat template may have opened the thought, so that only ``</think>`` was sampled.

    >>> split_thought("<think>\\nor not</think>\\n\\nyes"), split_thought("<think>or"), split_thought("yes")
    (('\\nor not', '\\n\\nyes'), ('or', ''), (None, 'yes'))
    >>> split_thought("or not</think>yes"), split_thought("or not</think>yes", opened=True)
    ((None, 'or not</think>yes'), ('or not', 'yes'))
    """
    before, tag, after = text.partition("<think>")
    if tag and not before.strip():
        text = after
    elif not (opened and "</think>" in text):
        return None, text
    thought, _, rest = text.partition("</think>")
    return thought, rest
