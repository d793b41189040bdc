"""Score records with a model on this machine, for the commands that compare log-probabilities."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.progress
from rich.console import Console

from slime_plugin.architecture import Architecture
from slime_plugin.cli.inputs import check_installed
from slime_plugin.config.method import Method
from slime_plugin.config.parallel import Parallelism
from slime_plugin.record import Record

if TYPE_CHECKING:
    from slime_plugin.local.score import RecordScore

OnProgress = Callable[[int, int], None]
"""Called with units done and their total."""


def scores_of(
    records: Sequence[Record], methods: tuple[Method, ...], model: Path, **options: Any
) -> list[list[RecordScore]]:
    """Return for each method the scores of all records; ``options`` are those of :data:`.inputs.MODEL`."""
    parallel = parallelism(options)
    check_models([model], parallel)
    from slime_plugin.local.score import Scorer, score_records

    with progress_bar("records scored") as on_progress:
        return score_records(records, Scorer(model, methods, parallel, **options), counted(on_progress, len(records)))


def parallelism(options: dict[str, Any]) -> Parallelism:
    """Take from the options of a command how the model is split."""
    return Parallelism(*(options.pop(key) for key in ("tp", "pp", "cp", "sp")))


def check_models(models: Iterable[Path], parallel: Parallelism) -> None:
    """Check that models can be split this way and scored here, before torch is loaded, which takes seconds."""
    for model in models:
        Architecture.read(model).check_split(parallel)
    check_installed("train", "torch", "megatron", "safetensors")


def counted(on_progress: OnProgress, total: int) -> Callable[[int], None]:
    """A callback for units done since the last call."""
    done = 0

    def advance(units: int) -> None:
        nonlocal done
        done += units
        on_progress(done, total)

    advance(0)
    return advance


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[OnProgress]:
    """A bar on standard error, if that is a terminal."""
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.TimeElapsedColumn())
    with rich.progress.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
