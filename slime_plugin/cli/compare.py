"""``memorywalker compare``, and the same for other commands: :func:`compare_run`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import rich.progress
from numpy.typing import NDArray
from rich.console import Console

from slime_plugin.cli.inputs import MODEL, RecordPath, check_installed
from slime_plugin.cli.output import console, write_whole
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.method import EVERY_METHOD, Method, NaiveCompressed
from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import MemoryWalkerError, nearest
from slime_plugin.methods.credit import LEFT_OUT
from slime_plugin.record import Meta, Record, read_entries
from slime_plugin.record.store import SUFFIX
from slime_plugin.report.comparison import comparison_table, heading, verdict
from slime_plugin.report.folder import RunFolder

if TYPE_CHECKING:
    from slime_plugin.megatron.compare import Comparison

Progress = Callable[[int, int], None]
"""Is told how much of how much is done."""
Tell = Callable[[str], None]
"""Is told, in a line, what is left out and why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How runs are compared."""

    methods: tuple[Method, ...] = EVERY_METHOD
    """naive_compressed is one of them: costs are measured against it."""
    iterations: int | None = 6
    """Of a training run at most so many, evenly spread, with the first and the last; all of them if None."""
    repeats: int = 5
    """Timed updates per method; with 0 there are no costs."""
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: str | None = None
    batch_tokens: int = 8192


DEFAULTS = Settings()


def compare_run(
    folder: RunFolder,
    settings: Settings = DEFAULTS,
    on_progress: Progress = lambda done, total: None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """The rollouts of a training run under several methods, each with the weights that sampled it.

    Writes ``comparison.json`` and ``comparison/`` into the run, and returns the former.
    """
    found = _of_run(folder, settings.iterations, tell)
    return _compare(found, settings, on_progress, folder)


def compare_records(
    path: Path,
    model: Path,
    settings: Settings = DEFAULTS,
    on_progress: Progress = lambda done, total: None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """The same for records outside a training run, all sampled by one model. A folder of stores is written into."""
    found = _Found()
    found.add(0, model, path, None, tell)
    return _compare(found, settings, on_progress, _folder_of_stores(path))


def _folder_of_stores(path: Path) -> RunFolder | None:
    """In a folder of JSON files, what is written would be taken for another record."""
    return RunFolder(path) if path.is_dir() and any(path.rglob(f"*{SUFFIX}")) else None


@dataclass
class _Found:
    """What there is to compare: records by iteration, and the weights that sampled them."""

    batches: list[tuple[int, Path, list[Record]]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts, by cause."""
    skipped: list[int] = field(default_factory=list)
    """Iterations whose weights are gone."""

    def add(self, iteration: int, weights: Path, records: Path, version: str | None, tell: Tell) -> None:
        """``version`` is that of the weights; if it is not known, all records that have one have to agree on it."""
        usable: list[Record] = []
        expected = version
        before = self.left_out.copy()
        for entry in read_entries([records]):
            for line in entry.problems:
                tell(f"Error: {line}")
            if entry.record is None:
                self.left_out["damaged"] += 1
            elif entry.record.meta.status in LEFT_OUT:
                self.left_out[entry.record.meta.status] += 1
            elif _straddles(entry.record.meta):
                self.left_out["straddling"] += 1
            else:
                usable.append(entry.record)
                if version is not None or entry.record.meta.weight_version is not None:
                    expected = _checked_version(entry.record, expected, entry.where)
        without = self.left_out - before
        if without:
            tell(f"{records}: left out {', '.join(f'{number} {cause}' for cause, number in without.items())}")
        if usable:
            self.batches.append((iteration, weights, usable))


def _of_run(folder: RunFolder, limit: int | None, tell: Tell) -> _Found:
    found = _Found()
    folder.read_settings()  # or it is not a training run
    iterations, versions = folder.iterations(), set(folder.versions())
    found.skipped = [iteration for iteration in iterations if iteration not in versions]
    there = [iteration for iteration in iterations if iteration in versions]
    if found.skipped:
        gone = ", ".join(map(str, found.skipped))
        tell(f"{folder.path}: without iterations {gone}: the weights that sampled them are no longer there")
    for iteration in _spread(there, limit):
        found.add(iteration, folder.weights(iteration), folder.rollouts(iteration), str(iteration), tell)
    if not found.batches:
        raise MemoryWalkerError(
            f"{folder.path}: {len(iterations)} iterations with rollouts, {len(there)} with the weights that sampled "
            "them, and none with a rollout that ended well; compare a run while its weights are there"
        )
    return found


def _spread(numbers: Sequence[int], limit: int | None) -> list[int]:
    """At most so many, evenly spread, with the first and the last.

    >>> _spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if limit is None or len(numbers) <= limit:
        return list(numbers)
    return [numbers[round(place)] for place in np.linspace(0, len(numbers) - 1, limit).tolist()]


def _straddles(meta: Meta) -> bool:
    """The weights changed in the middle of a turn, so that no single version sampled it."""
    turns = meta.extra.get("turns")
    return isinstance(turns, list) and any(isinstance(turn, dict) and turn.get("straddles") for turn in turns)


def _checked_version(record: Record, version: str | None, where: str) -> str | None:
    """Refuse what other weights have sampled: its drift would be theirs, not the method's."""
    own = None if record.meta.weight_version is None else str(record.meta.weight_version)
    if own == version or not record.generated.any():
        return version
    if version is None:
        return own
    sampled = "does not say which weights sampled it" if own is None else f"was sampled by weights of version {own!r}"
    raise MemoryWalkerError(
        f"{where}: {record.label} {sampled}, not by version {version!r}, which the others are scored with; "
        "move it to a file of its own and give --model"
    )


