"""How well a policy does while it is trained: the ``evaluation:`` block of a configuration."""

from __future__ import annotations

from pydantic import Field

from slime_plugin.config.frozen import File, Frozen


class Evaluation(Frozen):
    """Rollouts that are not trained on. slime runs them; ``memorywalker train`` does not."""

    questions: File | None = None
    """JSON lines as ``rollout.questions`` has them. Nothing is evaluated if not set."""
    name: str = Field(default="dev", pattern=r"^[A-Za-z0-9_.-]+$")
    """What the questions are called in the metrics."""
    every: int = Field(default=20, ge=1)
    """Iterations between two evaluations; one comes before the first."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per question."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that have this share of the probability."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from so many of the most likely tokens."""
