"""``memorywalker record check | list | show | stats``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from slime_plugin.cli.inputs import FILE, FILES, RECORD, choose_record, sound_records
from slime_plugin.cli.output import console, with_progress, write_whole
from slime_plugin.record import read_entries
from slime_plugin.report.page import record_page
from slime_plugin.report.summary import listing, summarise, summary_tables
from slime_plugin.report.terminal import draw_staircase


@click.group()
def record() -> None:
    """Check, list, draw and summarise the records of rollouts.

    FILE is interchange JSON, JSON lines, a record store, - for standard input, or a folder: it stands for the stores
    (*.records) in it or, if it has none, for its JSON files.
    """


@record.command()
@FILES
def check(files: tuple[Path, ...]) -> None:
    """Check that records keep their contract.

    Prints one line per defect and exits with 1, or exits with 0 if there is none.
    """
    sound = defects = 0
    for entry in with_progress(read_entries(files), "records checked"):
        sound += entry.record is not None
        defects += len(entry.problems)
        for line in entry.problems:
            click.echo(" ".join(line.split()))
    found = f"{defects} defect{'s' * (defects != 1)}" if defects else "no defects"
    click.echo(f"{sound} sound record{'s' * (sound != 1)}, {found}", err=True)
    sys.exit(1 if defects else 0)


@record.command("list")
@FILES
def list_(files: tuple[Path, ...]) -> None:
    """List records: one line each, with id, harness, reward and size.

    Exits with 1 if some are damaged.
    """
    entries = list(with_progress(read_entries(files), "records read"))
    console().print(listing(entries))
    sys.exit(1 if any(entry.problems for entry in entries) else 0)


@record.command()
@FILE
@RECORD
@click.option("--html", type=click.Path(path_type=Path), metavar="PAGE", help="Write a self-contained page instead.")
@click.option("--width", type=click.IntRange(min=60), help="Columns to draw in.  [default: those of the terminal]")
def show(file: Path, wanted: str | None, html: Path | None, width: int | None) -> None:
    """Draw the live contexts of a rollout, one row per layer.

    Columns are tape positions, so every row has a hole where an edit took something out. A token was sampled under
    exactly what lies to its left in the first row that has it; a row says so if an edit has put its tokens into
    another order than the tape's.
    """
    chosen = choose_record(file, wanted)
    if html is None:
        draw_staircase(chosen, console(width))
    else:
        write_whole(html, record_page(chosen))
        click.echo(f"wrote {html}")


@record.command()
@FILES
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(files: tuple[Path, ...], as_json: bool) -> None:
    """Count what edits did to a set of rollouts, and what each method would train.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    problems: list[str] = []
    summary = summarise(sound_records(files, problems))
    for line in problems:
        click.echo(f"Error: {line}", err=True)
    if summary["total"]["records"] or not problems:
        if as_json:
            click.echo(json.dumps(summary, indent=2))
        else:
            console().print(*summary_tables(summary), sep="\n")
    sys.exit(1 if problems else 0)
