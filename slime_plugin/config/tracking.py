"""Metric writers beside ``metrics.jsonl``: the ``tracking:`` block of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_plugin.config.frozen import Frozen


class Wandb(Frozen):
    """Weights & Biases. The API key comes from the environment or from ``wandb login``, never from a configuration."""

    project: str = "memorywalker"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns it; your own if not set."""
    name: str | None = None
    """Name of the run; the name of its folder if not set."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes into the run's folder, for ``wandb sync`` to upload later."""


class Tracking(Frozen):
    """``metrics.jsonl`` is always written."""

    tensorboard: bool = True
    """Write event files for TensorBoard into the run's folder."""
    wandb: Wandb | None = None
    """Off if not set."""
    metrics: Annotated[tuple[str, ...], Field(strict=False)] = ()  # YAML has lists
    """Metrics of your own: import paths ``package.module:function`` of functions from the records of an iteration to
    numbers by name."""
