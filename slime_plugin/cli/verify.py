"""``memorywalker verify``."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from slime_plugin import __version__
from slime_plugin.cli.config import prefixed_errors, with_cell
from slime_plugin.cli.inputs import RecordPath, all_valid_records, check_installed
from slime_plugin.cli.output import console, shown_stages, write_whole
from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError, nearest
from slime_plugin.report.verification_page import verification_page
from slime_plugin.rollout.server import chosen_device
from slime_plugin.verify.checks import CHECKS, run_checks
from slime_plugin.verify.measurement import CheckResult
from slime_plugin.verify.settings import Device, Verification

PACKAGES = ("torch", "megatron-core", "flash-attn", "transformer-engine", "sglang")
"""Whose speed is measured."""
_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def check_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(CHECKS) if value is None else tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in CHECKS:
            raise click.BadParameter(f"there is no check {name!r:.40}; use {nearest(name, list(CHECKS))}")
    return tuple(name for name in CHECKS if name in names)


def _check_suffixes(context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in paths:
        if path.suffix not in (".html", ".json"):
            raise click.BadParameter(f"{path} is neither a page, FILE.html, nor FILE.json")
    return paths


@click.command()
@with_cell
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What to compute on.  [default: GPUs, if there are]")
@click.option("--quick", is_flag=True, help="Smaller inputs.")
@click.option(
    "--only", "names", callback=check_names, metavar="A,B", help=f"Only these checks, of {', '.join(CHECKS)}."
)
@click.option(
    "--records",
    type=RecordPath(),
    metavar="FILE",
    help="Rollouts of the model to compare methods on.  [default: the model samples some]",
)
@click.option(
    "--out",
    "outputs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_check_suffixes,
    metavar="FILE",
    help="Also write a page, FILE.html, or what --json prints, FILE.json, for plan --measured. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(
    cell: Cell,
    config: Path,
    device: Device | None,
    quick: bool,
    names: tuple[str, ...],
    records: Path | None,
    outputs: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Check on this machine that a cell computes what it should.

    Runs the code that trains, on the cell's ranks, precision and model, against independent float64 arithmetic: each
    check prints what it measured, the limit, the seconds and, if it fails, what to do. One that cannot run here is
    skipped and says why.

    Exits with 1 if a check failed.
    """
    check_installed("train", "torch", "megatron", "safetensors")
    chosen = choose_device(device)
    given = () if records is None else tuple(all_valid_records([records])[0])
    verification = Verification(cell, chosen, quick, given)
    with prefixed_errors(config):
        verification.architecture.check_split(verification.parallel)
    started = time.monotonic()
    with shown_stages() as show:

        def begin(name: str) -> None:
            show(time.monotonic() - started, f"{name}: {CHECKS[name]}")

        results = list(run_checks(verification, names, begin))
    value = to_json(verification, config, results)
    text = json.dumps(value, indent=1, allow_nan=False)
    if as_json:
        click.echo(text)
    else:
        print_table(results)
        click.echo(f"\n{value['verdict']}")
    for path in outputs:
        write_whole(path, f"{text}\n" if path.suffix == ".json" else verification_page(value))
        click.echo(f"wrote {path}", err=True)
    sys.exit(0 if value["ok"] else 1)


def choose_device(wanted: Device | None) -> Device:
    """Return where to compute. torch is not loaded yet: on a CPU it never sees the GPUs, and neither do ranks."""
    if wanted == "cuda" and chosen_device("auto") != "cuda":
        raise ConfigError("--device cuda: torch finds no GPU here; nvidia-smi shows whether the driver does")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as in a job: Megatron relies on the order of launches
    if wanted == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return wanted or chosen_device("auto")


def to_json(
    verification: Verification, config: Path, results: Sequence[CheckResult], about: Mapping[str, str] = CHECKS
) -> dict[str, Any]:
    """Return what ``--json`` prints. ``about`` describes the checks."""
    split = verification.parallel
    failed = [result.check for result in results if result.verdict == "failed"]
    skipped = [result.check for result in results if result.verdict == "skipped"]
    passed = len(results) - len(failed) - len(skipped)
    parts = [f"{passed} passed", *([f"{len(failed)} failed: {', '.join(failed)}"] if failed else [])]
    parts += [f"{len(skipped)} skipped: {', '.join(skipped)}"] if skipped else []
    return {
        "version": 1,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ok": not failed,
        "verdict": "; ".join(parts),
        "config": str(config),
        "model": str(verification.model),
        "device": verification.device,
        "dtype": verification.dtype,
        "split": {"tp": split.tp, "pp": split.pp, "cp": split.cp, "sp": split.sp},
        "quick": verification.quick,
        "measured": _measured(verification, results),
        "checks": [{"about": about[result.check], **result.to_json()} for result in results],
    }


def _measured(verification: Verification, results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return what memorywalker plan --measured uses, and what it was measured on and with."""
    device: str = verification.device
    if "torch" in sys.modules:  # some check has computed something; where torch cannot be loaded, resources says so
        from slime_plugin.local.timing import device_name

        device = device_name()
    split = verification.parallel
    findings = [finding for result in results for finding in result.measurements]
    return {
        "values": {finding.assumption: finding.value for finding in findings if finding.assumption},
        "device": device,
        "model": verification.model.name,
        "method": verification.cell.method.type,
        "dtype": verification.dtype,
        "split": {"tp": split.tp, "pp": split.pp, "cp": split.cp, "sp": split.sp},
        "quick": verification.quick,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"memorywalker": __version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def print_table(results: Sequence[CheckResult], about: Mapping[str, str] = CHECKS) -> None:
    """Print a line per check, its measurements below it, and what to do."""
    table = Table(box=None, pad_edge=False, header_style="")
    for heading in ("", "check", "measured", "found", "limit", "seconds"):
        numeric = heading in ("limit", "seconds")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for result in results:
        verdict = Text(result.verdict, style=_STYLES[result.verdict])
        table.add_row(verdict, Text(result.check), Text(about[result.check]), "", "", f"{result.seconds:.1f}")
        for finding in result.measurements:
            style = _STYLES["failed"] if not finding.ok else "yellow" if finding.remedy else ""
            note = f"; {finding.remedy}" if finding.ok and finding.remedy else ""
            found = Text(finding.found + note, style=style)
            table.add_row("", "", Text(f"  {finding.what}"), found, Text(finding.limit), "")
        if result.message:
            table.add_row("", "", Text(f"  {result.message}", style=_STYLES[result.verdict]), "", "", "")
        for remedy in result.remedies:
            table.add_row("", "", Text(f"  -> {remedy}", style="bold"), "", "", "")
    console().print(table)
