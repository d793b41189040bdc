"""How a harness edits the live context during a rollout: the ``harness:`` switch of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from slime_plugin.config.custom import CUSTOM, Custom, type_of
from slime_plugin.config.frozen import Frozen


class SearchR1(Frozen):
    """The control: nothing is ever edited."""

    type: Literal["search_r1"] = "search_r1"


class TcRag(Frozen):
    """A stack of tool results from which the policy pops."""

    type: Literal["tc_rag"] = "tc_rag"
    evict: Literal["oldest", "newest", "largest"] = "oldest"
    """Which tool result leaves the context when the policy calls pop()."""
    reply: str = "removed"
    """What the policy is told after a pop; with an empty text it is told nothing."""
    empty: str = "nothing to pop"
    """What the policy is told if there is no tool result in the context."""


class AgentFold(Frozen):
    """A context that has grown too long is folded into a summary that the policy samples."""

    type: Literal["agentfold"] = "agentfold"
    threshold: int = Field(default=3000, ge=1)
    """Fold before a turn if the live context has more tokens than this."""
    keep: int = Field(default=0, ge=0)
    """How many of the last messages stay as they are."""
    summary_tokens: int = Field(default=512, ge=1)
    """Most tokens of a summary."""
    request: str = (
        "The conversation has become long. Summarise everything you have found out so far that is needed to answer the "
        "question. Your summary replaces the conversation, so nothing else of it will be visible."
    )
    """The message that asks for a summary."""


class MemexRL(Frozen):
    """A store outside the context: the policy offloads tool results under a name and retrieves them."""

    type: Literal["memexrl"] = "memexrl"
    restore: bool = True
    """Bring everything back before the turn in which the policy answers."""
    stub: str = "[stored in memory as {name}]"
    """What stands in the context in place of offloaded tool results; {name} is the name of the entry."""
    reply: str = ""
    """What the policy is told after an offload, beyond the stub; with an empty text it is told nothing."""


class ClaudeCode(Frozen):
    """A black box: Claude Code as it is deployed. What it does to its context is recovered from what it sends."""

    type: Literal["claude_code"] = "claude_code"


class OpenCode(Frozen):
    """A black box: OpenCode as it is deployed. What it does to its context is recovered from what it sends."""

    type: Literal["opencode"] = "opencode"


BLACK_BOXES = ("claude_code", "opencode")
"""Harnesses that run outside and are served as if we were their model provider; they expose no spans."""


class CustomEditor(Custom):
    """A subclass of ``slime_plugin.bridge.editors.Editor`` of your own; ``docs/extend.md`` walks through one."""


Harness = Annotated[
    Annotated[SearchR1, Tag("search_r1")]
    | Annotated[TcRag, Tag("tc_rag")]
    | Annotated[AgentFold, Tag("agentfold")]
    | Annotated[MemexRL, Tag("memexrl")]
    | Annotated[ClaudeCode, Tag("claude_code")]
    | Annotated[OpenCode, Tag("opencode")]
    | Annotated[CustomEditor, Tag(CUSTOM)],
    Discriminator(type_of),
]
