"""Open whatever holds records: interchange JSON, JSON lines, a store, or a folder of stores.

What a file is is read from its first bytes, not from its name. Every entry of a file is yielded, good or bad, so
that one damaged record hides none of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_plugin.errors import RecordError, StoreError
from slime_plugin.record.interchange import parse_record
from slime_plugin.record.schema import Record
from slime_plugin.record.store import MAGIC, SUFFIX, Damage, scan_store


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a file, or the lines that say why it is none."""

    where: str
    """The file, and the number of the record in it where there are several: ``run.records#3``."""
    record: Record | None
    problems: tuple[str, ...] = ()


_FOREIGN = {
    b"\x80": "a pickle; it is never loaded, since it could run code - write records as JSON or into a store",
    b"PK": "a zip archive (torch.save and numpy.savez write these); write records as JSON or into a store",
    b"\x1f\x8b": "gzip; unpack it first, or write records into a store, which is compressed already",
}


def read_entries(paths: Iterable[str | Path]) -> Iterator[Entry]:
    """All entries of the files, in order. A folder stands for the stores in it."""
    for path in paths:
        for file in _expand(Path(path)):
            try:
                yield from _file_entries(file)
            except StoreError as error:
                yield _bad(str(file), str(error).removeprefix(f"{file}: "))
            except OSError as error:
                yield _bad(str(file), f"cannot be read: {error.strerror}")


def read_records(paths: Iterable[str | Path]) -> Iterator[Record]:
    """All records of the files; the first problem stops with an error that names it."""
    for entry in read_entries(paths):
        if entry.record is None:
            raise StoreError("\n".join(entry.problems))
        yield entry.record


def _expand(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(path.rglob(f"*{SUFFIX}")) or [path]  # an empty folder fails as a file that cannot be read


def _file_entries(path: Path) -> Iterator[Entry]:
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    if start and MAGIC.startswith(start):
        yield from _store_entries(path)
        return
    for prefix, what in _FOREIGN.items():
        if start.startswith(prefix):
            yield _bad(str(path), f"this is {what}")
            return
    yield from _text_entries(path)


def _store_entries(path: Path) -> Iterator[Entry]:
    for number, found in enumerate(scan_store(path)):
        where = f"{path}#{number}"
        if isinstance(found, Record):
            yield Entry(where, found)
        elif isinstance(found, Damage):
            yield _bad(str(path), found.message)
        else:
            yield _bad(where, *found.lines())


def _text_entries(path: Path) -> Iterator[Entry]:
    data = path.read_bytes()
    lines = data.split(b"\n")
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    one_per_line = path.suffix == ".jsonl" or (len(filled) > 1 and _is_object(filled[0][1]))
    if one_per_line and filled:
        for number, line in filled:
            yield _parsed(f"{path}:{number}", line)
    else:
        yield _parsed(str(path), data)


def _is_object(line: bytes) -> bool:
    line = line.strip()
    return line.startswith(b"{") and line.endswith(b"}")


def _parsed(where: str, text: bytes) -> Entry:
    try:
        return Entry(where, parse_record(text))
    except RecordError as error:
        return _bad(where, *error.lines())


def _bad(where: str, *lines: str) -> Entry:
    return Entry(where, None, tuple(f"{where}: {line}" for line in lines))
