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

from slime_plugin.cli.compare import Settings, compare_run
from slime_plugin.cli.output import console, write_whole
from slime_plugin.cli.train import train_cell
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import EVERY_METHOD
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.training import training_problems
from slime_plugin.errors import ConfigError, MemoryWalkerError, nearest
from slime_plugin.local.settings import changes, flat
from slime_plugin.report.folder import RunFolder
from slime_plugin.report.headline import together
from slime_plugin.report.matrix import CONTROL, LEGEND, control_line, matrix_table, numbers
from slime_plugin.report.run_data import COMPARISON_VERSION, read_runs
from slime_plugin.report.run_page import run_page
from slime_plugin.seam.args import carry

METHODS = [method.type for method in EVERY_METHOD]
CONFIGS = tuple(Path(f"configs/small_world/{name}.yaml") for name in ("tc_rag", "agentfold", "memexrl", "search_r1"))
ITERATIONS = 8
"""Of each cell, so that the small world's 16 take about half an hour on two cores."""
COMPARISON = Settings(iterations=3, repeats=3)
START, ROLLOUT, COMPARE = 25.0, 0.09, 30.0
"""Seconds on two cores in the small world: until a cell samples, for a rollout and its update, for a comparison."""
_ONCE = f"{CONTROL} is trained once: nothing is edited there, so all methods are the same"


@dataclass(frozen=True, slots=True)
class Job:
    """One cell of the matrix and its run, which may have got anywhere before."""

    config: Path
    cell: Cell
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def begun(self) -> bool:
        return self.folder.settings.exists()

    @property
    def trained(self) -> int:
        """Iterations whose metrics are there."""
        lines = self.folder.read_metrics() if self.begun else ()
        return max((line["iteration"] + 1 for line in lines if line["kind"] == "iteration"), default=0)

    @property
    def left(self) -> int:
        """Iterations that are still to be trained."""
        return max(0, self.cell.trainer.iterations - self.trained)

    @property
    def compared(self) -> bool:
        """Whether there is a comparison that goes as far as the run does."""
        try:
            value = json.loads(self.folder.comparison.read_text(encoding="utf-8"))
            return bool(value["version"] == COMPARISON_VERSION and max(value["iterations"]) + 1 >= self.trained)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @property
    def finished(self) -> bool:
        return not self.left and self.compared

    @property
    def seconds(self) -> float:
        """What is left of it takes about as long."""
        if self.finished:
            return 0.0
        rollouts = self.left * self.cell.trainer.prompts * self.cell.rollout.samples
        return (START + ROLLOUT * rollouts if rollouts else 0.0) + COMPARE

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        if not self.left:
            return "trained, to be compared"
        return f"{self.trained} of {self.cell.trainer.iterations} iterations" if self.begun else "new"


def _chosen_methods(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = METHODS if value is None else [name.strip() for name in value.split(",")]
    wrong = next((name for name in names if name not in METHODS), None)
    if wrong is not None:
        raise click.BadParameter(f"there is no method {wrong!r:.40}; use {nearest(wrong, METHODS)}")
    return tuple(name for name in METHODS if name in names)


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
@click.option("--methods", metavar="A,B", callback=_chosen_methods, help="Only these.  [default: all methods]")
@click.option("--dry-run", is_flag=True, help="Say what would be trained, and about how long it takes.")
def matrix(words: tuple[str, ...], out: Path, methods: tuple[str, ...], dry_run: bool) -> None:
    """Train every method under every harness, one run after the other.

    Each CONFIG is a harness; without any, those of the small world: tc_rag, agentfold, memexrl and the control
    search_r1. Each is trained under every method into DIR/HARNESS-METHOD, and its rollouts are then put under all
    methods, as memorywalker compare does. The control is trained once, into DIR/search_r1: where nothing is edited, all
    methods are the same.

    Runs have 8 iterations, whatever CONFIG says, unless trainer.iterations=N is given. Interrupt it at any moment: the
    same command goes on, skips what is finished, and tries again what failed. The exit code is 1 if a run failed.
    """
    jobs = _plan(words, out, methods)
    if dry_run:
        _print_plan(jobs, out)
        return
    failed = _run_all(jobs, out)
    _print_results(jobs, out)
    if failed:
        click.echo(f"failed: {', '.join(failed)}; the same command tries again", err=True)
        sys.exit(1)


def _plan(words: Sequence[str], out: Path, methods: Sequence[str]) -> list[Job]:
    """All cells, checked before any work."""
    configs = [Path(word) for word in words if "=" not in word] or _small_world()
    overrides = [word for word in words if "=" in word]
    keys = [override.partition("=")[0].strip() for override in overrides]
    if any(key in ("method", "method.type") for key in keys):
        raise click.UsageError("the matrix chooses methods itself: use --methods, such as --methods mask4d,sdcc")
    if not {"trainer", "trainer.iterations"} & set(keys):
        overrides.append(f"trainer.iterations={ITERATIONS}")
    jobs: dict[Path, Job] = {}
    for config in configs:
        own = load_cell(config, [o for o in overrides if not o.startswith("method.")])
        harness, control = own.harness.type.rpartition(":")[2], own.harness.type == CONTROL
        once = own.method.type if own.method.type in methods else methods[0]
        for method in (once,) if control else methods:
            folder = RunFolder(out / (harness if control else f"{harness}-{method}"))
            if folder.path in jobs:
                raise ConfigError(
                    f"{config}: {harness} is the harness of {jobs[folder.path].config} too; give each matrix one of "
                    "them, and a folder of its own"
                )
            cell = load_cell(config, [*overrides, f"method={method}"])
            jobs[folder.path] = Job(config, cell, folder)
    problems = list(dict.fromkeys(line for job in jobs.values() for line in _problems(job)))
    if problems:
        raise ConfigError("\n".join(problems))
    return list(jobs.values())


def _small_world() -> list[Path]:
    missing = [path for path in CONFIGS if not path.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]}: not here; run this in the folder that has configs/, or name CONFIG files")
    return list(CONFIGS)


