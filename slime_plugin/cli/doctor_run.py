"""``memorywalker doctor RUN``: what is wrong with a run, by its folder."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slime_plugin.cli.output import complete_file, console
from slime_plugin.diagnosis import Diagnosis, diagnose
from slime_plugin.diagnosis.bundle import write_bundle
from slime_plugin.report.formatting import format_number
from slime_plugin.report.tables import number_table
from slime_plugin.run.redaction import redact_values

_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}
_WIDTH = 120
"""Of the text in a bundle."""


def doctor_run(folder: Path, *, as_json: bool, bundle: Path | None, records: bool) -> NoReturn:
    """Print the symptoms of a run. Exits with 1 if one of them is alarming."""
    with Console(stderr=True).status(f"reading {folder}"):
        diagnosis = diagnose(folder)
    if as_json:
        click.echo(json.dumps(_to_json(diagnosis), indent=1))
    else:
        console().print(_shown(diagnosis))
    if bundle is not None:
        _write_bundle(bundle, diagnosis, records=records)
    sys.exit(0 if diagnosis.ok else 1)


def bundle_path(folder: Path, given: str) -> Path:
    """``RUN-bundle.tar.gz`` in the current folder, unless a file is named."""
    return Path(given or f"{folder.resolve().name}-bundle.tar.gz")


def _to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    run = diagnosis.run
    value = {
        "ok": diagnosis.ok,
        "run": str(run.folder.path),
        "kind": run.kind,
        "planned": run.planned,
        "done": run.done,
        "symptoms": [dataclasses.asdict(symptom) for symptom in diagnosis.symptoms],
        "health": diagnosis.health,
    }
    redacted: dict[str, Any] = redact_values(value, run.secrets)
    return redacted


def _shown(diagnosis: Diagnosis) -> RenderableType:
    run = diagnosis.run
    harness, method = run.setting("harness", "type"), run.setting("method", "type")
    planned = "an unknown number of" if run.planned is None else run.planned
    what = f"{harness} x {method}, " if harness and method else ""
    heading = f"{run.folder.path}: {what}{run.done} of {planned} iterations trained"
    parts: list[RenderableType] = [Text(heading, style="bold"), Text()]
    if diagnosis.symptoms:
        parts += [_symptoms(diagnosis), Text()]
    if diagnosis.health["iterations"]:
        parts += [_health(diagnosis), Text()]
    alarming = [symptom.name for symptom in diagnosis.symptoms if symptom.severity != "info"]
    names = ", ".join(dict.fromkeys(alarming))
    return Group(*parts, Text(f"alarming, the most likely cause first: {names}" if names else "nothing alarming"))


def _symptoms(diagnosis: Diagnosis) -> Table:
    """What was seen, then its place, cause and remedy below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for symptom in diagnosis.symptoms:
        style = _STYLES[symptom.severity]
        seen = Text.assemble((f"{symptom.name}: ", "bold"), symptom.seen)
        table.add_row(Text(symptom.severity, style=style), seen)
        if symptom.where:
            table.add_row("", Text(f"in {symptom.where}", style="dim"))
        table.add_row("", Text(f"cause: {symptom.cause}"))
        table.add_row("", Text(f"-> {symptom.remedy}", style="bold" if symptom.severity == "error" else ""))
    return table


def _health(diagnosis: Diagnosis) -> Table:
    """The first iterations."""
    headings = ("iteration", "reward", "ratio", "reference KL", "logdiff", "edits", "tool failures", "tokens/s")
    table = number_table(headings, padding=(0, 2, 0, 0))
    for line in diagnosis.health["iterations"]:
        logdiff = line["logdiff"].get("mean")
        numbers = (line["reward"], line["ratio"], line["reference_kl"], logdiff, line["K"], line["tool_failures"])
        speed = line["rollout_tokens_per_second"]
        table.add_row(str(line["iteration"]), *(format_number(value) for value in (*numbers, speed)))
    return table


def _write_bundle(path: Path, diagnosis: Diagnosis, *, records: bool) -> None:
    text = io.StringIO()
    Console(file=text, width=_WIDTH, highlight=False, color_system=None).print(_shown(diagnosis))
    with complete_file(path) as draft:
        names = write_bundle(draft, diagnosis, text.getvalue(), records=records)
    without = "" if records else ", no records"
    click.echo(f"wrote {path}: {len(names)} files{without}; keys are redacted, read it before you send it", err=True)
