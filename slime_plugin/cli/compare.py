"""``memorywalker compare``, and the same for other commands: :func:`compare_run`."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from slime_plugin.cli.inputs import MODEL, RecordPath
from slime_plugin.cli.output import console, write_whole
from slime_plugin.cli.scoring import OnProgress, check_models, counted, parallelism, progress_bar
from slime_plugin.config.custom import CUSTOM, type_of
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.method import EVERY_METHOD, CustomMethod, Method, NaiveCompressed
from slime_plugin.config.objective import Objective
from slime_plugin.config.parallel import Parallelism
from slime_plugin.config.trainer import Dtype
from slime_plugin.errors import MemoryWalkerError, nearest
from slime_plugin.methods import method_of
from slime_plugin.methods.credit import EXCLUDED
from slime_plugin.record import Record, read_entries
from slime_plugin.record.store import SUFFIX
from slime_plugin.report.comparison_table import comparison_table, heading, verdict
from slime_plugin.run.folder import RunFolder

if TYPE_CHECKING:
    from slime_plugin.local.compare import Comparison

Log = Callable[[str], None]
"""Called with a line on what is left out and why."""


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """How runs are compared."""

    methods: tuple[Method, ...] = EVERY_METHOD
    """naive_compressed is one of them: costs are measured against it."""
    iterations: int | None = 6
    """Maximum for a training run, evenly spread, with the first and the last; None for all."""
    repeats: int = 5
    """Timed updates per method; 0 measures no costs."""
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: Dtype | None = None
    batch_tokens: int = 8192


DEFAULTS = CompareSettings()


def compare_run(
    folder: RunFolder,
    settings: CompareSettings = DEFAULTS,
    on_progress: OnProgress = lambda done, total: None,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Compare methods on the rollouts of a training run, each scored with the weights that sampled it.

    A method of the user's own that the run was trained with is compared too. Writes ``comparison.json`` and
    ``comparison/`` into the run, and returns the former.
    """
    cell = folder.read_settings()  # or it is not a training run
    if type_of(cell.get("method")) == CUSTOM:
        own = parse_config(cell["method"], CustomMethod, f"{folder.settings}: method")
        settings = replace(settings, methods=(*(one for one in settings.methods if one.type != own.type), own))
    found = _Inputs(objective=parse_config(cell.get("objective", {}), Objective, f"{folder.settings}: objective"))
    found.add_run(folder, settings.iterations, log)
    return _compare(found, settings, on_progress, folder)


