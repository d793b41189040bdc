"""What turning messages into tokens takes: every piece of a conversation rendered once, on its own.

A context is the concatenation of its pieces, whatever an editor did to them: the prompt, messages, and turns of the
policy between :meth:`Chat.open_turn` and :meth:`Chat.close_turn`. What the policy sampled is never rendered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_plugin.bridge.messages import Message
from slime_plugin.errors import MemoryWalkerError


class ChatError(MemoryWalkerError):
    """A tokenizer or template with which a conversation cannot be continued token by token."""


class Described(Protocol):
    """A tool as the policy is told of it."""

    @property
    def name(self) -> str: ...

    def to_json(self) -> dict[str, Any]:
        """As the function schema that chat templates expect."""
        ...


class Chat(Protocol):
    """Renders the pieces of a conversation."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    def prompt(self, system: str, question: str, tools: Sequence[Described]) -> list[int]:
        """What every rollout of a question begins with: the head and the question."""
        ...

    def head(self, system: str, tools: Sequence[Described]) -> list[int]:
        """What stands before the first message; nothing if there is nothing to say."""
        ...

    def render(self, message: Message) -> list[int]:
        """A message that follows a finished turn or another message."""
        ...

    def reply(self, text: str) -> list[int]:
        """A whole turn that nobody sampled, from its text."""
        ...

    def open_turn(self) -> list[int]:
        """What stands before the tokens of a turn."""
        ...

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        """What stands after them; a turn that was cut off gets the stop token it did not sample."""
        ...

    def text(self, sampled: Sequence[int]) -> str:
        """What the policy said, without the stop token."""
        ...

    def cut(self, text: str, tokens: int) -> str:
        """The text, or its beginning and a note on its length if it has more tokens than that."""
        ...


def encodable(text: str) -> str:
    """The text, with ? for halves of surrogate pairs: JSON may carry those, tokenizers may not."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def check_vocabulary(folder: Path, tokens: int) -> None:
    """An id that the model has no embedding for would take the whole engine down."""
    path = folder / "config.json"
    if not path.is_file():
        return  # a tokenizer without a model
    rows = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    if isinstance(rows, int) and tokens > rows:
        raise ChatError(
            f"{folder}: the tokenizer has {tokens} tokens and the model {rows}; they do not belong together"
        )


def cut_note(kept: int, there_were: int) -> str:
    return f"\n[cut after {kept} of {there_were} tokens]"
