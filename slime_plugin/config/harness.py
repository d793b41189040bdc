"""How a harness edits the live context during a rollout: the ``harness:`` switch of a configuration.

Each harness declares its keys and, for ``memorywalker plan``, the size of an average rollout. That is an estimate: ten
turns, a prompt of 1,000 tokens, 300 sampled in each turn, 900 in each tool result. At thirty turns that is 36,100
tokens, where the paper's control has 36,370 as its longest request. Edits are placed so that there are about as many
branches as the paper counts segments (3.90, 3.23, 4.10). The longest tapes are the paper's: Max tok. of its matrix, and
the 121k that AgentFold folds at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from slime_plugin.config.custom import BY_TYPE, Custom
from slime_plugin.config.frozen import File, Frozen, models_in, tag_of
from slime_plugin.config.workload import Workload


class SearchR1(Frozen):
    """The control: nothing is ever edited."""

    workload: ClassVar = Workload(
        turns=10, sampled=3_000, tape=12_100, final=12_100, branches=1, branch_tokens=12_100,
        trie_tokens=12_100, teacher_tokens=0, leaves=0, longest_tape=36_370,
    )  # fmt: skip

    type: Literal["search_r1"] = "search_r1"


class TcRag(Frozen):
    """A stack of tool results from which the policy pops."""

    # three pops of the oldest result
    workload: ClassVar = Workload(
        turns=10, sampled=3_000, tape=12_100, final=9_400, branches=4, branch_tokens=26_200,
        trie_tokens=21_400, teacher_tokens=13_900, leaves=2_100, longest_tape=40_182,
    )  # fmt: skip

    type: Literal["tc_rag"] = "tc_rag"
    evict: Literal["oldest", "newest", "largest"] = "oldest"
    """Which tool result leaves the context when the policy calls pop()."""
    reply: str = "removed"
    """The tool result of a pop; none with an empty text."""
    empty: str = "nothing to pop"
    """The tool result of a pop if the context has no tool result left."""


class AgentFold(Frozen):
    """A context that has grown too long is folded into a summary that the policy samples."""

    # a fold into 300 sampled tokens above 3,000
    workload: ClassVar = Workload(
        turns=10, sampled=4_200, tape=13_540, final=2_800, branches=5, branch_tokens=18_740,
        trie_tokens=14_740, teacher_tokens=4_060, leaves=300, longest_tape=121_000,
    )  # fmt: skip

    type: Literal["agentfold"] = "agentfold"
    threshold: int = Field(default=3000, ge=1)
    """Fold before a turn if the live context has more tokens than this."""
    keep: int = Field(default=0, ge=0)
    """How many of the last messages stay as they are."""
    summary_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of a summary."""
    request: str = (
        "The conversation has become long. Summarise everything you have found out so far that is needed to answer the "
        "question. Your summary replaces the conversation, so nothing else of it will be visible."
    )
    """The message that asks for a summary."""


class MemexRL(Frozen):
    """A store outside the context: the policy offloads tool results under a name and retrieves them."""

    # two offloads, and a restore before the answer
    workload: ClassVar = Workload(
        turns=10, sampled=3_000, tape=12_140, final=12_100, branches=4, branch_tokens=26_560,
        trie_tokens=17_840, teacher_tokens=7_040, leaves=1_500, longest_tape=65_630,
    )  # fmt: skip

    type: Literal["memexrl"] = "memexrl"
    restore: bool = True
    """Bring everything back before the turn in which the policy answers."""
    stub: str = "[stored in memory as {name}]"
    """Text that replaces offloaded tool results in the context; {name} is the name of the entry."""
    reply: str = ""
    """The tool result of an offload, beside the stub; none with an empty text."""


def _on_off(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value


TokenWeight = Annotated[float, BeforeValidator(_on_off), Field(ge=0, allow_inf_nan=False)]
"""Factor in the loss; ``on`` is 1, ``off`` is 0."""

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]  # YAML has lists, and a strict tuple refuses them