def compare_records(
    path: Path,
    model: Path,
    settings: CompareSettings = DEFAULTS,
    on_progress: OnProgress = lambda done, total: None,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Compare methods on records outside a training run, all sampled by one model. Writes into a folder of stores."""
    found = _Inputs()
    found.add(0, model, path, None, log)
    return _compare(found, settings, on_progress, _folder_of_stores(path))


def _folder_of_stores(path: Path) -> RunFolder | None:
    """None for a folder of JSON files, where a comparison would be read as another record."""
    return RunFolder(path) if path.is_dir() and any(path.rglob(f"*{SUFFIX}")) else None


@dataclass
class _Inputs:
    """Records by iteration, and the weights that sampled them."""

    batches: list[tuple[int, Path, list[Record]]] = field(default_factory=list)
    objective: Objective = field(default_factory=Objective)
    """Objective of the run: with a KL, training has a pass of the reference model."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rollouts left out, by cause."""
    skipped: list[int] = field(default_factory=list)
    """Iterations whose weights were removed."""

    def add(self, iteration: int, weights: Path, records: Path, version: str | None, log: Log) -> None:
        """Add the records of an iteration. ``version`` is that of the weights; if it is None, records have to agree."""
        usable: list[Record] = []
        expected = version
        left_out: Counter[str] = Counter()
        for entry in read_entries([records]):
            for line in entry.problems:
                log(f"Error: {line}")
            if entry.record is None:
                left_out["damaged"] += 1
            elif entry.record.meta.status in EXCLUDED:
                left_out[entry.record.meta.status] += 1
            elif entry.record.meta.report.straddles:
                left_out["straddling"] += 1
            else:
                usable.append(entry.record)
                if version is not None or entry.record.meta.weight_version is not None:
                    expected = _checked_version(entry.record, expected, entry.where)
        if left_out:
            log(f"{records}: left out {', '.join(f'{number} {cause}' for cause, number in left_out.items())}")
        self.left_out += left_out
        if usable:
            self.batches.append((iteration, weights, usable))

    def add_run(self, folder: RunFolder, limit: int | None, log: Log) -> None:
        iterations, versions = folder.iterations(), set(folder.versions())
        self.skipped = [iteration for iteration in iterations if iteration not in versions]
        available = [iteration for iteration in iterations if iteration in versions]
        if self.skipped:
            missing = ", ".join(map(str, self.skipped))
            log(f"{folder.path}: without iterations {missing}: the weights that sampled them were removed")
        for iteration in _spread(available, limit):
            self.add(iteration, folder.weights(iteration), folder.rollouts(iteration), str(iteration), log)
        if not self.batches:
            raise MemoryWalkerError(
                f"{folder.path}: {len(iterations)} iterations with rollouts, {len(available)} with the weights that "
                "sampled them, and none with a usable rollout; compare a run before its weights are removed"
            )


def _spread(numbers: Sequence[int], limit: int | None) -> list[int]:
    """At most ``limit`` numbers, evenly spread, with the first and the last.

    >>> _spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if limit is None or len(numbers) <= limit:
        return list(numbers)
    return [numbers[round(place)] for place in np.linspace(0, len(numbers) - 1, limit).tolist()]


def _checked_version(record: Record, version: str | None, where: str) -> str | None:
    """Refuse records of other weights: their logdiff would not be the method's."""
    own = None if record.meta.weight_version is None else str(record.meta.weight_version)
    if own == version or not record.generated.any():
        return version
    if version is None:
        return own
    raise MemoryWalkerError(
        f"{where}: {record.label} was sampled by weights of version {own!r}, not by version {version!r}, which the "
        "others are scored with; move it to a file of its own and pass --model"
    )


def _compare(
    found: _Inputs, settings: CompareSettings, on_progress: OnProgress, folder: RunFolder | None
) -> dict[str, Any]:
    if not found.batches:
        raise MemoryWalkerError("there is no sound record")
    check_models([weights for _, weights, _ in found.batches], settings.parallel)
    from slime_plugin.local.compare import Batch, compare, units_of_work
    from slime_plugin.local.score import Scorer

    chosen = (settings.methods, settings.parallel, settings.dtype, settings.batch_tokens, found.objective)
    batches = [
        Batch(iteration, tuple(records), Scorer(weights, *chosen)) for iteration, weights, records in found.batches
    ]
    total = units_of_work(batches, settings.repeats)
    comparison = compare(batches, settings.repeats, counted(on_progress, total))
    value = comparison.to_json() | {"left_out": dict(found.left_out), "skipped": found.skipped}
    if folder is not None:
        _write(folder, comparison, value)
    return value


def _write(folder: RunFolder, comparison: Comparison, value: dict[str, Any]) -> None:
    """Write numbers per token first, the file that names them last; remove those of other methods."""
    arrays = folder.comparison_arrays
    contents: dict[Path, bytes] = {}  # all of them first: files of two comparisons must not be mixed
    for number, method in enumerate(comparison.methods):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **comparison.arrays(number))
        contents[arrays / f"{method.type}.npz"] = buffer.getvalue()
    try:
        arrays.mkdir(exist_ok=True)
        for path, content in contents.items():
            write_whole(path, content)
        write_whole(folder.comparison, json.dumps(value, indent=1, allow_nan=False) + "\n")
        for path in set(arrays.glob("*.npz")) - set(contents):
            path.unlink()
    except OSError as error:
        raise MemoryWalkerError(f"{arrays}: cannot be written: {error.strerror}") from error


