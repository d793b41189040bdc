"""``memorywalker record check | list | show | stats | export``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from slime_plugin.cli.inputs import FILE, FILES, RECORD, check_installed, choose_record, echo_errors, valid_records
from slime_plugin.cli.output import complete_file, console, with_progress, write_whole
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record import read_entries
from slime_plugin.report.record_page import record_page
from slime_plugin.report.summary import listing, summarise, summary_tables
from slime_plugin.report.terminal import draw_staircase


@click.group()
def record() -> None:
    """Check, list, draw, summarise and export the records of rollouts.

    FILE is interchange JSON, JSON lines, a record store, - for standard input, or a folder, which means the stores
    (*.records) in it or, without any, for its JSON files.
    """


@record.command()
@FILES
def check(files: tuple[Path, ...]) -> None:
    """Check that records keep their contract.

    Prints one line per defect and exits with 1, or exits with 0 if there is none.
    """
    valid = defects = 0
    for entry in with_progress(read_entries(files), "records checked"):
        valid += entry.record is not None
        defects += len(entry.problems)
        _print_defects(entry.problems)
    click.echo(_outcome(f"{valid} valid record{'s' * (valid != 1)}", defects), err=True)
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

    Columns are tape positions, so rows have holes where an edit evicted something. A token was sampled under exactly
    what is to its left in the first row that has it; rows in another order than the tape's are marked.
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
    summary = summarise(valid_records(files, problems))
    echo_errors(problems)
    if summary["total"]["records"] or not problems:
        if as_json:
            click.echo(json.dumps(summary, indent=2))
        else:
            console().print(*summary_tables(summary), sep="\n")
    sys.exit(1 if problems else 0)


@record.command()
@FILES
@click.option(
    "--parquet",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="OUT.parquet",
    help="File to write.",
)
@click.option("--force", is_flag=True, help="Replace OUT.parquet if it exists.")
def export(files: tuple[Path, ...], out: Path, force: bool) -> None:
    """Export records to Parquet, for pandas or DuckDB: one row per record.

    Columns are id, group, harness, status, reward, weight_version, stop, the counts K, L, C, R and D, turns, calls,
    tokens, generated, logprobs, views, edits, and the remaining metadata and fields as JSON text (meta, extra).

    Damaged records are left out: one line per defect is printed, and the exit code is 1.
    """
    check_installed("parquet", "pyarrow")
    from slime_plugin.report.parquet import write_parquet

    if out.exists() and not force:
        raise MemoryWalkerError(f"{out}: exists already; pass --force to replace it, or another name")
    problems: list[str] = []
    with complete_file(out) as draft:
        written = write_parquet(draft, valid_records(files, problems))
        _print_defects(problems)
        if not written:
            raise MemoryWalkerError(f"{out}: not written, since there is no valid record to export")
    click.echo(_outcome(f"wrote {written} record{'s' * (written != 1)} to {out}", len(problems)), err=True)
    sys.exit(1 if problems else 0)


def _print_defects(problems: Iterable[str]) -> None:
    """One line each, on standard output."""
    for line in problems:
        click.echo(" ".join(line.split()))


def _outcome(done: str, defects: int) -> str:
    return f"{done}, {defects or 'no'} defect{'s' * (defects != 1)}"