def _compare(found: _Found, settings: Settings, on_progress: Progress, folder: RunFolder | None) -> dict[str, Any]:
    if not found.batches:
        raise MemoryWalkerError("no sound record to work on")
    for _, weights, _ in found.batches:
        Architecture.read(weights).check_split(settings.parallel)  # before torch is loaded, which takes seconds
    check_installed("train", "torch", "megatron", "safetensors")
    from slime_plugin.megatron.compare import Batch, compare, units_of_work
    from slime_plugin.megatron.score import Scorer

    batches = [
        Batch(
            iteration,
            tuple(records),
            Scorer(weights, settings.methods, settings.parallel, settings.dtype, settings.batch_tokens),
        )
        for iteration, weights, records in found.batches
    ]
    done, total = 0, units_of_work(batches, settings.repeats)

    def advance(units: int) -> None:
        nonlocal done
        done += units
        on_progress(done, total)

    on_progress(0, total)
    comparison = compare(batches, settings.repeats, advance)
    value = comparison.to_json() | {"left_out": dict(found.left_out), "skipped": found.skipped}
    if folder is not None:
        _write(folder, comparison, value)
    return value


def _write(folder: RunFolder, comparison: Comparison, value: dict[str, Any]) -> None:
    """Numbers per token first, the file that names them last; what an earlier comparison had beyond them is removed."""
    files = {
        folder.comparison_arrays / f"{method.type}.npz": comparison.arrays(i)
        for i, method in enumerate(comparison.methods)
    }
    drafts = {path: path.with_name(f".{path.name}.part") for path in files}
    try:
        folder.comparison_arrays.mkdir(exist_ok=True)
        for path, arrays in files.items():
            _save(drafts[path], arrays)
        for path, draft in drafts.items():
            draft.replace(path)
        write_whole(folder.comparison, json.dumps(value, indent=1, allow_nan=False) + "\n")
        for path in set(folder.comparison_arrays.glob("*.npz")) - set(files):
            path.unlink()
    except OSError as error:
        raise MemoryWalkerError(f"{folder.comparison_arrays}: cannot be written: {error.strerror}") from error
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:  # by name, numpy would add an ending
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _chosen_methods(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Method, ...]:
    known = [method.type for method in EVERY_METHOD]
    names = known if value is None else [NaiveCompressed().type, *(name.strip() for name in value.split(","))]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise click.BadParameter(f"there is no method {wrong!r:.40}; use {nearest(wrong, known)}")
    return tuple(method for method in EVERY_METHOD if method.type in names)


def _chosen_number(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value != "all" and not (value.isdecimal() and int(value)):
        raise click.BadParameter(f"{value!r:.40} is neither a positive whole number nor all")
    return None if value == "all" else int(value)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RecordPath(), metavar="RUN...")
@click.option(
    "--methods", metavar="A,B", callback=_chosen_methods, help="These and naive_compressed.  [default: all methods]"
)
@click.option(
    "--iterations",
    default="6",
    show_default=True,
    metavar="N|all",
    callback=_chosen_number,
    help="How many iterations of a training run, evenly spread.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Timed updates per method; 0 leaves costs out.",
)
@MODEL
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON per RUN.")
def compare(runs: tuple[Path, ...], model: Path | None, as_json: bool, **options: Any) -> None:
    """Put the same recorded rollouts under several methods.

    RUN is the folder of a training run. Each of its iterations is scored with the weights that sampled it, so an exact
    method is at the rounding error of the two engines and anything above it is a method's own error. Then whole updates
    of one iteration are timed, methods in turn. The numbers are written into RUN as comparison.json, and those of every
    token as comparison/METHOD.npz.

    RUN may also be a file or folder of records that the weights in --model have sampled. Only a folder of stores
    (*.records) is written into.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    parallel = Parallelism(*(options.pop(key) for key in ("tp", "pp", "cp", "sp")))
    settings = Settings(parallel=parallel, **options)
    training = [_is_training_run(run) for run in runs]
    for run, trained in zip(runs, training, strict=True):
        if trained and model is not None:
            raise click.UsageError(f"{run} is a training run and has its own weights: leave --model out")
        if not trained and model is None:
            raise click.UsageError(f"{run} is not a training run: say with --model which weights sampled its records")
    damaged = False
    for run in runs:
        with _shown_progress(run) as on_progress:
            if model is None:
                value = compare_run(RunFolder(run), settings, on_progress, _tell)
            else:
                value = compare_records(run, model, settings, on_progress, _tell)
        damaged |= "damaged" in value["left_out"]
        if as_json:
            click.echo(json.dumps(value, separators=(",", ":"), allow_nan=False))
        else:
            _print(value, run)
    sys.exit(1 if damaged else 0)


(_MODEL,) = (option for option in compare.params if option.name == "model")
_MODEL.required = False  # a training run has its own


def _is_training_run(path: Path) -> bool:
    """A folder of rollouts has a ``run.json`` as well, but no cell to train in it."""
    folder = RunFolder(path)
    try:
        return "cell" in json.loads(folder.settings.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise MemoryWalkerError(f"{folder.settings}: cannot be read ({type(error).__name__})") from error


def _tell(line: str) -> None:
    click.echo(line, err=True)


@contextlib.contextmanager
def _shown_progress(run: Path) -> Iterator[Progress]:
    """A bar on a terminal."""
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.TimeElapsedColumn())
    with rich.progress.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(f"comparing {run.name or run}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print(value: dict[str, Any], run: Path) -> None:
    out = console()
    out.print(heading(value, str(run)), soft_wrap=True, markup=False)
    out.print(comparison_table(value))
    out.print(verdict(value), soft_wrap=True, markup=False)
    folder = _folder_of_stores(run)
    if folder is not None:
        out.print(f"wrote {folder.comparison}", soft_wrap=True, markup=False)