def parse_methods(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Method, ...]:
    """The methods of an option ``--methods A,B``, in the order in which they are compared; all if it is not given."""
    if value is None:
        return EVERY_METHOD
    names = [name.strip() for name in value.split(",")]
    known = [method.type for method in EVERY_METHOD]
    wrong = next((name for name in names if name not in known and ":" not in name), None)
    if wrong is not None:
        raise click.BadParameter(f"there is no method {wrong!r:.40}; use {nearest(wrong, known)}")
    own = [parse_config({"type": name}, CustomMethod, "--methods") for name in dict.fromkeys(names) if ":" in name]
    for method in own:
        method_of(method)  # or its code cannot be imported
    return (*(method for method in EVERY_METHOD if method.type in names), *own)


def _with_denominator(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Method, ...]:
    methods = parse_methods(context, parameter, value)
    return methods if NaiveCompressed() in methods else (NaiveCompressed(), *methods)


def _parse_limit(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value != "all" and not (value.isdecimal() and int(value)):
        raise click.BadParameter(f"{value!r:.40} is neither a positive whole number nor all")
    return None if value == "all" else int(value)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RecordPath(), metavar="RUN...")
@click.option(
    "--methods",
    metavar="A,B",
    callback=_with_denominator,
    help="Compare these and naive_compressed.  [default: all methods]",
)
@click.option(
    "--iterations",
    default="6",
    show_default=True,
    metavar="N|all",
    callback=_parse_limit,
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
    """Compare methods on the same recorded rollouts.

    RUN is the folder of a training run. Each of its iterations is scored with the weights that sampled it, so an exact
    method is at the rounding error of the two engines and anything above it is a method's own error. Then whole updates
    of one iteration are timed, methods in turn. The numbers are written into RUN as comparison.json, and those of every
    token as comparison/METHOD.npz.

    RUN may also be a file or folder of records that the weights in --model have sampled. Only a folder of stores
    (*.records) is written into.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    settings = CompareSettings(parallel=parallelism(options), **options)
    for run in runs:
        trained = _is_training_run(run)
        if trained and model is not None:
            raise click.UsageError(f"{run} is a training run and has its own weights: leave --model out")
        if not trained and model is None:
            raise click.UsageError(f"{run} is not a training run: pass --model, the weights that sampled its records")
    damaged = False
    for run in runs:
        with progress_bar(f"comparing {run.name or run}") as on_progress:
            if model is None:
                value = compare_run(RunFolder(run), settings, on_progress, log_line)
            else:
                value = compare_records(run, model, settings, on_progress, log_line)
        damaged |= "damaged" in value["left_out"]
        if as_json:
            click.echo(json.dumps(value, separators=(",", ":"), allow_nan=False))
        else:
            _print(value, run)
    sys.exit(1 if damaged else 0)


(_MODEL,) = (option for option in compare.params if option.name == "model")
_MODEL.required = False  # a training run has its own


def _is_training_run(path: Path) -> bool:
    """Whether a folder holds a training run: the ``run.json`` of ``memorywalker rollout`` has no cell."""
    folder = RunFolder(path)
    try:
        return "cell" in json.loads(folder.settings.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise MemoryWalkerError(f"{folder.settings}: cannot be read ({type(error).__name__})") from error


def log_line(line: str) -> None:
    click.echo(line, err=True)


def _print(value: dict[str, Any], run: Path) -> None:
    out = console()
    out.print(heading(value, str(run)), soft_wrap=True, markup=False)
    out.print(comparison_table(value))
    out.print(verdict(value), soft_wrap=True, markup=False)
    folder = _folder_of_stores(run)
    if folder is not None:
        out.print(f"wrote {folder.comparison}", soft_wrap=True, markup=False)
