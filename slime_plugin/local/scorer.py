"""How records are scored, and whether a model can score them. Needs no torch, which takes seconds to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import METHODS, MethodSettings
from slime_plugin.config.objective import Objective
from slime_plugin.config.parallel import Parallelism
from slime_plugin.config.trainer import Dtype, Trainer
from slime_plugin.errors import LayoutError
from slime_plugin.record import Record

StartProgress = Callable[[int], Callable[[int], None]]
"""Called once with the units of work in all. Returns what is called with the number of further units that are done."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """How records are scored, by whatever weights."""

    methods: tuple[MethodSettings, ...] = tuple(METHODS.values())
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: Dtype | None = None
    batch_tokens: int = 8192
    """Maximum tokens of a micro-batch."""
    objective: Objective = field(default_factory=Objective)
    """Objective of the training that is timed."""

    def cell(self, model: Path, method: MethodSettings) -> Cell:
        """Return the cell that trains a model by this method."""
        p = self.parallel
        split = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "sp": p.sp, "batch_tokens": self.batch_tokens}
        trainer = Trainer(**split, iterations=1, steps=1, dtype=self.dtype)  # type: ignore[arg-type]  # pydantic checks
        return Cell(model=model, method=method, objective=self.objective, trainer=trainer)


@dataclass(frozen=True, slots=True)
class CompareSettings(Scorer):
    """How runs are compared. Costs are measured against ``DENOMINATOR``, so it is one of the methods."""

    iterations: int | None = 6
    """Maximum for a training run, evenly spread, with the first and the last; None for all."""
    repeats: int = 5
    """How often training on a batch is timed per method; 0 measures no costs."""


@dataclass(frozen=True, slots=True)
class ScoredIteration:
    """The rollouts of one iteration, and the weights that sampled them."""

    iteration: int
    model: Path
    """Folder of a Hugging Face checkpoint."""
    records: tuple[Record, ...]

    @property
    def edits(self) -> int:
        return sum(len(record.edits) for record in self.records)


def check_records(records: Sequence[Record], model: Path, parallel: Parallelism) -> None:
    """Refuse a model that cannot be split this way or has not sampled these records."""
    architecture = Architecture.read(model)
    architecture.check_split(parallel)
    for record in records:
        at = int(record.tokens.argmax())
        if record.tokens[at] >= architecture.vocabulary:
            raise LayoutError(
                f"{record.label}: token {at} has id {int(record.tokens[at])}, the vocabulary of {model} has "
                f"{architecture.vocabulary}; score it with the model that sampled it"
            )
