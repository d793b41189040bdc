"""``memorywalker matrix``: every method under every editor, and the control, one run after the other."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_plugin.cli.inputs import ALL_METHODS, method_names
from slime_plugin.cli.output import console, log_line, write_whole
from slime_plugin.cli.scoring import check_trainer, progress_bar
from slime_plugin.cli.train import train_cell
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import MethodSettings
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError, MemoryWalkerError, refuse
from slime_plugin.local.compare_run import compare_run
from slime_plugin.local.scorer import CompareSettings
from slime_plugin.report.charts import check_plotly
from slime_plugin.report.formatting import format_duration
from slime_plugin.report.headline import sentences_of_all
from slime_plugin.report.matrix_table import CONTROL, control_line, legend, matrix_table, numbers
from slime_plugin.report.run_data import read_runs
from slime_plugin.report.run_page import run_page
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.settings import changes, flat
from slime_plugin.slime.refusals import training_problems

CONFIGS = tuple(Path(f"configs/small_world/{name}.yaml") for name in ("tc_rag", "agentfold", "memexrl", "search_r1"))
ITERATIONS = 8
"""Per cell, so that the small world's 16 cells take about half an hour on two cores."""
COMPARISON = CompareSettings(iterations=3, repeats=3)
START_S, ROLLOUT_S, COMPARE_S = 25.0, 0.09, 30.0
"""Seconds on two cores in the small world: until a cell samples, for a rollout and its update, for a comparison."""
_ONCE = f"{CONTROL} is trained once: nothing is edited there, so all methods are the same"


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One cell of the matrix and its run, which may have been started before."""

    config: Path
    cell: Cell
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def started(self) -> bool:
        return self.folder.settings.exists()

    @property
    def trained(self) -> int:
        """Iterations that have metrics."""
        lines = self.folder.read_metrics() if self.started else ()
        return max((line["iteration"] + 1 for line in lines if line["kind"] == "iteration"), default=0)

    @property
    def left(self) -> int:
        """Iterations that are still to be trained."""
        return max(0, self.cell.trainer.iterations - self.trained)

    @property
    def compared(self) -> bool:
        """Whether there is a comparison that covers the last iteration."""
        try:
            value = self.folder.read_comparison()
            return value is not None and bool(max(value["iterations"]) + 1 >= self.trained)
        except (MemoryWalkerError, ValueError, KeyError, TypeError):
            return False

    @property
    def finished(self) -> bool:
        return not self.left and self.compared

    @property
    def seconds(self) -> float:
        """Estimate of the time that is left."""
        if self.finished:
            return 0.0
        rollouts = self.left * self.cell.trainer.prompts * self.cell.rollout.samples
        return (START_S + ROLLOUT_S * rollouts if rollouts else 0.0) + COMPARE_S

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        if not self.left:
            return "trained, to be compared"
        return f"{self.trained} of {self.cell.trainer.iterations} iterations" if self.started else "new"


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG]... [KEY=VALUE]...")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/matrix"),
    show_default=True,
    metavar="DIR",
    help="Folder of the runs, and of report.html about all of them.",
)
@click.option(
    "--methods",
    type=method_names,
    default=ALL_METHODS,
    metavar="A,B",
    help="Train only these.  [default: all methods]",
)
@click.option("--dry-run", is_flag=True, help="Print what would be trained, and about how long it takes.")
def matrix(words: tuple[str, ...], out: Path, methods: tuple[MethodSettings, ...], dry_run: bool) -> None:
    """Train every method under every harness, one run after the other.

    Each CONFIG is a harness; without any, those of the small world: tc_rag, agentfold, memexrl and the control
    search_r1. Each is trained under every method into DIR/HARNESS-METHOD, and all methods are then compared on
    its rollouts, as memorywalker compare does. The control is trained once, into DIR/search_r1: where nothing is
    edited, all methods are the same.

    Runs have 8 iterations, whatever CONFIG says, unless trainer.iterations=N is given. Interrupt it at any moment: the
    same command resumes: it skips what is finished and retries what failed. The exit code is 1 if a run failed.
    """
    check_plotly()  # now, because the report comes last
    entries = _plan(words, out, [method.type for method in methods])
    if dry_run:
        _print_plan(entries, out)
        return
    failed = _run_all(entries, out)
    _print_results(entries, out)
    if failed:
        click.echo(f"failed: {', '.join(failed)}; the same command retries", err=True)
        sys.exit(1)


def _plan(words: Sequence[str], out: Path, methods: Sequence[str]) -> list[MatrixCell]:
    """Return all cells, checked before any of them runs."""
    configs = [Path(word) for word in words if "=" not in word] or _small_world()
    overrides = [word for word in words if "=" in word]
    keys = [override.partition("=")[0].strip() for override in overrides]
    if any(key in ("method", "method.type") for key in keys):
        raise click.UsageError("the matrix chooses methods itself: use --methods, such as --methods mask4d,sdcc")
    if not {"trainer", "trainer.iterations"} & set(keys):
        overrides.append(f"trainer.iterations={ITERATIONS}")
    entries: dict[Path, MatrixCell] = {}
    for config in configs:
        own = load_cell(config, [o for o in overrides if not o.startswith("method.")])
        harness, control = own.harness.type.rpartition(":")[2], own.harness.type == CONTROL
        once = own.method.type if own.method.type in methods else methods[0]
        for method in (once,) if control else methods:
            folder = RunFolder(out / (harness if control else f"{harness}-{method}"))
            if folder.path in entries:
                raise ConfigError(
                    f"{config}: {harness} is the harness of {entries[folder.path].config} too; give each its own "
                    "matrix, with its own --out"
                )
            cell = load_cell(config, [*overrides, f"method={method}"])
            entries[folder.path] = MatrixCell(config, cell, folder)
    refuse(dict.fromkeys(line for entry in entries.values() for line in _problems(entry)))
    return list(entries.values())


def _small_world() -> list[Path]:
    missing = [path for path in CONFIGS if not path.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]}: not here; run this in the folder that has configs/, or name CONFIG files")
    return list(CONFIGS)


def _problems(entry: MatrixCell) -> Iterator[str]:
    """Why a cell cannot be trained, or not in that folder."""
    yield from (f"{entry.config}: {problem}" for problem in training_problems(entry.cell))
    if not entry.started:
        return
    try:
        list(entry.folder.read_metrics())
        for change in changes(entry.folder, entry.cell):
            yield f"{entry.folder.path}: was started with {change}; keep that, or choose another --out"
    except MemoryWalkerError as error:
        yield f"{error}; remove {entry.folder.path} to start again"


def _run_all(entries: Sequence[MatrixCell], out: Path) -> list[str]:
    """Run all entries; return the names of those that failed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryWalkerError(f"{out}: cannot be written: {error.strerror}; choose another --out") from error
    if any(entry.cell.harness.type == CONTROL for entry in entries):
        log_line(_ONCE)
    failed: list[str] = []
    start, took, expected = time.monotonic(), 0.0, 0.0
    for number, entry in enumerate(entries, start=1):
        where = f"cell {number} of {len(entries)}: {entry.name}"
        if entry.finished:
            log_line(f"{where}: finished already")
            continue
        # Scale the estimate by how long the finished cells took.
        left = sum(later.seconds for later in entries[number - 1 :]) * (took / expected if expected else 1.0)
        entry_start, entry_expected = time.monotonic(), entry.seconds
        log_line(f"{where}; {format_duration(entry_start - start)} so far, about {format_duration(left)} to go")
        try:
            _run(entry)
            (run,) = read_runs([entry.folder])
        except KeyboardInterrupt:
            log_line(f"stopped in {entry.name}; run the same command again to resume")
            raise
        except (MemoryWalkerError, click.ClickException) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else str(error)
            log_line("\n".join(f"Error: {line}" for line in message.splitlines()))
            failed.append(entry.name)
        except Exception:  # noqa: BLE001  # a bug in one cell must not stop the others
            log_line(traceback.format_exc())
            failed.append(entry.name)
        else:
            took, expected = took + time.monotonic() - entry_start, expected + entry_expected
            log_line(f"{entry.name}: " + ", ".join(f"{key} {value}" for key, value in numbers(run).items()))
    return failed


