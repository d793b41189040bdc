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
from typing import Any
from urllib.parse import urlsplit

import click
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_plugin.bridge.questions import read_questions
from slime_plugin.bridge.tools.keys import read_key
from slime_plugin.cli import machine
from slime_plugin.cli.config import OVERRIDES
from slime_plugin.cli.machine import Finding, Package, Probe
from slime_plugin.cli.output import console
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.custom import Custom, load_object
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.tools import Bm25
from slime_plugin.config.training import training_problems
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.tap.drivers import driver_for

_STYLES = {"ok": "green", "warn": "yellow", "missing": "bold red"}
CHECKPOINT_BYTES = 12
"""Per parameter: weights and both of Adam's moments in float32."""
EXPORT_BYTES = 4
"""Per parameter of the weights that the engine is given, at most."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False), required=False)
@OVERRIDES
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs will be written.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(config: Path | None, overrides: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Say what is missing on this machine, and how to get it.

    Looks at Python, packages, devices, memory, ports and disk; with a configuration also at its model, tokenizer,
    questions, ranks and keys. Of a key it says whether it is set, never what it is.

    Exits with 1 if something is missing without which a run fails.
    """
    cell, findings = None, []
    if config is not None:
        try:
            cell = load_cell(config, overrides)
        except ConfigError as error:
            findings += [Finding("configuration", "missing", line) for line in str(error).splitlines()]
    packages = _packages(cell)
    with _spinner("importing packages"):
        probed = machine.probe(packages)
    findings += machine.machine(probed, packages, out, _disk_needed(cell))
    if cell is not None:
        findings += _findings_of(cell, probed)
    missing = [finding for finding in findings if finding.status == "missing"]
    if as_json:
        checks = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"ok": not missing, "checks": checks}, indent=1))
    else:
        _print_table(findings)
        names = ", ".join(dict.fromkeys(finding.name for finding in missing))
        click.echo(f"\nmissing: {names}" if missing else "\nall that is needed is there")
    sys.exit(1 if missing else 0)


def _packages(cell: Cell | None) -> list[Package]:
    """Those of every run, and those that this one asks for."""
    packages = list(machine.PACKAGES)
    if cell is None or cell.tracking.tensorboard:
        packages.append(machine.TENSORBOARD)
    if cell is not None and cell.tracking.wandb is not None:
        packages.append(machine.WANDB)
    return packages


