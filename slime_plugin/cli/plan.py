"""``memorywalker plan``."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import click
from rich.table import Table

from slime_plugin.cli.config import with_cell
from slime_plugin.cli.inputs import RecordPath, all_valid_records
from slime_plugin.cli.output import console, log_line
from slime_plugin.cluster.job_problems import check_job
from slime_plugin.config.cell import Cell
from slime_plugin.config.workload import Workload
from slime_plugin.errors import nearest
from slime_plugin.planner.job import (
    ASSUMPTIONS,
    GPUS,
    MAY_BE_ZERO,
    Assumptions,
    Gpu,
    counted_workload,
    estimated_workload,
)
from slime_plugin.planner.measured import MEASURABLE, Measured
from slime_plugin.planner.memory import GB
from slime_plugin.planner.plan import PHASES, Plan, plan_job
from slime_plugin.report.tables import number_table

Estimates = TypeVar("Estimates", Workload, Assumptions, Gpu)


@click.command()
@with_cell
@click.option("--gpu", type=click.Choice(list(GPUS)), default="h100", show_default=True, help="The GPU of the job.")
@click.option(
    "--records",
    type=RecordPath(),
    multiple=True,
    metavar="PATH",
    help="Count the tokens of recorded rollouts, such as the folder of a run, instead of estimating them.",
)
@click.option(
    "--assume",
    "assumed",
    multiple=True,
    metavar="KEY=NUMBER",
    help="Replace an estimate, as in sampled=5000 or tool_seconds=1; --json prints all keys.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Take what memorywalker verify --out FILE.json measured in place of assumptions; --assume wins over it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything, in bytes, tokens and seconds.")
def plan(
    cell: Cell,
    config: Path,
    gpu: str,
    records: tuple[Path, ...],
    assumed: tuple[str, ...],
    measured: Path | None,
    as_json: bool,
) -> None:
    """Compute memory, tokens and time per GPU of a cluster job, without running anything.

    Needs neither a GPU nor the model's weights; --with adds the size of a cluster. Sizes follow from the model and the
    settings; lengths of rollouts and speeds are estimates (docs/scale.md).

    Exits with 1 if the job would not run or would not fit.
    """
    check_job(cell, str(config))
    if records:
        valid, damaged = all_valid_records(records)
        workload = counted_workload(valid)
    else:
        workload, damaged = estimated_workload(cell.harness), False
    numbers, found = _parse(assumed), None
    if measured is not None:
        found = _read(measured, cell, GPUS[gpu], without=numbers)
        numbers |= found.values
    planned = plan_job(cell, _replace(GPUS[gpu], numbers), _replace(workload, numbers), _replace(ASSUMPTIONS, numbers))
    if as_json:
        source = {} if found is None else {"measured": dataclasses.asdict(found) | {"path": str(found.path)}}
        click.echo(json.dumps(planned.to_json() | source, indent=1, allow_nan=False))
    else:
        _print(cell, planned, "counted" if records else "estimated")
        if found is not None:
            console().print(_origin(found, GPUS[gpu]), soft_wrap=True, markup=False)
    for problem in planned.problems:
        click.echo(f"Error: {config}: {problem}", err=True)
    sys.exit(1 if planned.problems or damaged else 0)


def _read(path: Path, cell: Cell, gpu: Gpu, *, without: Container[str]) -> Measured:
    """Return what was measured, without some keys. Warn of what it was measured with, if the cell has another."""
    found = Measured.read(path)
    found.check(gpu)
    for line in found.differences(cell):
        log_line(f"Warning: {line}")
    values = {key: value for key, value in found.values.items() if key not in without}
    return dataclasses.replace(found, values=values)


def _origin(found: Measured, gpu: Gpu) -> str:
    assumed = dataclasses.asdict(ASSUMPTIONS) | dataclasses.asdict(gpu)
    numbers = (f"{key} {value:.3g} (assumed {assumed[key]:.3g})" for key, value in found.values.items())
    return f"measured on {found.device} ({found.path}): {', '.join(numbers) or 'nothing that --assume leaves'}"


def _parse(assumed: tuple[str, ...]) -> dict[str, float]:
    known = [*(field.name for field in dataclasses.fields(Workload)), *MEASURABLE]
    numbers = {}
    for text in assumed:
        key, _, number = text.partition("=")
        if key not in known:
            raise click.BadParameter(f"there is no {key!r:.40}; use {nearest(key, known)}", param_hint="--assume")
        try:
            numbers[key] = float(number)
        except ValueError:
            numbers[key] = math.nan
        if not 0 <= numbers[key] < math.inf or (numbers[key] == 0 and key not in MAY_BE_ZERO):
            least = "0 or more" if key in MAY_BE_ZERO else "more than 0"
            raise click.BadParameter(f"{text!r:.60} has no number that is {least}", param_hint="--assume")
    return numbers


def _replace(estimates: Estimates, numbers: dict[str, float]) -> Estimates:
    kinds = {field.name: type(getattr(estimates, field.name)) for field in dataclasses.fields(estimates)}
    return dataclasses.replace(estimates, **{key: kinds[key](numbers[key]) for key in kinds if key in numbers})


def _print(cell: Cell, plan: Plan, source: str) -> None:
    cluster, trainer, engine, decode, job = cell.cluster, cell.trainer, plan.engine, plan.decoding, plan.job
    split = " x ".join(f"{key} {getattr(trainer, key)}" for key in ("tp", "pp", "cp") if getattr(trainer, key) > 1)
    shared = "taking turns" if cluster.shared else f"on {cluster.rollout_nodes} nodes of their own"
    tokens = job.rollouts * (job.rows.tokens + job.rows.teacher_tokens) / cluster.trainer_gpus
    out = console()
    for part in (
        f"{cell.harness.type} x {cell.method.type}: {job.rollouts:,} rollouts in {trainer.steps} steps",
        f"{cluster.nodes} x {cluster.gpus} {job.gpu.name}: {job.replicas} replicas{f' of {split}' if split else ''}; "
        f"{cluster.engines} engines of {cluster.engine_gpus} GPU{'s' * (cluster.engine_gpus > 1)}, {shared}",
        "",
        _memory(plan),
        "",
        _methods(plan, cell.method.type, source),
        "",
        _phases(plan),
        "",
        f"longest row that fits: {plan.longest_row:,} tokens; host memory {plan.host / GB:.0f} GB a node",
        f"an engine: {engine.kv_tokens:,} tokens of KV, {engine.contexts:.1f} longest contexts for "
        f"{engine.concurrency} rollouts; {1000 * decode.step:.1f} ms a token",
        f"all engines: {decode.tokens_per_second:,.0f} tokens/s, {decode.calls_per_second:,.1f} tool calls/s",
        f"updates: {plan.flops / 1e15:,.0f} PFLOP, {tokens:,.0f} tokens per training GPU; weights: "
        f"{plan.sync_bytes / GB:.1f} GB to each engine",
        f"bottleneck: {plan.bottleneck}",
        *_evaluation(cell, plan),
        *plan.notes,
    ):
        out.print(part, soft_wrap=isinstance(part, str), markup=False)


def _evaluation(cell: Cell, plan: Plan) -> Iterator[str]:
    if plan.job.evaluation_rollouts:
        start = "before training and then " if cell.evaluation.at_start else ""
        yield (
            f"an evaluation of {plan.job.evaluation_rollouts:,} rollouts, {start}every {cell.evaluation.every} "
            f"iterations: {plan.evaluation_seconds:,.0f} s"
        )


def _memory(plan: Plan) -> Table:
    sizes = [*dataclasses.asdict(plan.rank).items(), (f"of {plan.capacity / GB:g}", plan.rank.total)]
    rows = ((name, f"{size / GB:.1f}") for name, size in sizes)
    return _table((f"a rank, {plan.job.micro_batch:,} tokens", "GB"), rows)


def _methods(plan: Plan, chosen: str, source: str) -> Table:
    rows = (
        (
            f"{name}{' *' * (name == chosen)}",
            f"{round(rows.tokens):,}",
            f"{round(rows.teacher_tokens):,}",
            f"{round(plan.job.rollouts * (rows.tokens + rows.teacher_tokens)):,}",
            f"{rows.longest:,}",
        )
        for name, rows in plan.methods.items()
    )
    return _table((f"tokens ({source})", "a rollout", "no gradient", "an iteration", "longest row"), rows)


def _phases(plan: Plan) -> Table:
    total, seconds = plan.phases.total, dataclasses.asdict(plan.phases)
    rows = [(PHASES[name][0], f"{s:,.1f}", f"{s / total:.0%}") for name, s in seconds.items()]
    return _table(("an iteration (estimated)", "s", "share"), [*rows, ("all of it", f"{total:,.1f}", "")])


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = number_table(columns)
    for row in rows:
        table.add_row(*row)
    return table
