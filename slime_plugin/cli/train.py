"""``memorywalker train``, and the progress that other commands show while they train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import rich.progress
from rich.console import Console

from slime_plugin.cli.config import CONFIG, OVERRIDES
from slime_plugin.cli.inputs import check_installed
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.training import check_training
from slime_plugin.errors import ConfigError
from slime_plugin.report.folder import RunFolder
from slime_plugin.report.numbers import shown

PACKAGES = ("torch", "megatron", "safetensors", "ray", "aiohttp", "bm25s", "orjson", "tokenizers", "transformers")


@click.command()
@CONFIG
@OVERRIDES
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the run.  [default: runs/NAME_OF_CONFIG]"
)
@click.option("--resume", is_flag=True, help="Go on where the run in that folder stopped.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="RUN",
    help="Train on the recorded rollouts of another run, without an engine.",
)
def train(config: Path, overrides: tuple[str, ...], out: Path | None, resume: bool, replay: Path | None) -> None:
    """Train a policy: rollouts on SGLang, updates on Megatron, on this machine.

    CONFIG is a cell: model, harness, method, questions and tools. Settings can be given anew behind it: method=sdcc
    trainer.iterations=50. Every rollout is written down as it ends, and a run that was interrupted or killed goes on
    from its last checkpoint with --resume, without losing what it had sampled since.
    """
    cell = load_cell(config, overrides)
    folder = RunFolder(out or Path("runs") / config.stem)
    train_cell(cell, folder, str(config), resume=resume, replay=replay)
    click.echo(
        f"wrote {folder.path}; memorywalker compare {folder.path} puts its rollouts under every method", err=True
    )


def train_cell(cell: Cell, folder: RunFolder, where: str, *, resume: bool, replay: Path | None = None) -> None:
    """Train with progress on standard error. ``where`` names the configuration in messages."""
    check_installed("train,rollout", *PACKAGES)
    try:
        check_training(cell)
        recorded = None
        if replay is not None:
            recorded = RunFolder(replay)
            recorded.read_settings()
        from slime_plugin.local.driver import train

        with _shown(cell) as watch:
            train(cell, folder, watch, resume=resume, recorded=recorded)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None


class _Bars:
    """Bars on a terminal, lines elsewhere: one per iteration either way."""

    def __init__(self, console: Console, bars: rich.progress.Progress, iterations: int) -> None:
        self._console, self._bars = console, bars
        self._all = bars.add_task("iterations", total=iterations, told="")
        self._now = bars.add_task("starting", total=None, told="")
        self._rewards: list[float] = []
        self._headed = False

    def stage(self, what: str) -> None:
        self._bars.reset(self._now, description=what, total=None, told="")
        if self._bars.disable and not what.startswith("iteration"):
            self._console.print(what, highlight=False)

    def rollouts(self, iteration: int, done: int, total: int) -> None:
        self._bars.update(
            self._now, description=f"iteration {iteration}: rollouts", completed=done, total=total or None, told=""
        )

    def line(self, line: dict[str, Any]) -> None:
        if line["kind"] != "iteration":
            return
        if line["reward"] is not None:
            self._rewards.append(line["reward"])
        if not self._headed:
            self._console.print(_HEADING, highlight=False)
            self._headed = True
        self._console.print(_told(line), highlight=False)
        recent = self._rewards[-5:]
        told = f"reward {sum(recent) / len(recent):.3f} of late, {self._rewards[0]:.3f} at first" if recent else ""
        self._bars.update(self._all, completed=line["iteration"] + 1, told=told)


_HEADING = "iteration  reward     drift   largest  edits  trained  of sampled  seconds"


def _told(line: dict[str, Any]) -> str:
    """Drift is |trainer - rollout| per trained token, in nats, before the iteration changes the weights."""
    drift = line["logdiff"]
    return (
        f"{line['iteration']:>9}  {shown(line['reward']):>6}  {shown(drift['mean']):>8}  {shown(drift['max']):>8}  "
        f"{line['K']:>5.1f}  {line['trained']:>7,}  {line['sampled']:>10,}  {line['seconds']['total']:>7.1f}"
    )


@contextlib.contextmanager
def _shown(cell: Cell) -> Iterator[_Bars]:
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[told]}"),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield _Bars(console, bars, cell.trainer.iterations)
