"""The loss of a policy update: the ``objective:`` block of a configuration."""

from __future__ import annotations

from pydantic import Field

from slime_plugin.config.frozen import Frozen


class Objective(Frozen):
    """GRPO with the paper's settings."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The probability ratio is clipped above at 1 + clip_high."""
    kl: float = Field(default=1e-3, ge=0)
    """Coefficient of the low-variance KL to the reference model; 0 needs no reference model."""
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