class Train(Frozen):
    """Factors in the loss: 0 or off, 1 or on, or any other number."""

    summaries: TokenWeight = 1.0
    """Summaries that the agent asks for when it compacts its context."""
    subagents: TokenWeight = 1.0
    """Conversations that the policy starts with itself, through the agent."""
    auxiliary: TokenWeight = 0.0
    """Requests of the agent itself, such as a title for the conversation."""


class BlackBox(Frozen):
    """An agent that runs as a process of its own, with the tap as its model provider."""

    # begins with 15,000 tokens of instructions and tools, gets 1,500 per call, and compacts once
    workload: ClassVar = Workload(
        turns=10, sampled=3_600, tape=32_100, final=19_500, branches=2, branch_tokens=47_700,
        trie_tokens=32_700, teacher_tokens=28_200, leaves=600, longest_tape=82_779,
    )  # fmt: skip

    program: File | None = None
    """Path of the agent's program. If not set, it is searched in ``.harnesses/bin`` of the current folder, where
    launch/harnesses.sh installs it, and then on PATH."""
    train: Train = Train()
    """What is trained on besides the task itself."""
    thoughts: Literal["keep", "drop"] = "keep"
    """``keep``: thoughts of earlier turns stay in the context, even where the agent does not send them back.
    ``drop``: as in Qwen's own chat template, thoughts from before the last question are removed."""
    workspace: File | None = None
    """Folder that is copied for every rollout as the agent's working folder. An empty one if not set."""
    instructions: str = "When you are done, give the final answer alone between <answer> and </answer>."
    """Appended to the task."""
    processes: int = Field(default=16, ge=1)
    """Agents that run at once on one machine; each takes a few hundred MB."""
    keep_folders: bool = False
    """Keep the agent's home and its working folder after a rollout."""


class ClaudeCode(BlackBox):
    """A black box: Claude Code as it is deployed. Its context edits are recovered from its requests."""

    type: Literal["claude_code"] = "claude_code"
    tools: Names = ("Agent", "Bash", "Edit", "Read", "Write")
    """Tools that the policy may call, by Claude Code's names. All of them run without asking for permission."""
    background: bool = False
    """Allow commands and subagents that run in the background; when they end depends on the machine."""
    compact_at: int | None = Field(default=None, ge=1)
    """Context size in tokens at which it compacts. If not set, its own default: the length of the context minus the
    tokens of a turn (at most 20000 of them) and 13000, which is much of a short context."""


class OpenCode(BlackBox):
    """A black box: OpenCode as it is deployed. Its context edits are recovered from its requests."""

    workload: ClassVar = replace(BlackBox.workload, longest_tape=76_807)

    type: Literal["opencode"] = "opencode"
    tools: Names = ("bash", "edit", "glob", "grep", "read", "task", "todowrite")
    """Tools that the policy may call, by the names of OpenCode's permissions: ``edit`` is also ``write``. All of them
    run without asking for permission."""
    compact_at: int | None = Field(default=None, ge=1)
    """Context size in tokens, with the last turn, at which it compacts. If not set, its own default: the length of the
    context minus the tokens of a turn."""
    keep_tokens: int | None = Field(default=None, ge=0)
    """Tokens of the last turns that a compaction keeps unchanged. If not set, a quarter of ``compact_at``, within 2000
    to 15000."""
    prune: bool = False
    """Replace old tool results by a note once there are many of them."""


class CustomHarness(Custom):
    """A subclass of ``slime_plugin.rollout.editors.Editor`` or ``slime_plugin.agents.Driver`` of your own.

    ``docs/extend.md`` walks through both.
    """


Harness = Annotated[
    SearchR1 | TcRag | AgentFold | MemexRL | ClaudeCode | OpenCode | CustomHarness,
    BY_TYPE,
]

_BY_TYPE = {name: model for model in models_in(Harness) if (name := tag_of(model))}
EDITOR_TYPES = tuple(name for name, model in _BY_TYPE.items() if not issubclass(model, BlackBox))
"""``type`` of the built-in editors."""
BLACK_BOXES = tuple(name for name, model in _BY_TYPE.items() if issubclass(model, BlackBox))
"""``type`` of the built-in agents."""
