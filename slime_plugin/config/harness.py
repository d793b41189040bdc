"""How a harness edits the live context during a rollout: the ``harness:`` switch of a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from slime_plugin.config.custom import CUSTOM, Custom, type_of
from slime_plugin.config.frozen import File, Frozen


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


def _switch(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value


Weight = Annotated[float, BeforeValidator(_switch), Field(ge=0, allow_inf_nan=False)]
"""How much something counts in the loss: ``on`` is 1, ``off`` is 0, any other number is a number."""

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]  # YAML has lists, and a strict tuple refuses them


class Train(Frozen):
    """What a black box has the policy do besides the task itself, and how much of it is trained on."""

    summaries: Weight = 1.0
    """Summaries that the agent asks for when it compacts its context."""
    subagents: Weight = 1.0
    """Conversations that the policy starts with itself, through the agent."""
    auxiliary: Weight = 0.0
    """What the agent asks on its own account, such as a title for the conversation."""


class BlackBox(Frozen):
    """An agent of its own that runs outside and is served as if we were its model provider."""

    program: File | None = None
    """Its program. Left out, it is looked for in ``.harnesses/bin`` of the current folder, where launch/harnesses.sh
    puts it, and then on PATH."""
    train: Train = Train()
    """How much of what it has the policy do besides the task is trained on."""
    thoughts: Literal["keep", "drop"] = "keep"
    """``keep``: the policy goes on seeing what it thought in earlier turns, also where the agent does not send it back.
    ``drop``: as in Qwen's own chat template, thoughts from before the last question are taken out."""
    workspace: File | None = None
    """A folder that is copied for every rollout, and that the agent works in; left out, it is an empty one."""
    instructions: str = "When you are done, give the final answer alone between <answer> and </answer>."
    """Stands behind the task."""
    processes: int = Field(default=16, ge=1)
    """How many agents are under way at once on one machine; each takes a few hundred MB."""
    keep_folders: bool = False
    """Leave what the agent wrote, its home and its working folder, for you to look at."""


class ClaudeCode(BlackBox):
    """A black box: Claude Code as it is deployed. What it does to its context is recovered from what it sends."""

    type: Literal["claude_code"] = "claude_code"
    tools: Names = ("Agent", "Bash", "Edit", "Read", "Write")
    """Its tools that the policy is offered, by Claude Code's names. All of these run without asking."""
    background: bool = False
    """Let the policy leave commands and subagents running behind its back; when they end depends on the machine."""
    compact_at: int | None = Field(default=None, ge=1)
    """Tokens in the context from which on it compacts. Left out, as it does by itself: at the length of the context
    less the tokens of a turn (at most 20000 of them) and 13000, which is much of a short context."""


class OpenCode(BlackBox):
    """A black box: OpenCode as it is deployed. What it does to its context is recovered from what it sends."""

    type: Literal["opencode"] = "opencode"
    tools: Names = ("bash", "edit", "glob", "grep", "read", "task", "todowrite")
    """Its tools that the policy is offered, by the names of OpenCode's permissions: ``edit`` is also ``write``. All of
    these run without asking."""
    compact_at: int | None = Field(default=None, ge=1)
    """Tokens in the context, with the last turn, from which on it compacts. Left out, as it does by itself: at the
    length of the context less the tokens of a turn."""
    keep_tokens: int | None = Field(default=None, ge=0)
    """Tokens of the last turns that a compaction leaves as they are. Left out, a quarter of ``compact_at``, but no less
    than 2000 and no more than 15000."""
    prune: bool = False
    """Replace old tool results by a note once there are many of them."""


BLACK_BOXES = ("claude_code", "opencode")
"""Harnesses that run outside and are served as if we were their model provider; they expose no spans."""


class CustomEditor(Custom):
    """A subclass of ``slime_plugin.bridge.editors.Editor`` of your own; ``docs/extend.md`` walks through one.

    Or of ``slime_plugin.tap.drivers.Driver``: a black box of your own.
    """


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
