"""The ``rollout:`` and ``engine:`` blocks of a configuration."""

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
    """JSON lines with ``question``, ``answers`` (a list) and, optionally, ``id``."""
    samples: int = Field(default=16, ge=1)
    """Rollouts per question: the group over which advantages are computed."""
    concurrency: int = Field(default=64, ge=1)
    """Rollouts that run at once."""
    seed: int = Field(default=0, ge=0)
    """Random seed. Rollouts are reproducible with an engine that samples deterministically."""

    system: str = SYSTEM
    """The system message."""
    describe_tools: bool = True
    """Append the schemas of the tools to the system message."""
    chat: Literal["auto", "chatml", "template"] = "auto"
    """How messages become tokens: Qwen's ChatML, or the tokenizer's own chat template. ``auto`` is ChatML if the
    tokenizer has its tokens."""
    thinking: bool = True
    """Let the policy think. Otherwise each of its turns begins with an empty thought, as Qwen3 expects."""

    turns: int = Field(default=30, ge=1)
    """Limit on the turns of the policy; summaries do not count."""
    turn_tokens: int = Field(default=2048, ge=1)
    """Limit on the tokens sampled in one turn."""
    sampled_tokens: int | None = Field(default=None, ge=1)
    """Limit on the tokens sampled in one rollout."""
    context_tokens: int = Field(default=32768, ge=1)
    """Limit on the tokens of the live context, including those being sampled; a longer rollout is truncated."""
    result_tokens: int = Field(default=4096, ge=1)
    """Limit on the tokens of a tool result; a longer one is cut, and says so."""
    seconds: float | None = Field(default=1800.0, gt=0)
    """Wall-clock limit of a rollout; one that takes longer is truncated and keeps what it has sampled."""
    tool_seconds: float = Field(default=60.0, gt=0)
    """Time-out of one tool call, and of the reward."""
    max_tool_failures: float = Field(default=0.3, gt=0, le=1)
    """Stop before an iteration is trained in which more than this share of the tool calls failed for no fault of the
    policy: a missing key, a rate limit, a service that is down. 1 never stops."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature, also that of the logged log-probabilities; training needs 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the most likely tokens with this share of the probability; training needs 1."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the k most likely tokens; training needs null. Log-probabilities are those of the whole distribution,
    so that top_p and top_k make training off-policy."""


class EngineSettings(Frozen):
    """The SGLang server, or the router in front of several."""

    url: Url | None = None
    """Such as http://127.0.0.1:30000. If not set, a server is started on this machine for the duration of the run."""
    timeout: float = Field(default=600.0, gt=0)
    """Time-out of one turn, in seconds; tokens sampled until then are kept."""
    retries: int = Field(default=8, ge=0)
    """Retries of a turn after an engine failure. A failed attempt leaves no tokens in the record."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before the first retry; jittered, and doubled for each further one up to 30. With 8 retries an engine
    may be unavailable for a minute and a half."""
