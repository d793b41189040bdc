"""Where commands write to: standard output, progress on standard error, and whole files."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import click
import rich.progress
from rich.console import Console

Item = TypeVar("Item")


def console(width: int | None = None) -> Console:
    """Standard output. Where it is not a terminal there is no right margin to keep to."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=width or (200 if piped else None), highlight=False)


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


@contextlib.contextmanager
def shown_stages() -> Iterator[Callable[[float, str], None]]:
    """Is to be told seconds and stage of something slow: a spinner on a terminal, otherwise a line for each stage."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with Console(stderr=True).status("starting") as status:
            yield lambda seconds, stage: status.update(f"{stage} ({seconds:.0f} s)")
        return
    told: list[str] = []

    def tell(seconds: float, stage: str) -> None:
        if stage not in told:
            told.append(stage)
            click.echo(f"{seconds:.0f} s: {stage}", err=True)

    yield tell


def write_whole(path: Path, text: str) -> None:
    """Write a file or nothing: what was there before is replaced only by a complete file."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_bytes(text.encode("utf-8", errors="backslashreplace"))
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from error
