"""Records through a model on this machine, for the commands that compare log-probabilities."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.progress
from rich.console import Console

from slime_plugin.config.method import Method
from slime_plugin.errors import MemoryWalkerError
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
) -> list[tuple[list[RecordScore], dict[str, Any]]]:
    """For each method the scores of all records and their summary, with progress on the terminal."""
    for package in ("torch", "megatron.core", "safetensors"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            raise MemoryWalkerError(f"this command computes with {package}: pip install 'memorywalker[train]'")
    from slime_plugin.megatron.parallel import Parallelism
    from slime_plugin.megatron.score import Scorer, score_records, summarise_scores

    chosen = {} if dtype is None else {"dtype": dtype}
    scorer = Scorer(model, methods, Parallelism(tp, pp, cp, sp), budget=batch_tokens, **chosen)
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with rich.progress.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("records scored", total=len(records))
        scores = score_records(records, scorer, lambda done: progress.advance(task, done))
    by_method = [[score[i] for score in scores] for i in range(len(methods))]
    return [(part, summarise_scores(records, part)) for part in by_method]
