"""Records through a model on this machine, for the commands that compare log-probabilities."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console

from slime_plugin.cli.inputs import check_installed
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.method import Method
from slime_plugin.config.parallel import Parallelism
from slime_plugin.record import Record

if TYPE_CHECKING:
    from slime_plugin.megatron.score import RecordScore


def scores_of(
    records: Sequence[Record],
    methods: tuple[Method, ...],
    *,
    model: Path,
    tp: int,
    pp: int,
    cp: int,
    sp: bool,
    dtype: str | None,
    batch_tokens: int,
) -> list[list[RecordScore]]:
    """For each method the scores of all records, with progress on the terminal."""
    parallel = Parallelism(tp, pp, cp, sp)
    Architecture.read(model).check_split(parallel)  # before torch is loaded, which takes seconds
    check_installed("train", "torch", "megatron", "safetensors")
    from slime_plugin.megatron.score import Scorer, score_records

    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with rich.progress.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("records scored", total=len(records))
        scorer = Scorer(model, methods, parallel, dtype, batch_tokens)
        return score_records(records, scorer, lambda done: progress.advance(task, done))
