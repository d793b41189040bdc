"""Where metrics go beside ``metrics.jsonl``: the ``tracking:`` block of a configuration."""

from __future__ import annotations

from typing import Literal

from slime_plugin.config.frozen import Frozen


class Wandb(Frozen):
    """Weights & Biases. Its key comes from the environment or from ``wandb login``, never from a configuration."""

    project: str = "memorywalker"
    """Where the run is listed."""
    entity: str | None = None
    """The user or team it belongs to; your own if not set."""
    name: str | None = None
    """Of the run; the name of its folder if not set."""
    mode: Literal["online", "offline"] = "online"
    """Offline writes into the run's folder, for ``wandb sync`` to send later."""


class Tracking(Frozen):
    """``metrics.jsonl`` is always written."""

    tensorboard: bool = True
    """Write event files for TensorBoard into the run's folder."""
    wandb: Wandb | None = None
    """Not used if not set."""