def _run(entry: MatrixCell) -> None:
    """Run what is left of a cell."""
    cell, folder = entry.cell, entry.folder
    if entry.left:
        train_cell(cell, folder, entry.config, resume=entry.started)
    if not entry.compared:
        check_trainer()
        settings = replace(
            COMPARISON,
            parallel=cell.trainer.parallel,
            dtype=cell.trainer.dtype,
            batch_tokens=cell.trainer.batch_tokens,
        )
        with progress_bar(f"comparing {entry.name}") as progress:
            compare_run(folder, settings, progress, log_line)


def _print_results(entries: Sequence[MatrixCell], out: Path) -> None:
    """Print the table of all runs, and write their page."""
    folders = [entry.folder for entry in entries if entry.trained]
    if not folders:
        return
    runs = read_runs(folders)
    to = console()
    to.print(matrix_table(runs))
    for line in (legend(runs), control_line(runs), *sentences_of_all(runs)):
        if line is not None:
            to.print(line, markup=False)
    page = out / "report.html"
    with Console(stderr=True).status(f"writing {page}"):
        write_whole(page, run_page(folders))
    to.print(f"wrote {page}", soft_wrap=True, markup=False)


def _print_plan(entries: Sequence[MatrixCell], out: Path) -> None:
    """Print cells by configuration, with the settings in which they differ beyond harness and method."""
    out_console = console()
    left, seconds = [entry for entry in entries if not entry.finished], sum(entry.seconds for entry in entries)
    total = f"{len(entries)} cells in {out}, {len(left)} of them to do: about {format_duration(seconds)}"
    out_console.print(f"{total}, if this is the small world on two cores", soft_wrap=True, markup=False)
    if any(entry.cell.harness.type == CONTROL for entry in entries):
        out_console.print(_ONCE, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("cell", "state", "time", "settings that differ"):
        table.add_column(name, no_wrap=name != "settings that differ", justify="right" if name == "time" else "left")
    settings = {entry.name: _settings_of(entry.cell) for entry in entries}
    in_all = set.intersection(*map(set, settings.values()))
    for config in dict.fromkeys(entry.config for entry in entries):
        some = [entry for entry in entries if entry.config == config]
        shared = set.intersection(*(set(settings[entry.name]) for entry in some))
        differ = [setting for setting in settings[some[0].name] if setting in shared - in_all]
        table.add_row(Text(str(config)), "", "", Text(" ".join(differ)))
        for entry in some:
            own = [setting for setting in settings[entry.name] if setting not in shared]
            table.add_row(Text(f"  {entry.name}"), entry.state, format_duration(entry.seconds), Text(" ".join(own)))
    out_console.print(table)


def _settings_of(cell: Cell) -> list[str]:
    """Settings of a cell except harness and method, as on the command line."""
    settings = [(key, value) for key, value in flat(cell.to_json()) if key not in ("harness.type", "method.type")]
    return [f"{key}={json.dumps(value)}" for key, value in settings if value is not None]
