"""Which record of a file a command works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import rich.progress
from rich.console import Console

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record import Entry, Record, read_entries

Item = TypeVar("Item")


def choose_record(path: Path, wanted: str | None) -> Record:
    """The record with that id or number; without either, the only one there is."""
    entries = list(with_progress(read_entries([path]), "records read"))
    if not entries:
        raise MemoryWalkerError(f"{path}: holds no record")
    if wanted is None:
        if len(entries) > 1:
            raise MemoryWalkerError(
                f"{path}: holds {len(entries)} records; choose one with --record ({_names(entries)})"
            )
        return _sound(entries[0])
    for entry in entries:
        if entry.record is not None and str(entry.record.meta.id) == wanted:
            return entry.record
    if wanted.isdecimal() and int(wanted) < len(entries):
        return _sound(entries[int(wanted)])
    raise MemoryWalkerError(f"{path}: no record {wanted!r} among {len(entries)}; there are {_names(entries)}")


def with_progress(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, counted on the terminal while they come; silent where standard error is not one."""
    console = Console(stderr=True)
    columns = (rich.progress.SpinnerColumn(), "{task.completed}", what, rich.progress.TimeElapsedColumn())
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        for item in items:
            yield item
            progress.advance(task)


def _sound(entry: Entry) -> Record:
    if entry.record is None:
        raise MemoryWalkerError("\n".join(entry.problems))
    return entry.record


def _names(entries: list[Entry]) -> str:
    ids = [str(entry.record.meta.id) for entry in entries if entry.record and entry.record.meta.id is not None]
    named = f", by id: {', '.join(ids[:8])}{', ...' if len(ids) > 8 else ''}" if ids else ""
    return f"by number: 0 to {len(entries) - 1}{named}"
