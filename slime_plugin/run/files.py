"""Write files atomically: a reader sees the old file or the whole new one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


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