def _disk_needed(cell: Cell | None) -> float:
    """Bytes for the checkpoints that are kept, the one being written, and two versions of exported weights."""
    if cell is None or cell.model is None:
        return machine.LEAST_DISK
    weights = sum(path.stat().st_size for path in cell.model.glob("*.safetensors"))
    parameters = weights / 2  # bfloat16, as Qwen3 is published
    saved = min(cell.trainer.keep, cell.trainer.iterations // cell.trainer.save_every + 1) + 1
    return machine.LEAST_DISK + parameters * (CHECKPOINT_BYTES * saved + EXPORT_BYTES * 2)


def _findings_of(cell: Cell, probed: Probe) -> Iterator[Finding]:
    """Whether a configuration can be run on this machine."""
    problems = list(training_problems(cell))
    for problem in problems:
        yield Finding("configuration", "missing", problem)
    if not problems:
        yield Finding(
            "configuration", "ok", f"{cell.harness.type} x {cell.method.type}, {cell.trainer.iterations} iterations"
        )
    if cell.model is not None and cell.model.is_dir():
        yield from _model(cell, cell.model)
    if cell.rollout.questions is not None and cell.rollout.questions.is_file():
        yield _questions(cell, cell.rollout.questions)
    yield _ranks(cell, probed)
    for where, block in _blocks(cell):
        yield from _block(where, block)
    yield from _agent(cell)
    if cell.engine.url is not None:
        yield _engine(cell.engine.url)
    if cell.tracking.wandb is not None and cell.tracking.wandb.mode == "online":
        yield _wandb()


def _model(cell: Cell, folder: Path) -> Iterator[Finding]:
    try:
        architecture = Architecture.read(folder)
    except ConfigError:
        return  # among the problems of the configuration
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        yield Finding("model", "missing", f"{folder} has no *.safetensors", "download the checkpoint whole")
        return
    size = sum(path.stat().st_size for path in weights)
    yield Finding(
        "model",
        "ok",
        f"{folder}: {architecture.layers} layers of {architecture.hidden}, {architecture.vocabulary} tokens, "
        f"{size / 1e6:,.0f} MB",
    )
    if cell.rollout.context_tokens > architecture.max_positions:
        yield Finding(
            "context",
            "warn",
            f"rollout.context_tokens is {cell.rollout.context_tokens}, "
            f"the model has {architecture.max_positions} positions",
            f"rollout.context_tokens={architecture.max_positions}, or rollouts fail when they get there",
        )
    yield from _tokenizer(cell, folder)


def _tokenizer(cell: Cell, folder: Path) -> Iterator[Finding]:
    needed = ("tokenizers", "transformers", "jinja2") if cell.rollout.chat == "template" else ("tokenizers",)
    if any(importlib.util.find_spec(name) is None for name in needed):
        return  # among the packages
    from slime_plugin.bridge.chat import load_chat

    try:
        chat = load_chat(folder, cell.rollout.chat, thinking=cell.rollout.thinking)
    except MemoryWalkerError as error:
        yield Finding(
            "tokenizer", "missing", str(error), "take the tokenizer of the same checkpoint, or set rollout.chat"
        )
    else:
        yield Finding("tokenizer", "ok", f"{type(chat).__name__}, fits the model")


def _questions(cell: Cell, path: Path) -> Finding:
    try:
        number = len(read_questions(path))
    except ConfigError as error:
        return Finding("questions", "missing", str(error))
    found = f"{path}: {number} questions, {cell.trainer.prompts} per iteration"
    if number < cell.trainer.prompts:
        return Finding("questions", "warn", found, f"trainer.prompts={number}, or more questions")
    return Finding("questions", "ok", found)


def _ranks(cell: Cell, probed: Probe) -> Finding:
    split = cell.trainer
    found = f"{split.ranks} (tp {split.tp} x pp {split.pp} x cp {split.cp} x dp {split.dp})"
    if probed.gpus:
        found += f", {len(probed.gpus)} GPUs"
        if split.ranks > len(probed.gpus):
            return Finding("ranks", "missing", found, "a GPU for each rank: lower trainer.tp, pp, cp or dp")
        return Finding("ranks", "ok", found)
    cores = len(os.sched_getaffinity(0))
    found += f", {cores} CPU cores"
    if split.ranks > cores:
        return Finding(
            "ranks", "warn", found, "works, and the ranks wait for each other: lower trainer.tp, pp, cp or dp"
        )
    return Finding("ranks", "ok", found)


def _blocks(value: Any, where: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Every block of a configuration, with its place in it."""
    if isinstance(value, BaseModel):
        yield where, value
        for name in type(value).model_fields:
            yield from _blocks(getattr(value, name), f"{where}.{name}".lstrip("."))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _blocks(item, f"{where}.{i}")


def _block(where: str, block: BaseModel) -> Iterator[Finding]:
    """What a block names that is not in the configuration: code, a file, a key."""
    try:
        if isinstance(block, Custom):
            load_object(block.type, f"{where}.type")
            yield Finding("code", "ok", f"{where}: {block.type}")
        if isinstance(block, Bm25):
            if not block.corpus.is_file():
                raise ConfigError(f"{where}.corpus: there is no file {block.corpus}")
            yield Finding("corpus", "ok", f"{block.corpus}: {block.corpus.stat().st_size:,} bytes")
        variable = getattr(block, "key_variable", None)
        if variable is not None:
            read_key(variable, os.environ, where)
            yield Finding("key", "ok", f"{where}: {variable} is set")
    except ConfigError as error:
        name = "code" if isinstance(block, Custom) else "corpus" if isinstance(block, Bm25) else "key"
        remedy = f"export {block.key_variable}=..." if hasattr(block, "key_variable") else ""
        yield Finding(name, "missing", str(error), remedy)


def _agent(cell: Cell) -> Iterator[Finding]:
    """Of a black box: its program, and whether it gets on with the limits."""
    try:
        driver = driver_for(cell.harness)
        if driver is None:
            return
        from slime_plugin.tap.run import check_black_box  # with what it computes with

        check_black_box(cell, driver)
        found = str(driver.program())
        version = driver.version() if driver.verified else ""
    except ConfigError as error:
        yield Finding("agent", "missing", str(error))
        return
    if version == driver.verified:
        yield Finding("agent", "ok", f"{found} {version}".strip())
    else:
        remedy = f"launch/harnesses.sh installs {driver.verified}, which the driver was tried with"
        yield Finding("agent", "warn", f"{found} is version {version}", remedy)


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


@contextlib.contextmanager
def _spinner(what: str) -> Iterator[None]:
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    with Console(stderr=True).status(what):
        yield


def _print_table(findings: list[Finding]) -> None:
    """A line for each, and below it what to do."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.name), Text(finding.found))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", style="bold" if finding.status == "missing" else ""))
    console().print(table)
