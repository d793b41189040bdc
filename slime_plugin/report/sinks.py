"""Where the numbers of a run go: ``metrics.jsonl`` always, TensorBoard and Weights & Biases where configured.

``metrics.jsonl`` is the truth: what it holds can be read at any moment, and a process that is killed loses at most the
line it was writing. The others are mirrors of its numbers under flat names: ``step/loss``, ``iteration/reward``,
``seconds/generate``. A step stands at its own number, everything else at its iteration.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from slime_plugin.config.tracking import Tracking, Wandb
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.report.folder import RunFolder


class Sink(Protocol):
    """A mirror of the metrics."""

    def write(self, kind: str, at: int, scalars: Mapping[str, float], time: float | None) -> None:
        """Numbers of one line; ``at`` is the number of its step or iteration."""

    def close(self) -> None: ...


class Metrics:
    """Appends lines to ``metrics.jsonl`` and mirrors their numbers. What is not a finite number is null there.

    >>> with Metrics(RunFolder(Path("runs/fold")), Tracking(), settings) as metrics:  # doctest: +SKIP
    ...     metrics.write({"kind": "step", "iteration": 0, "step": 0, "loss": 0.25})
    """

    def __init__(self, folder: RunFolder, tracking: Tracking, settings: Mapping[str, Any]) -> None:
        """``settings`` describe the run to Weights & Biases."""
        self._path = folder.metrics
        self._sinks: list[Sink] = []
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115  # closed by close()
            _cut_torn_line(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if tracking.tensorboard:
                self._sinks.append(_TensorBoard(folder))
            if tracking.wandb is not None:
                self._sinks.append(_WeightsAndBiases(folder, tracking.wandb, settings))
        except BaseException:
            self.close()
            raise

    def write(self, line: Mapping[str, Any]) -> None:
        """One line. When this returns, every reader sees it."""
        kind = line["kind"]
        text = json.dumps(_finite(line), separators=(",", ":"), allow_nan=False)
        start = os.fstat(self._file.fileno()).st_size
        data = text.encode() + b"\n"
        try:
            written = self._file.write(data)
            while written < len(data):  # the disk may be full: then the next call says so
                written += self._file.write(data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # half a line would swallow the beginning of the next
            raise self._unwritable(error) from error
        scalars = dict(scalars_of(line))
        for sink in self._sinks:
            sink.write(kind, line[kind], scalars, line.get("time"))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> MemoryWalkerError:
        return MemoryWalkerError(
            f"{self._path}: cannot be written: {error.strerror}; free some space or choose another folder"
        )


def truncate_metrics(folder: RunFolder, iteration: int) -> None:
    """Keep the lines of iterations before this one: a run that resumes there writes the others anew."""
    if not folder.metrics.exists():
        return
    kept = [line for line in folder.read_metrics() if line["iteration"] < iteration]
    draft = folder.metrics.with_name(f".{folder.metrics.name}.part")
    try:
        with open(draft, "wb") as file:
            file.writelines(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder.metrics)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise MemoryWalkerError(f"{folder.metrics}: cannot be rewritten: {error.strerror}") from error


def scalars_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line by flat names; what says which line it is, and what is null, is not among them.

    >>> dict(scalars_of({"kind": "iteration", "iteration": 3, "reward": 0.5, "seconds": {"generate": 2.0}, "K": None}))
    {'iteration/reward': 0.5, 'seconds/generate': 2.0}
    """
    kind = line["kind"]
    for key, value in line.items():
        if key not in ("kind", "iteration", "step", "time"):
            yield from _flat(key if isinstance(value, Mapping) else f"{kind}/{key}", value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}/{key}", part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


class _TensorBoard:
    """Event files. Steps and iterations count differently, so each has a folder, and a resumed run hides what it
    writes anew."""

    def __init__(self, folder: RunFolder) -> None:
        writer = _package(
            "tensorboardX",
            "tracking.tensorboard: event files need tensorboardX: pip install 'memorywalker[train]', or set "
            "tracking.tensorboard=false",
        ).SummaryWriter
        begun = {"step": 0, "iteration": 0}
        for line in folder.read_metrics():
            begun[line["kind"]] = max(begun[line["kind"]], line[line["kind"]] + 1)
        try:
            self._writers = {
                kind: writer(
                    str(folder.tensorboard / f"{kind}s"),
                    purge_step=first,
                    flush_secs=10,
                    filename_suffix=f".{first}.{os.getpid()}",  # a resume within the second has a file of its own
                )
                for kind, first in begun.items()
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
    """A run that goes on under its own id when training is resumed."""

    def __init__(self, folder: RunFolder, config: Wandb, settings: Mapping[str, Any]) -> None:
        wandb = _package(
            "wandb",
            "tracking.wandb: Weights & Biases needs its package: pip install wandb, or leave tracking.wandb out",
        )
        known = folder.path / "wandb" / "memorywalker-id"
        known.parent.mkdir(parents=True, exist_ok=True)  # before wandb looks: it goes elsewhere if there is none
        if not known.exists():
            known.write_text(uuid.uuid4().hex[:12], encoding="ascii")
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or folder.path.resolve().name,
                mode=config.mode,
                dir=str(folder.path),
                config=dict(settings),
                id=known.read_text(encoding="ascii"),
                resume="allow" if config.mode == "online" else None,  # offline there is nothing to go on from
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


def _package(name: str, remedy: str) -> Any:
    """Imported when it is used: a run that does not track needs none of it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(remedy) from error


def _cut_torn_line(descriptor: int) -> None:
    """What follows the last line end was being written when the last writer died."""
    size = os.fstat(descriptor).st_size
    whole, end = size, size
    while end > 0:
        start = max(0, end - 4096)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        whole = start + at + 1
        if at >= 0:
            break
        end = start
    if whole < size:
        os.ftruncate(descriptor, whole)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
