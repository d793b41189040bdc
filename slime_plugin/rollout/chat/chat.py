"""The chat interface: every piece of a conversation is rendered once, independently of the others.

A context is the concatenation of its pieces: the prompt, messages, and turns of the policy between
:meth:`Chat.open_turn` and :meth:`Chat.close_turn`. What the policy sampled is never rendered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.rollout.messages import Message


class ChatError(MemoryWalkerError):
    """A tokenizer or template with which a conversation cannot be continued token by token."""


class ToolDescription(Protocol):
    """A tool in the prompt."""

    @property
    def name(self) -> str: ...

    def to_json(self) -> dict[str, Any]:
        """As the function schema that chat templates expect."""


class Chat(Protocol):
    """Renders the pieces of a conversation."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""

    def prompt(self, system: str, question: str, tools: Sequence[ToolDescription]) -> list[int]:
        """The head and the question."""

    def head(self, system: str, tools: Sequence[ToolDescription]) -> list[int]:
        """System message and tools, before the first message. May be empty."""

    def render(self, message: Message) -> list[int]:
        """A message after a turn or another message."""

    def reply(self, text: str) -> list[int]:
        """A whole turn from text, for one that was not sampled."""

    def open_turn(self) -> list[int]:
        """Tokens before the sampled tokens of a turn."""

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        """Tokens after them, with a stop token if none was sampled."""

    def text(self, sampled: Sequence[int]) -> str:
        """Text of a turn, without the stop token."""

    def cut(self, text: str, tokens: int) -> str:
        """The text, or its first tokens and a note on its length."""


def encodable(text: str) -> str:
    """Replace lone surrogates by ?: JSON allows them, tokenizers do not."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def check_vocabulary(folder: Path, tokens: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for: one would crash the engine."""
    path = folder / "config.json"
    if not path.is_file():
        return  # a tokenizer without a model
    rows = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    if isinstance(rows, int) and tokens > rows:
        raise ChatError(
            f"{folder}: the tokenizer has {tokens} tokens and the model {rows}; they do not belong together"
        )


class TokenizerText:
    """Text of token ids, for chats that have a tokenizer with ``decode``."""

    _tokenizer: Any
    stop_ids: frozenset[int]

    def text(self, sampled: Sequence[int]) -> str:
        ended = bool(sampled) and sampled[-1] in self.stop_ids
        return self._decode(sampled[:-1] if ended else sampled)

    def cut(self, text: str, tokens: int) -> str:
        ids = self._encode_text(text)
        if len(ids) <= tokens:
            return text
        kept = self._decode(ids[:tokens]).rstrip("\ufffd")  # the last character may be incomplete
        return f"{kept}\n[cut after {tokens} of {len(ids)} tokens]"

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _encode_text(self, text: str) -> list[int]:
        """Ids of a text, in which control tokens are text."""
        raise NotImplementedError
