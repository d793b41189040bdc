"""Write the metrics of a run: ``metrics.jsonl`` always, TensorBoard and Weights & Biases where configured.

``metrics.jsonl`` is the source of truth: it can be read at any moment, and a killed process loses at most the line it
was writing. The others mirror its numbers under flat names: ``step/loss``, ``iteration/reward``, ``seconds/generate``,
``user/NAME``. A step is logged at its own number, everything else at its iteration.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from slime_plugin.config.custom import load_object
from slime_plugin.config.tracking import Tracking, Wandb
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.files import append_whole, cut_incomplete_line, write_atomically
from slime_plugin.record import Record
from slime_plugin.run.folder import RunFolder

_LABELS = ("kind", "iteration", "step", "time")
"""Keys that identify a line."""
ITERATION_PHASES = ("generate", "convert", "put", "transfer", "reference", "old", "train", "export", "update", "save")
"""Keys of ``seconds`` in the line of an iteration, beside ``other`` and ``total``, in the order of the phases."""


class Writer(Protocol):
    """Mirrors the metrics."""

    def write(self, kind: str, at: int, scalars: Mapping[str, float], time: float | None) -> None:
        """Write the numbers of one line; ``at`` is its step or iteration."""

    def close(self) -> None: ...


class Metrics:
    """Appends lines to ``metrics.jsonl`` and mirrors their numbers. A float that is not finite becomes null.

    >>> with Metrics(RunFolder(Path("runs/fold")), Tracking(), settings) as metrics:  # doctest: +SKIP
    ...     metrics.write({"kind": "step", "iteration": 0, "step": 0, "loss": 0.25})
    """

    def __init__(self, folder: RunFolder, tracking: Tracking, settings: Mapping[str, Any]) -> None:
        """``settings`` describe the run to Weights & Biases."""
        load_user_metrics(tracking.metrics)  # so that an error is raised before the first iteration, not after it
        self._path = folder.metrics
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
            cut_incomplete_line(self._file.fileno(), self._path)
        except OSError as error:
            raise self._unwritable(error) from error
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_file)
            self._writers: list[Writer] = []
            if tracking.tensorboard:
                self._writers.append(_TensorBoard(folder))
                stack.callback(self._writers[-1].close)
            if tracking.wandb is not None:
                self._writers.append(_WeightsAndBiases(folder, tracking.wandb, settings))
                stack.callback(self._writers[-1].close)
            self._open = stack.pop_all()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line. When this returns, every reader sees it."""
        try:
            append_whole(self._file.fileno(), _to_json(line).encode())
        except OSError as error:
            raise self._unwritable(error) from error
        kind = line["kind"]
        scalars = dict(scalars_of(line))
        for writer in self._writers:
            writer.write(kind, line[kind], scalars, line.get("time"))

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_file(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def _unwritable(self, error: OSError) -> MemoryWalkerError:
        return MemoryWalkerError(
            f"{self._path}: cannot be written: {error.strerror}; free some space or choose another folder"
        )


def truncate_metrics(folder: RunFolder, iteration: int) -> None:
    """Keep the lines of iterations before this one; a run that resumes there writes the others again."""
    if not folder.metrics.exists():
        return
    kept = [line for line in folder.read_metrics() if line["iteration"] < iteration]
    try:
        write_atomically(folder.metrics, "".join(map(_to_json, kept)), sync=True)
    except OSError as error:
        raise MemoryWalkerError(f"{folder.metrics}: cannot be rewritten: {error.strerror}") from error


def scalars_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line by flat names, without its labels and what is null.

    >>> dict(scalars_of({"kind": "iteration", "iteration": 3, "reward": 0.5, "seconds": {"generate": 2.0}, "K": None}))
    {'iteration/reward': 0.5, 'seconds/generate': 2.0}
    """
    for key, value in line.items():
        if key not in _LABELS:
            nested = isinstance(value, Mapping)
            yield from flat_metrics(value, f"{key}/") if nested else flat_metrics({key: value}, f"{line['kind']}/")


def flat_metrics(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested metrics under flat names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_metrics(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def load_user_metrics(paths: Sequence[str]) -> dict[str, Callable[[Sequence[Record]], Any]]:
    """Import the functions that ``tracking.metrics`` names."""
    functions = {path: load_object(path, "tracking.metrics") for path in paths}
    for path, function in functions.items():
        if not callable(function):
            raise ConfigError(f"tracking.metrics: {path} is {function!r:.40}, not a function of the records")
    return functions


def user_metrics(paths: Sequence[str], records: Sequence[Record]) -> dict[str, float | None]:
    """Return the metrics that the user's functions compute from the records of an iteration."""
    found: dict[str, float | None] = {}
    for path, function in load_user_metrics(paths).items():
        values = function(records)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"tracking.metrics: {path} returned {values!r:.40}, not numbers by name; return a dict such as "
                '{"searches": 2.5}'
            )
        for name, value in values.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real | None):
                raise ConfigError(
                    f"tracking.metrics: {path} returned {value!r:.40} for {name!r:.40}; names must be strings, "
                    "and values numbers or None"
                )
            if name in found:
                raise ConfigError(f"tracking.metrics: {name!r} is returned by {path} and by one before it; rename one")
            found[name] = None if value is None else float(value)
    return found


