"""From the files a user names to the records a command works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from slime_plugin.cli.output import with_progress
from slime_plugin.errors import MemoryWalkerError, printable
from slime_plugin.record import Entry, Record, read_entries


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


def choose_record(path: Path, wanted: str | None) -> Record:
    """The record with that id or number; without either, the only one there is."""
    names: list[str] = []
    matches: list[Entry] = []
    damaged: list[Entry] = []
    for entry in with_progress(read_entries([path]), "records read"):
        if entry.record is None:
            damaged.append(entry)
            continue
        name = entry.record.meta.id
        names.append(printable(entry.number if name is None else name))
        if wanted is not None and str(name) == wanted:
            return entry.record
        if wanted in (None, str(entry.number)):
            matches = [*matches, entry][:8]
        elif wanted == "-1":
            matches = [entry]
    if len(matches) == 1 and matches[0].record is not None:
        return matches[0].record
    raise MemoryWalkerError(_no_choice(path, wanted, names, matches, damaged))


def _no_choice(path: Path, wanted: str | None, names: list[str], matches: list[Entry], damaged: list[Entry]) -> str:
    """Why no record was chosen, and what could be."""
    hit = [entry for entry in damaged if str(entry.number) == wanted]
    if hit or not names:
        return "\n".join(line for entry in hit or damaged for line in entry.problems) or f"{path}: holds no record"
    known = f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''} (memorywalker record list shows all)"
    if wanted is None:
        return f"{path}: holds {len(names)} records; choose one with --record: {known}"
    if matches:
        places = ", ".join(entry.where for entry in matches)
        return f"{path}: record {wanted} is in several files: {places}; name the file, or use an id: {known}"
    return f"{path}: no record {wanted!r:.40} among {len(names)}: {known}"


def sound_records(files: Iterable[Path], problems: list[str]) -> Iterator[Record]:
    """All sound records; what is wrong with the others is put into ``problems``."""
    for entry in with_progress(read_entries(files), "records read"):
        problems.extend(entry.problems)
        if entry.record is not None:
            yield entry.record
