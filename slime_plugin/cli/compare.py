"""``memorywalker compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from slime_plugin.cli.inputs import ALL_METHODS, MODEL, RecordPath, method_names
from slime_plugin.cli.output import console, log_line
from slime_plugin.cli.scoring import check_trainer, parallelism, progress_bar
from slime_plugin.config.method import METHODS, MethodSettings
from slime_plugin.local.compare_run import compare_records, compare_run, folder_of_stores
from slime_plugin.local.scorer import CompareSettings
from slime_plugin.methods import DENOMINATOR
from slime_plugin.report.comparison_table import comparison_table, heading, verdict
from slime_plugin.run.folder import RunFolder


def _with_denominator(
    context: click.Context, parameter: click.Parameter, methods: tuple[MethodSettings, ...]
) -> tuple[MethodSettings, ...]:
    base = METHODS[DENOMINATOR]
    return methods if base in methods else (base, *methods)


def _parse_limit(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value != "all" and not (value.isdecimal() and int(value)):
        raise click.BadParameter(f"{value!r:.40} is neither a positive whole number nor all")
    return None if value == "all" else int(value)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RecordPath(), metavar="RUN...")
@click.option(
    "--methods",
    type=method_names,
    default=ALL_METHODS,
    metavar="A,B",
    callback=_with_denominator,
    help=f"Compare these and {DENOMINATOR}.  [default: all methods]",
)
@click.option(
    "--iterations",
    default="6",
    show_default=True,
    metavar="N|all",
    callback=_parse_limit,
    help="How many iterations of a training run, evenly spread.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Timed updates per method; 0 leaves costs out.",
)
@MODEL
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON per RUN.")
def compare(runs: tuple[Path, ...], model: Path | None, as_json: bool, **options: Any) -> None:
    """Compare methods on the same recorded rollouts.

    RUN is the folder of a training run. Each of its iterations is scored with the weights that sampled it, so an exact
    method is at the rounding error of the two engines and anything above it is a method's own error. Then whole updates
    of one iteration are timed, methods in turn. The numbers are written into RUN as comparison.json, and those of every
    token as comparison/METHOD.npz.

    RUN may also be a file or folder of records that the weights in --model have sampled. Only a folder of stores
    (*.records) is written into.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    settings = CompareSettings(parallel=parallelism(options), **options)
    for run in runs:
        trained = RunFolder(run).has_cell()
        if trained and model is not None:
            raise click.UsageError(f"{run} is a training run and has its own weights: leave --model out")
        if not trained and model is None:
            raise click.UsageError(f"{run} is not a training run: pass --model, the weights that sampled its records")
    check_trainer()
    damaged = False
    for run in runs:
        with progress_bar(f"comparing {run.name or run}") as progress:
            if model is None:
                value = compare_run(RunFolder(run), settings, progress, log_line)
            else:
                value = compare_records(run, model, settings, progress, log_line)
        damaged |= "damaged" in value["left_out"]
        if as_json:
            click.echo(json.dumps(value, separators=(",", ":"), allow_nan=False))
        else:
            _print(value, run)
    sys.exit(1 if damaged else 0)


(_MODEL,) = (option for option in compare.params if option.name == "model")
_MODEL.required = False  # a training run has its own


def _print(value: dict[str, Any], run: Path) -> None:
    out = console()
    out.print(heading(value, str(run)), soft_wrap=True, markup=False)
    out.print(comparison_table(value))
    out.print(verdict(value), soft_wrap=True, markup=False)
    folder = folder_of_stores(run)
    if folder is not None:
        out.print(f"wrote {folder.comparison}", soft_wrap=True, markup=False)