class _TensorBoard:
    """Event files, in a folder each for steps and iterations. A resumed run hides what it writes again."""

    def __init__(self, folder: RunFolder) -> None:
        summary_writer = _import_package(
            "tensorboardX",
            "tracking.tensorboard: event files need tensorboardX: pip install 'memorywalker[train]', or set "
            "tracking.tensorboard=false",
        ).SummaryWriter
        starts = {"step": 0, "iteration": 0}
        for line in folder.read_metrics():
            starts[line["kind"]] = max(starts[line["kind"]], line[line["kind"]] + 1)
        try:
            self._writers = {
                kind: summary_writer(
                    str(folder.tensorboard / f"{kind}s"),
                    purge_step=start,
                    flush_secs=10,
                    filename_suffix=f".{start}.{os.getpid()}",  # names have seconds; a resume may come sooner
                )
                for kind, start in starts.items()
            }
        except OSError as error:
            raise MemoryWalkerError(f"{folder.tensorboard}: cannot be written: {error.strerror}") from error

    def write(self, kind: str, at: int, scalars: Mapping[str, float], time: float | None) -> None:
        for name, value in scalars.items():
            self._writers[kind].add_scalar(name.replace(" ", "_"), value, at, walltime=time)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class _WeightsAndBiases:
    """A run that keeps its id when training is resumed."""

    def __init__(self, folder: RunFolder, config: Wandb, settings: Mapping[str, Any]) -> None:
        wandb = _import_package(
            "wandb",
            "tracking.wandb: Weights & Biases needs its package: pip install wandb, or leave tracking.wandb out",
        )
        run_id = folder.path / "wandb" / "memorywalker-id"
        run_id.parent.mkdir(parents=True, exist_ok=True)  # without it wandb writes elsewhere
        if not run_id.exists():
            run_id.write_text(uuid.uuid4().hex[:12], encoding="ascii")
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or folder.path.resolve().name,
                mode=config.mode,
                dir=str(folder.path),
                config=dict(settings),
                id=run_id.read_text(encoding="ascii"),
                resume="allow" if config.mode == "online" else None,  # offline runs cannot be resumed
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracking.wandb: {str(error).rstrip('.')}; run wandb login, or set tracking.wandb.mode=offline"
            ) from error
        self._axes: set[str] = set()

    def write(self, kind: str, at: int, scalars: Mapping[str, float], time: float | None) -> None:
        axis = f"axis/{kind}"
        for name in {name.split("/")[0] for name in scalars} - self._axes:
            self._run.define_metric(f"{name}/*", step_metric=axis)
            self._axes.add(name)
        self._run.log({axis: at, **scalars})

    def close(self) -> None:
        self._run.finish()


def _import_package(name: str, remedy: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(remedy) from error


def _to_json(line: Mapping[str, Any]) -> str:
    return json.dumps(_finite(line), separators=(",", ":"), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
