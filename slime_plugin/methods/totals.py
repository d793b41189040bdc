"""Sums over the layouts of many rollouts under one method: for the metrics of a batch and the statistics of records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slime_plugin.methods.row import Layout


@dataclass
class Totals:
    """Tokens of all layouts that were added."""

    tokens: int = 0
    teacher_tokens: int = 0
    trained: int = 0
    off_context: int = 0
    """Those of layouts that can tell."""
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, layout: Layout) -> None:
        self.tokens += layout.tokens
        self.teacher_tokens += layout.teacher_tokens
        self.trained += layout.trained
        self.off_context += layout.off_context or 0
        self.lost.update(layout.lost)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "lost": dict(self.lost)}
