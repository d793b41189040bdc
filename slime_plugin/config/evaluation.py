"""Evaluation during training: the ``evaluation:`` block of a configuration."""

from __future__ import annotations

from pydantic import Field

from slime_plugin.config.frozen import File, Frozen


class Evaluation(Frozen):
    """Rollouts that are not trained on. slime runs them; ``memorywalker train`` does not."""

    questions: File | None = None
    """JSON lines in the format of ``rollout.questions``. No evaluation if not set."""
    name: str = Field(default="dev", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the evaluation set in the metrics."""
    every: int = Field(default=20, ge=1)
    """Iterations between two evaluations."""
    at_start: bool = True
    """Evaluate the model itself, before the first iteration."""
    limit: int | None = Field(default=256, ge=1)
    """Take the first questions of the file in an evaluation during training; null takes all. ``launch/eval.sh`` always
    takes all."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per question."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the most likely tokens with this share of the probability."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the k most likely tokens."""
