"""``memorywalker plan``."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from slime_plugin.cli.config import CONFIG, FURTHER, OVERRIDES
from slime_plugin.cli.inputs import RecordPath, all_sound_records
from slime_plugin.cli.output import console
from slime_plugin.cluster.memory import GB
from slime_plugin.cluster.phases import ASSUMPTIONS, GPUS, Assumptions
from slime_plugin.cluster.plan import LIMITS, Plan, plan_job
from slime_plugin.cluster.problems import job_problems
from slime_plugin.cluster.workload import OTHERS, WORKLOADS, Workload
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError, nearest

Given = TypeVar("Given", Workload, Assumptions)
MAY_BE_ZERO = ("sampled", "teacher_tokens", "leaves", "tool_seconds", "step_seconds", "allreduce_seconds", "spread")
"""Of what can be assumed; the others are divided by."""


@click.command()
@CONFIG
@OVERRIDES
@FURTHER
@click.option("--gpu", type=click.Choice(list(GPUS)), default="h100", show_default=True, help="What it runs on.")
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
    help="Another number for what is estimated, such as sampled=5000 or tool_seconds=1; --json shows all keys.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything, in bytes, tokens and seconds.")
def plan(
    config: Path,
    overrides: tuple[str, ...],
    further: tuple[Path, ...],
    gpu: str,
    records: tuple[Path, ...],
    assumed: tuple[str, ...],
    as_json: bool,
) -> None:
    """Work out memory, tokens and time per GPU of a job, on paper.

    CONFIG is a cell, as for slime-args; --with adds the size of a cluster. Nothing is run, and neither a GPU nor the
    model's weights are needed. Sizes follow from the model and the settings; how long rollouts are, and how fast things
    go, is estimated (docs/scale.md says from what).

    The exit code is 1 if the job would not run, or would not fit.
    """
    cell = load_cell(config, overrides, further)
    problems = list(job_problems(cell))
    if problems:
        raise ConfigError("\n".join(f"{config}: {problem}" for problem in problems))
    damaged = False
    work = WORKLOADS.get(cell.harness.type, OTHERS)
    if records:
        found, damaged = all_sound_records(records)
        work = Workload.counted(found)
    numbers = _parsed(assumed)
    worked_out = plan_job(cell, GPUS[gpu], _replaced(work, numbers), _replaced(ASSUMPTIONS, numbers))
    if as_json:
        click.echo(json.dumps(worked_out.to_json(), indent=1, allow_nan=False))
    else:
        _print(cell, worked_out, "counted" if records else "estimated")
    for problem in worked_out.problems:
        click.echo(f"Error: {config}: {problem}", err=True)
    sys.exit(1 if worked_out.problems or damaged else 0)


def _parsed(assumed: tuple[str, ...]) -> dict[str, float]:
    known = [field.name for kind in (Workload, Assumptions) for field in dataclasses.fields(kind)]
    numbers = {}
    for text in assumed:
        key, _, written = text.partition("=")
        if key not in known:
            raise click.BadParameter(f"there is no {key!r:.40}; use {nearest(key, known)}", param_hint="--assume")
        try:
            numbers[key] = float(written)
        except ValueError:
            numbers[key] = math.nan
        if not 0 <= numbers[key] < math.inf or (numbers[key] == 0 and key not in MAY_BE_ZERO):
            least = "0 or more" if key in MAY_BE_ZERO else "more than 0"
            raise click.BadParameter(f"{text!r:.60} has no number that is {least}", param_hint="--assume")
    return numbers


def _replaced(value: Given, numbers: dict[str, float]) -> Given:
    kinds = {field.name: type(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{key: kinds[key](numbers[key]) for key in kinds if key in numbers})


def _print(cell: Cell, worked_out: Plan, how: str) -> None:
    out = console()
    cluster, trainer = cell.cluster, cell.trainer
    split = " x ".join(f"{key} {getattr(trainer, key)}" for key in ("tp", "pp", "cp") if getattr(trainer, key) > 1)
    shared = "taking turns" if cluster.shared else f"on {cluster.rollout_nodes} nodes of their own"
    lines = [
        f"{cell.harness.type} x {cell.method.type}: {worked_out.rollouts:,} rollouts in {trainer.steps} steps",
        f"{cluster.nodes} x {cluster.gpus} {worked_out.gpu.name}: {worked_out.replicas} replicas"
        f"{f' of {split}' if split else ''}; {cluster.engines} engines of {cluster.engine_gpus} GPU"
        f"{'s' * (cluster.engine_gpus > 1)}, {shared}",
    ]
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)
    for table in (_memory(worked_out), _methods(cell, worked_out, how), _phases(worked_out)):
        out.print()
        out.print(table)
    out.print()
    for line in (*_facts(cell, worked_out), f"saturates first: {worked_out.saturates}", *worked_out.notes):
        out.print(line, soft_wrap=True, markup=False)


def _memory(worked_out: Plan) -> Table:
    table = Table(f"a rank, {worked_out.micro_batch:,} tokens", "GB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, size in dataclasses.asdict(worked_out.rank).items():
        table.add_row(name, f"{size / GB:.1f}")
    table.add_row(f"of {worked_out.capacity / GB:g}", f"{worked_out.rank.total / GB:.1f}")
    return table


def _methods(cell: Cell, worked_out: Plan, how: str) -> Table:
    rollouts = worked_out.rollouts
    table = _numbers(f"tokens ({how})", "a rollout", "no gradient", "an iteration", "longest row")
    for name, rows in worked_out.methods.items():
        whole = round(rollouts * (rows.tokens + rows.teacher_tokens))
        cells = (round(rows.tokens), round(rows.teacher_tokens), whole, rows.longest)
        table.add_row(f"{name}{' *' * (name == cell.method.type)}", *(f"{number:,}" for number in cells))
    return table


def _phases(worked_out: Plan) -> Table:
    table = _numbers("an iteration (estimated)", "s", "share")
    whole = worked_out.phases.total
    for name, seconds in dataclasses.asdict(worked_out.phases).items():
        table.add_row(LIMITS[name], f"{seconds:,.1f}", f"{seconds / whole:.0%}")
    table.add_row("all of it", f"{whole:,.1f}", "")
    return table


def _numbers(*columns: Any) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _facts(cell: Cell, worked_out: Plan) -> list[str]:
    engine, decode, rows = worked_out.engine, worked_out.decoding, worked_out.rows
    tokens = worked_out.rollouts * (rows.tokens + rows.teacher_tokens) / cell.cluster.trainer_gpus
    return [
        f"longest row that fits: {worked_out.longest_row:,} tokens; host memory {worked_out.host / GB:.0f} GB a node",
        f"an engine: {engine.kv_tokens:,} tokens of KV, {engine.contexts:.1f} longest contexts for "
        f"{engine.concurrency} rollouts; {1000 * decode.step:.1f} ms a token",
        f"all engines: {decode.tokens_per_second:,.0f} tokens/s, {decode.calls_per_second:,.1f} tool calls/s",
        f"updates: {worked_out.flops / 1e15:,.0f} PFLOP, {tokens:,.0f} tokens per training GPU; weights: "
        f"{worked_out.sync_bytes / GB:.1f} GB to each engine",
    ]
