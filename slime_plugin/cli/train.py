"""``memorywalker train``, and its progress, which other commands show too."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import rich.progress
from rich.console import Console

from slime_plugin.cli.config import CONFIG, OVERRIDES, prefixed_errors
from slime_plugin.cli.inputs import check_installed
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.report.formatting import format_number
from slime_plugin.run.folder import RunFolder
from slime_plugin.slime.refusals import check_training

PACKAGES = ("torch", "megatron", "safetensors", "ray", "aiohttp", "bm25s", "orjson", "tokenizers", "transformers")


@click.command()
@CONFIG
@OVERRIDES
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the run.  [default: runs/NAME_OF_CONFIG]"
)
@click.option("--resume", is_flag=True, help="Resume the run in that folder.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="RUN",
    help="Train on the recorded rollouts of another run, without an engine.",
)
def train(config: Path, overrides: tuple[str, ...], out: Path | None, resume: bool, replay: Path | None) -> None:
    """Train a policy: rollouts on SGLang, updates on Megatron, on this machine.

    CONFIG is a cell: model, harness, method, questions and tools. Settings after it override its own: method=sdcc
    trainer.iterations=50. Every rollout is recorded as it ends, and a run that was interrupted or killed resumes from
    its last checkpoint with --resume, without losing what it had sampled since.
    """
    cell = load_cell(config, overrides)
    folder = RunFolder(out or Path("runs") / config.stem)
    train_cell(cell, folder, config, resume=resume, replay=replay)
    click.echo(
        f"wrote {folder.path}; memorywalker compare {folder.path} compares all methods on its rollouts", err=True
    )


def train_cell(cell: Cell, folder: RunFolder, config: Path, *, resume: bool, replay: Path | None = None) -> None:
    """Train with progress on standard error. ``config`` is the file of the configuration, for messages."""
    check_installed("train,rollout", *PACKAGES)
    with prefixed_errors(config):
        check_training(cell)
        recorded = None
        if replay is not None:
            recorded = RunFolder(replay)
            recorded.read_settings()
        from slime_plugin.local.loop import train

        with _progress(cell) as watch:
            train(cell, folder, watch, resume=resume, recorded=recorded)


class _Bars:
    """Progress bars on a terminal; a line per iteration everywhere."""

    def __init__(self, console: Console, bars: rich.progress.Progress, iterations: int) -> None:
        self._console, self._bars = console, bars
        self._all = bars.add_task("iterations", total=iterations, note="")
        self._now = bars.add_task("starting", total=None, note="")
        self._rewards: list[float] = []
        self._has_heading = False

    def stage(self, what: str) -> None:
        self._bars.reset(self._now, description=what, total=None, note="")
        if self._bars.disable and not what.startswith("iteration"):
            self._console.print(what, highlight=False)

    def rollouts(self, iteration: int, done: int, total: int) -> None:
        self._bars.update(
            self._now, description=f"iteration {iteration}: rollouts", completed=done, total=total or None, note=""
        )

    def line(self, line: dict[str, Any]) -> None:
        if line["kind"] != "iteration":
            return
        if line["reward"] is not None:
            self._rewards.append(line["reward"])
        if not self._has_heading:
            self._console.print(_HEADING, highlight=False)
            self._has_heading = True
        self._console.print(_row(line), highlight=False)
        recent = self._rewards[-5:]
        note = f"reward {sum(recent) / len(recent):.3f} now, {self._rewards[0]:.3f} at first" if recent else ""
        self._bars.update(self._all, completed=line["iteration"] + 1, note=note)


_HEADING = "iteration  reward   logdiff   largest  edits  trained  of sampled  seconds"


def _row(line: dict[str, Any]) -> str:
    """Logdiff is the mean |logdiff| per trained token, in nats, before the iteration changes the weights."""
    logdiff = line["logdiff"]
    return (
        f"{line['iteration']:>9}  {format_number(line['reward']):>6}  "
        f"{format_number(logdiff['mean']):>8}  {format_number(logdiff['max']):>8}  "
        f"{line['K']:>5.1f}  {line['trained']:>7,}  {line['sampled']:>10,}  {line['seconds']['total']:>7.1f}"
    )


@contextlib.contextmanager
def _progress(cell: Cell) -> Iterator[_Bars]:
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[note]}"),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield _Bars(console, bars, cell.trainer.iterations)
