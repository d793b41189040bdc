"""Read records from interchange JSON, JSON lines, a store, a folder of these, or standard input.

The format is detected from the first bytes, not from the name. Damaged records are yielded too, as problems.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slime_plugin.errors import MemoryWalkerError, RecordError, StoreError
from slime_plugin.record.interchange import parse_record
from slime_plugin.record.schema import Record
from slime_plugin.record.store import MAGIC, SUFFIX, Damage, scan_file


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a file, or what is wrong with it."""

    where: str
    """``run.records#3`` or ``records.jsonl:4``."""
    number: int | None
    """Index in the file; None for what is not a record, such as a torn tail."""
    record: Record | None
    problems: tuple[str, ...] = ()


_FOREIGN = {
    b"\x80": "a pickle; it is never loaded, since it could run code - write records as JSON or into a store",
    b"PK": "a zip archive (torch.save and numpy.savez write these); write records as JSON or into a store",
    b"\x1f\x8b": "gzip; unpack it first, or write records into a store, which is compressed already",
}


def read_entries(paths: Iterable[str | Path]) -> Iterator[Entry]:
    """Yield all entries of the files. A folder means the stores in it or, without any, for its JSON files."""
    for path in paths:
        for file in _expand(Path(path)):
            try:
                with _opened(file) as data:
                    yield from _file_entries(file, data)
            except StoreError as error:
                yield _bad(str(file), None, str(error).removeprefix(f"{file}: "))
            except OSError as error:
                yield _bad(str(file), None, f"cannot be read: {error.strerror}")


def read_records(paths: Iterable[str | Path]) -> Iterator[Record]:
    """Yield all records of the files; raise at the first problem."""
    for entry in read_entries(paths):
        if entry.record is None:
            raise MemoryWalkerError("\n".join(entry.problems))
        yield entry.record


def _expand(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for pattern in (f"*{SUFFIX}", "*.json*"):
        found = sorted(file for file in path.rglob(pattern) if file.suffix in (SUFFIX, ".json", ".jsonl"))
        if found:
            return found
    return [path]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for random access; pipes are copied to a temporary file first."""
    if path.is_dir():
        raise StoreError(f"{path}: a folder without records; they are in files named *{SUFFIX}, *.json or *.jsonl")
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else open(path, "rb") as file:
        if str(path) != "-" and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            yield file
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            yield copy


def _file_entries(path: Path, file: BinaryIO) -> Iterator[Entry]:
    start = file.read(len(MAGIC))
    file.seek(0)
    foreign = next((what for prefix, what in _FOREIGN.items() if start.startswith(prefix)), None)
    if MAGIC.startswith(start) and (start or path.suffix == SUFFIX):  # a new store may be empty
        yield from _store_entries(path, file)
    elif foreign:
        yield _bad(str(path), None, f"this is {foreign}")
    else:
        yield from _text_entries(path, file.read())


def _store_entries(path: Path, file: BinaryIO) -> Iterator[Entry]:
    number = 0
    for found in scan_file(file, path):
        where = f"{path}#{number}"
        if isinstance(found, Damage):
            yield _bad(str(path), None, found.message)
            continue
        yield Entry(where, number, found) if isinstance(found, Record) else _bad(where, number, *found.lines())
        number += 1


def _text_entries(path: Path, data: bytes) -> Iterator[Entry]:
    """One record, or one per line if the whole is none and every line looks like an object."""
    filled = [(line_number, line) for line_number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    could_be_lines = len(filled) > 1 and all(line.lstrip().startswith(b"{") for _, line in filled)
    whole = _parsed(str(path), 0, data)
    if whole.record is not None or not could_be_lines:
        yield whole
        return
    for number, (line_number, line) in enumerate(filled):
        yield _parsed(f"{path}:{line_number}", number, line)


def _parsed(where: str, number: int, text: bytes) -> Entry:
    try:
        return Entry(where, number, parse_record(text))
    except RecordError as error:
        return _bad(where, number, *error.lines())


def _bad(where: str, number: int | None, *lines: str) -> Entry:
    return Entry(where, number, None, tuple(f"{where}: {line}" for line in lines))