def _problems(job: Job) -> Iterator[str]:
    """Why a cell cannot be trained, or not in that folder."""
    yield from (f"{job.config}: {problem}" for problem in training_problems(job.cell))
    if not job.begun:
        return
    try:
        list(job.folder.read_metrics())
        for change in changes(job.folder, job.cell):
            yield f"{job.folder.path}: was begun with {change}; go on with that, or choose another --out"
    except MemoryWalkerError as error:
        yield f"{error}; remove {job.folder.path} to begin it again"


def _run_all(jobs: Sequence[Job], out: Path) -> list[str]:
    """The names of those that failed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryWalkerError(f"{out}: cannot be written: {error.strerror}; choose another --out") from error
    if any(job.cell.harness.type == CONTROL for job in jobs):
        _tell(_ONCE)
    failed: list[str] = []
    begun, took, expected = time.monotonic(), 0.0, 0.0
    for number, job in enumerate(jobs, start=1):
        where = f"cell {number} of {len(jobs)}: {job.name}"
        if job.finished:
            _tell(f"{where}: finished already")
            continue
        # How fast this machine is against what was expected of the cells that it has done.
        ahead = sum(later.seconds for later in jobs[number - 1 :]) * (took / expected if expected else 1.0)
        started, alone = time.monotonic(), job.seconds
        _tell(f"{where}; {_duration(started - begun)} so far, about {_duration(ahead)} to go")
        try:
            _run(job)
            (run,) = read_runs([job.folder])
        except KeyboardInterrupt:
            _tell(f"stopped in {job.name}; the same command goes on there")
            raise
        except (MemoryWalkerError, click.ClickException) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else str(error)
            _tell("\n".join(f"Error: {line}" for line in message.splitlines()))
            failed.append(job.name)
        except Exception:  # noqa: BLE001  # a mistake of ours in one cell must not cost the others
            _tell(traceback.format_exc())
            failed.append(job.name)
        else:
            took, expected = took + time.monotonic() - started, expected + alone
            _tell(f"{job.name}: " + ", ".join(f"{key} {value}" for key, value in numbers(run).items()))
    return failed


def _run(job: Job) -> None:
    """Whatever is left of a cell."""
    cell, folder = job.cell, job.folder
    if job.left:
        train_cell(cell, folder, str(job.config), resume=job.begun)
    if not job.compared:
        settings = replace(
            COMPARISON,
            parallel=cell.trainer.parallel,
            dtype=cell.trainer.dtype,
            batch_tokens=cell.trainer.batch_tokens,
        )
        with Console(stderr=True).status(f"comparing {job.name}") as status:
            compare_run(folder, settings, lambda n, of: status.update(f"comparing {job.name}: {n} of {of}"), _tell)


def _print_results(jobs: Sequence[Job], out: Path) -> None:
    """The table of all that there is, and a page about it."""
    folders = [job.folder for job in jobs if job.trained]
    if not folders:
        return
    runs = read_runs(folders)
    to = console()
    to.print(matrix_table(runs))
    for line in (LEGEND, control_line(runs), *together(runs)):
        if line is not None:
            to.print(line, markup=False)
    page = out / "report.html"
    with Console(stderr=True).status(f"writing {page}"):
        write_whole(page, run_page(folders))
    to.print(f"wrote {page}", soft_wrap=True, markup=False)


def _print_plan(jobs: Sequence[Job], out: Path) -> None:
    """Cells by configuration; of the settings, those in which they differ beyond harness and method."""
    to = console()
    left, seconds = [job for job in jobs if not job.finished], sum(job.seconds for job in jobs)
    told = f"{len(jobs)} cells in {out}, {len(left)} of them to do: about {_duration(seconds)}"
    to.print(f"{told}, if this is the small world on two cores", soft_wrap=True, markup=False)
    if any(job.cell.harness.type == CONTROL for job in jobs):
        to.print(_ONCE, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("cell", "state", "time", "settings that differ"):
        table.add_column(name, no_wrap=name != "settings that differ", justify="right" if name == "time" else "left")
    told_of = {job.name: _told(job.cell) for job in jobs}
    in_all = set.intersection(*map(set, told_of.values()))
    for config in dict.fromkeys(job.config for job in jobs):
        some = [job for job in jobs if job.config == config]
        shared = set.intersection(*(set(told_of[job.name]) for job in some))
        differ = [setting for setting in told_of[some[0].name] if setting in shared - in_all]
        table.add_row(Text(str(config)), "", "", Text(" ".join(differ)))
        for job in some:
            own = [setting for setting in told_of[job.name] if setting not in shared]
            table.add_row(Text(f"  {job.name}"), job.state, _duration(job.seconds), Text(" ".join(own)))
    to.print(table)


def _told(cell: Cell) -> list[str]:
    """The settings of a cell that its name does not tell, as they would be given on the command line."""
    settings = [(key, value) for key, value in flat(carry(cell)) if key not in ("harness.type", "method.type")]
    return [f"{key}={json.dumps(value)}" for key, value in settings if value is not None]


def _duration(seconds: float) -> str:
    """
    >>> _duration(50), _duration(1830)
    ('50 s', '30 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _tell(line: str) -> None:
    click.echo(line, err=True)
