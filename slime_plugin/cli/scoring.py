"""Score records with a model on this machine, for the commands that compare log-probabilities."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.progress
from rich.console import Console

from slime_plugin.cli.inputs import check_installed
from slime_plugin.config.method import MethodSettings
from slime_plugin.config.parallel import Parallelism
from slime_plugin.local.scorer import Scorer, StartProgress, check_records
from slime_plugin.record import Record

if TYPE_CHECKING:
    from slime_plugin.local.score import RecordScore


def scores_of(
    records: Sequence[Record], methods: tuple[MethodSettings, ...], model: Path, **options: Any
) -> list[list[RecordScore]]:
    """Return for each method the scores of all records; ``options`` are those of :data:`.inputs.MODEL`."""
    scorer = Scorer(methods, parallelism(options), **options)
    check_records(records, model, scorer.parallel)
    check_trainer()
    from slime_plugin.local.score import score_records

    with progress_bar("records scored") as progress:
        return score_records(records, model, scorer, progress(len(records)))


def parallelism(options: dict[str, Any]) -> Parallelism:
    """Take from the options of a command how the model is split."""
    return Parallelism(*(options.pop(key) for key in ("tp", "pp", "cp", "sp")))


def check_trainer() -> None:
    """Raise an error with the pip command if a package that computes is missing."""
    check_installed("train", "torch", "megatron", "safetensors")


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[StartProgress]:
    """A bar on standard error, if that is a terminal."""
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.TimeElapsedColumn())
    with rich.progress.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(description, total=None)

        def start(total: int) -> Callable[[int], None]:
            bar.update(task, total=total)
            return lambda done: bar.advance(task, done)

        yield start
