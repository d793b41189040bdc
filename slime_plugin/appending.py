"""Files that grow by whole entries. A process that dies while writing leaves at most one incomplete entry, the last."""

from __future__ import annotations

import os
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
