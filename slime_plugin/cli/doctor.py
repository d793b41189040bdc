"""``memorywalker doctor``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import netrc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_plugin import machine
from slime_plugin.architecture import Architecture
from slime_plugin.cli.config import OVERRIDES
from slime_plugin.cli.doctor_run import bundle_path, doctor_run
from slime_plugin.cli.output import console
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.machine import Finding, Probe
from slime_plugin.needs import needs_of
from slime_plugin.rollout.questions import read_questions
from slime_plugin.slime.refusals import training_problems

_STYLES = {"ok": "green", "warn": "yellow", "missing": "bold red"}


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False, metavar="[CONFIG|RUN]")
@OVERRIDES
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs will be written.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--bundle",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="With RUN: also write an archive for a bug report.  [default: RUN-bundle.tar.gz]",
)
@click.option("--records", is_flag=True, help="With --bundle: also pack rollouts, with what the policy saw and wrote.")
def doctor(
    config: Path | None, overrides: tuple[str, ...], out: Path, as_json: bool, bundle: str | None, records: bool
) -> None:
    """Report what is missing on this machine, or what is wrong with a run, and how to mend it.

    Checks Python, packages, devices, memory, ports and disk; with a configuration also its model, tokenizer,
    questions, ranks and keys. Of a key it reports whether it is set, never its value.

    With the folder of a run, also one that has failed, it reads logs, metrics and records, and names the most likely
    causes, the most likely first.

    Exits with 1 if something is missing without which a run fails, or something about a run is alarming.
    """
    if config is not None and config.is_dir():
        if overrides:
            raise click.UsageError("settings belong to a configuration file; a run has its own")
        if records and bundle is None:
            raise click.UsageError("--records belongs to --bundle")
        path = None if bundle is None else bundle_path(config, bundle)
        doctor_run(config, as_json=as_json, bundle=path, records=records)
    if bundle is not None or records:
        raise click.UsageError("--bundle and --records need the folder of a run")
    cell, findings = None, []
    if config is not None:
        try:
            cell = load_cell(config, overrides)
        except ConfigError as error:
            findings += [Finding("configuration", "missing", line) for line in str(error).splitlines()]
    packages = [
        *machine.PACKAGES,
        *([machine.TENSORBOARD] if cell is None or cell.tracking.tensorboard else []),
        *([machine.WANDB] if cell is not None and cell.tracking.wandb is not None else []),
    ]
    with Console(stderr=True).status("importing packages"):
        probed = machine.probe(packages)
    findings += machine.machine(probed, packages, out, machine.disk_needed(cell))
    if cell is not None:
        findings += _findings_of(cell, probed)
    missing = [finding for finding in findings if finding.status == "missing"]
    if as_json:
        checks = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"ok": not missing, "checks": checks}, indent=1))
    else:
        _print_table(findings)
        names = ", ".join(dict.fromkeys(finding.name for finding in missing))
        click.echo(f"\nmissing: {names}" if missing else "\nnothing is missing")
    sys.exit(1 if missing else 0)


def _findings_of(cell: Cell, probed: Probe) -> Iterator[Finding]:
    """Check whether a configuration can be run on this machine."""
    problems = list(training_problems(cell))
    for problem in problems:
        yield Finding("configuration", "missing", problem)
    if not problems:
        found = f"{cell.harness.type} x {cell.method.type}, {cell.trainer.iterations} iterations"
        yield Finding("configuration", "ok", found)
    if cell.model is not None and cell.model.is_dir():
        yield from _model(cell, cell.model)
    if cell.rollout.questions is not None and cell.rollout.questions.is_file():
        yield _questions(cell, cell.rollout.questions)
    yield _ranks(cell, probed)
    yield from _needs(cell)
    if cell.engine.url is not None:
        yield _engine(cell.engine.url)
    if cell.tracking.wandb is not None and cell.tracking.wandb.mode == "online":
        yield _wandb()


def _model(cell: Cell, folder: Path) -> Iterator[Finding]:
    try:
        model = Architecture.read(folder)
    except ConfigError:
        return  # reported as a problem of the configuration
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        yield Finding("model", "missing", f"{folder} has no *.safetensors", "download the checkpoint whole")
        return
    size = sum(path.stat().st_size for path in weights)
    shape = f"{model.layers} layers of {model.hidden}, {model.vocabulary} tokens, {size / 1e6:,.0f} MB"
    yield Finding("model", "ok", f"{folder}: {shape}")
    wanted, most = cell.rollout.context_tokens, model.max_positions
    if wanted > most:
        found = f"rollout.context_tokens is {wanted}, the model has {most} positions"
        yield Finding("context", "warn", found, f"rollout.context_tokens={most}, or longer rollouts fail")
    yield from _tokenizer(cell, folder)


def _tokenizer(cell: Cell, folder: Path) -> Iterator[Finding]:
    needed = ("tokenizers", "transformers", "jinja2") if cell.rollout.chat == "template" else ("tokenizers",)
    if any(importlib.util.find_spec(name) is None for name in needed):
        return  # reported with the packages
    from slime_plugin.rollout.chat import load_chat

    try:
        chat = load_chat(folder, cell.rollout.chat, thinking=cell.rollout.thinking)
    except MemoryWalkerError as error:
        remedy = "use the tokenizer of the same checkpoint, or set rollout.chat"
        yield Finding("tokenizer", "missing", str(error), remedy)
    else:
        yield Finding("tokenizer", "ok", f"{type(chat).__name__}, fits the model")


def _questions(cell: Cell, path: Path) -> Finding:
    try:
        number = len(read_questions(path))
    except ConfigError as error:
        return Finding("questions", "missing", str(error))
    wanted = cell.trainer.prompts
    found = f"{path}: {number} questions, {wanted} per iteration"
    return Finding.of("questions", number >= wanted, found, f"trainer.prompts={number}, or more questions")


def _ranks(cell: Cell, probed: Probe) -> Finding:
    split = cell.trainer
    found = f"{split.ranks} (tp {split.tp} x pp {split.pp} x cp {split.cp} x dp {split.dp})"
    if probed.gpus:
        remedy = "a GPU for each rank: lower trainer.tp, pp, cp or dp"
        found += f", {len(probed.gpus)} GPUs"
        return Finding.of("ranks", split.ranks <= len(probed.gpus), found, remedy, "missing")
    cores = len(os.sched_getaffinity(0))
    remedy = "works, and the ranks wait for each other: lower trainer.tp, pp, cp or dp"
    return Finding.of("ranks", split.ranks <= cores, f"{found}, {cores} CPU cores", remedy)


def _needs(cell: Cell) -> Iterator[Finding]:
    for need in needs_of(cell):
        if need.problem:
            yield Finding(need.kind, "missing", need.problem, need.remedy)
        else:
            yield Finding(need.kind, "warn" if need.remedy else "ok", need.found, need.remedy)


def _engine(url: str) -> Finding:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except OSError as error:
        remedy = f"memorywalker engine --port {port} --model ..., or set engine.url=null"
        return Finding("engine", "missing", f"nothing answers at {url}: {error.strerror or error}", remedy)
    return Finding("engine", "ok", f"{url} answers")


def _wandb() -> Finding:
    if os.environ.get("WANDB_API_KEY"):
        return Finding("Weights & Biases", "ok", "WANDB_API_KEY is set")
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators("api.wandb.ai"):
            return Finding("Weights & Biases", "ok", "logged in")
    remedy = "wandb login, or set WANDB_API_KEY, or tracking.wandb.mode=offline"
    return Finding("Weights & Biases", "warn", "not logged in", remedy)


def _print_table(findings: list[Finding]) -> None:
    """Print a line per finding, and its remedy below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.name), Text(finding.found))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", style="bold" if finding.status == "missing" else ""))
    console().print(table)
