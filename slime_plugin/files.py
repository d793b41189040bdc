"""Writes files that a process may die while writing.

A file that grows by whole entries then has at most one incomplete entry, the last. A file that is replaced is the old
one or the whole new one.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


def append_whole(descriptor: int, data: bytes, *, sync: bool = False) -> None:
    """Append all of the data to a file or, if that raises, nothing. ``sync`` flushes it to the disk."""
    left, start = memoryview(data), os.fstat(descriptor).st_size
    try:
        while left:  # a full disk or a signal may leave a part
            left = left[os.write(descriptor, left) :]
        if sync:
            os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, start)
        raise


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file without the last one if it is incomplete: its writer died, or is still writing."""
    return path.read_bytes().split(b"\n")[:-1]


def cut_incomplete_line(descriptor: int, path: Path) -> None:
    """Truncate a file that is open for appending to its complete lines."""
    os.ftruncate(descriptor, path.read_bytes().rfind(b"\n") + 1)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder. It replaces ``path`` at the end, or is removed if the block raises."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")  # unique: several processes may write one file
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replace a file. ``sync`` flushes it to the disk first, which takes milliseconds. Raises :class:`OSError`."""
    with replacing(path) as draft, draft.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
