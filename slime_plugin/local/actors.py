"""What the actors of a run return to its loop, and where their output goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class IterationRollouts:
    """The rollouts of an iteration."""

    parts: list[Any]
    """Ray's references to the parts of the train data, one per replica."""
    metrics: dict[str, Any]
    """Metrics of the batch."""
    seconds: dict[str, float]
    """Seconds by phase."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An update step, the same on all ranks."""

    sums: Mapping[str, float]
    """``SUM_KEYS``, over all ranks."""
    rollouts: int
    grad_norm: float
    """Before clipping."""
    lr: float
    sdcc_weight: float
    sdcc_off: str | None
    """Why the guard rails switched SDCC's KL off."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """All steps of an iteration on one rank."""

    steps: list[StepResult]
    logdiff: dict[str, float] | None
    """Sums over tokens before the first step, and the maximum, on the ranks of each last stage that together have
    every token once; None elsewhere."""
    seconds: dict[str, float]
    """Seconds by phase."""


def redirect(log: Path) -> None:
    """Append the output of this process to a file from now on."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
