"""From the files a user names to the records a command works on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import rich.progress
from rich.console import Console

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record import Record, read_entries
from slime_plugin.record.labels import printable

Item = TypeVar("Item")


class RecordPath(click.Path):
    """A file, a folder or ``-``; but not the empty name of an unset shell variable, which would be this folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


FILES = click.argument("files", nargs=-1, required=True, type=RecordPath(), metavar="FILE...")
FILE = click.argument("file", type=RecordPath())
RECORD = click.option(
    "--record", "wanted", metavar="ID|NUMBER", help="Which record, if the file holds several; -1 is the last."
)


def console(width: int | None = None) -> Console:
    """Standard output. Where it is not a terminal there is no right margin to keep to."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=width or (200 if piped else None), highlight=False)


def choose_record(path: Path, wanted: str | None) -> Record:
    """The record with that id or number; without either, the only one there is."""
    found: Record | None = None
    problems: dict[str, tuple[str, ...]] = {}
    names: list[str] = []
    for entry in with_progress(read_entries([path]), "records read"):
        if entry.record is None:
            problems[str(entry.number)] = entry.problems
            continue
        names.append(printable(entry.number if entry.record.meta.id is None else entry.record.meta.id))
        if wanted is not None and str(entry.record.meta.id) == wanted:
            return entry.record
        if wanted in (None, "-1", str(entry.number)):
            found = entry.record
    if found is not None and (wanted is not None or len(names) == 1):
        return found
    if wanted in problems:
        raise MemoryWalkerError("\n".join(problems[wanted]))
    if not names:
        raise MemoryWalkerError(
            "\n".join(line for lines in problems.values() for line in lines) or f"{path}: no record"
        )
    listed = f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''} (memorywalker record list shows all)"
    if wanted is None:
        raise MemoryWalkerError(f"{path}: holds {len(names)} records; choose one with --record: {listed}")
    raise MemoryWalkerError(f"{path}: no record {wanted!r:.40} among {len(names)}: {listed}")


def sound_records(files: Iterable[Path], what: str) -> Iterator[Record]:
    """All sound records. What is wrong with the others goes to standard error, and the command ends with 1."""
    defects = sound = 0
    for entry in with_progress(read_entries(files), what):
        defects += len(entry.problems)
        for line in entry.problems:
            click.echo(f"Error: {line}", err=True)
        if entry.record is not None:
            sound += 1
            yield entry.record
    if defects:
        context = click.get_current_context()
        context.call_on_close(lambda: sys.exit(1))
        if sound == 0:
            context.exit(1)


def with_progress(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, counted on the terminal if they take longer than a moment."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield from items
        return
    columns = (rich.progress.SpinnerColumn(), "{task.completed}", what, rich.progress.TimeElapsedColumn())
    progress = rich.progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)
    begun, started = time.monotonic(), False
    try:
        for item in items:
            yield item
            progress.advance(task)
            if not started and time.monotonic() - begun > 0.5:
                progress.start()
                started = True
    finally:
        progress.stop()
