"""``memorywalker record check | show | stats``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from slime_plugin.cli.choose import choose_record, with_progress
from slime_plugin.record import read_entries, read_records
from slime_plugin.report.page import record_page
from slime_plugin.report.summary import summarise, summary_tables
from slime_plugin.report.terminal import draw_staircase

FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")


@click.group()
def record() -> None:
    """Check, draw and summarise the records of rollouts.

    FILE is interchange JSON, JSON lines, a record store, or a folder of stores.
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


@record.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--record", "wanted", metavar="ID|NUMBER", help="Which record, if the file holds several.")
@click.option("--html", type=click.Path(path_type=Path), metavar="PAGE", help="Write a self-contained page instead.")
@click.option("--width", type=click.IntRange(min=40), help="Columns to draw in.  [default: those of the terminal]")
def show(file: Path, wanted: str | None, html: Path | None, width: int | None) -> None:
    """Draw the live contexts of a rollout, one row per layer.

    Columns are tape positions, so every row has a hole where an edit took something out. A token was sampled under
    exactly what lies to its left in the row where it is marked as generated.
    """
    chosen = choose_record(file, wanted)
    if html is None:
        draw_staircase(chosen, Console(width=width))
        return
    try:
        html.write_text(record_page(chosen), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{html}: cannot be written: {error.strerror}") from error
    click.echo(f"wrote {html}")


@record.command()
@FILES
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(files: tuple[Path, ...], as_json: bool) -> None:
    """Count what edits did to a set of rollouts, and what each method would train."""
    summary = summarise(with_progress(read_records(files), "records counted"))
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    console = Console()
    for table in summary_tables(summary):
        console.print(table)
