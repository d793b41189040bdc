"""How rollouts are sampled, and by what: the ``rollout:`` and ``engine:`` blocks of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_plugin.config.frozen import File, Frozen, Url

SYSTEM = (
    "Answer the question. Use the tools as often as you need them, one step at a time, and think before each call. "
    "When you know the answer, give it alone between <answer> and </answer>."
)


class Rollout(Frozen):
    """Turns, budgets and sampling, with the paper's settings."""

    questions: File | None = None
    """JSON lines with ``question``, ``answers`` (a list) and, if you like, ``id``."""
    samples: int = Field(default=16, ge=1)
    """Rollouts per question: the group that a baseline is taken over."""
    concurrency: int = Field(default=64, ge=1)
    """Rollouts under way at once."""
    seed: int = Field(default=0, ge=0)
    """Makes rollouts reproducible, with an engine that samples deterministically."""

    system: str = SYSTEM
    """The system message. What tools there are is added to it."""
    describe_tools: bool = True
    """Add the schemas of the tools to the system message."""
    chat: Literal["auto", "chatml", "template"] = "auto"
    """How messages become tokens: ChatML as Qwen has it, or the tokenizer's own chat template. ChatML if the tokenizer
    knows its tokens."""
    thinking: bool = True
    """Let the policy think. If not, each of its turns begins with an empty thought, as Qwen3 expects it."""

    turns: int = Field(default=30, ge=1)
    """Most turns of the policy; summaries do not count."""
    turn_tokens: int = Field(default=2048, ge=1)
    """Most tokens sampled in one turn."""
    sampled_tokens: int | None = Field(default=None, ge=1)
    """Most tokens sampled in one rollout."""
    context_tokens: int = Field(default=32768, ge=1)
    """Most tokens of the live context, those being sampled included. A rollout that needs more ends as truncated."""
    result_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one tool result; a longer one is cut, and says so."""
    seconds: float | None = Field(default=1800.0, gt=0)
    """Most wall-clock time of a rollout; one that takes longer ends as truncated, with what it has."""
    tool_seconds: float = Field(default=60.0, gt=0)
    """Most time for one tool call, and for the reward."""

    temperature: float = Field(default=1.0, ge=0)
    """Of sampling, and of the log-probabilities that are logged; training needs 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that have this share of the probability; training needs 1."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from so many of the most likely tokens; training needs null. Log-probabilities are those of the whole
    distribution, so top_p and top_k below it make training off-policy."""


class Engine(Frozen):
    """The SGLang server, or the router in front of several."""

    url: Url | None = None
    """Such as http://127.0.0.1:30000. If not set, a server is started on this machine for the time of the run."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds for one turn; what was sampled by then is kept."""
    retries: int = Field(default=8, ge=0)
    """How often a turn is asked for again after the engine failed. A turn that was never answered left no tokens."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before the first retry; they double with each further one, up to 30, and are jittered: with 8
    retries an engine may be away for a minute and a half."""
