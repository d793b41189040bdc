"""Output of commands: standard output, progress on standard error, and files."""

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

from slime_plugin.files import replacing

Item = TypeVar("Item")


def console(width: int | None = None) -> Console:
    """Standard output; wide if it is not a terminal."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=width or (200 if piped else None), highlight=False)


def log_line(line: str) -> None:
    """Standard error."""
    click.echo(line, err=True)


def with_progress(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items, with a counter on the terminal after half a second."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield from items
        return
    columns = (rich.progress.SpinnerColumn(), "{task.completed}", what, rich.progress.TimeElapsedColumn())
    progress = rich.progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)
    start, shown = time.monotonic(), False
    try:
        for item in items:
            yield item
            progress.advance(task)
            if not shown and time.monotonic() - start > 0.5:
                progress.start()
                shown = True
    finally:
        progress.stop()


@contextlib.contextmanager
def shown_stages() -> Iterator[Callable[[float, str], None]]:
    """Yield a callback that shows (seconds, stage): a spinner on a terminal, otherwise a line per stage."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with Console(stderr=True).status("starting") as status:
            yield lambda seconds, stage: status.update(f"{stage} ({seconds:.0f} s)")
        return
    shown: list[str] = []

    def show(seconds: float, stage: str) -> None:
        if stage not in shown:
            shown.append(stage)
            click.echo(f"{seconds:.0f} s: {stage}", err=True)

    yield show


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. ``path`` is replaced once the block has ended without an error."""
    path = path.resolve()  # what a link names is replaced, not the link
    if path.exists() and not path.is_file():
        raise click.ClickException(f"{path}: not a regular file; choose another path")
    try:
        with replacing(path) as draft:
            yield draft
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror or error}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a complete file or none."""
    with complete_file(path) as draft:
        draft.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", errors="backslashreplace"))
