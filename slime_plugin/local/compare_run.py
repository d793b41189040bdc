"""Compares methods on the rollouts of a run, or on other records: which of them, by which weights, and what is written.

:mod:`.compare` scores and times them. Needs no torch until all inputs have been read and checked.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.method import METHODS, CustomMethod
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.files import write_atomically
from slime_plugin.local.scorer import CompareSettings, ScoredIteration, StartProgress, check_records
from slime_plugin.methods import DENOMINATOR
from slime_plugin.record import Record, read_entries
from slime_plugin.record.store import SUFFIX
from slime_plugin.run.folder import RunFolder

if TYPE_CHECKING:
    from slime_plugin.local.compare import Comparison

OnMessage = Callable[[str], None]
"""Called with a line on what is left out and why."""


_DEFAULTS = CompareSettings()


def compare_run(
    folder: RunFolder,
    settings: CompareSettings = _DEFAULTS,
    progress: StartProgress = lambda total: lambda done: None,
    log: OnMessage = lambda line: None,
) -> dict[str, Any]:
    """Compare methods on the rollouts of a training run, each scored with the weights that sampled it.

    The method of the run is compared with its settings there, even if it is the user's own. Writes ``comparison.json``
    and ``comparison/`` into the run, and returns the former.
    """
    cell = parse_config(folder.read_settings(), Cell, str(folder.settings))
    by_type = {method.type: method for method in settings.methods}
    if isinstance(cell.method, CustomMethod) or by_type.get(cell.method.type) == METHODS[cell.method.type]:
        by_type[cell.method.type] = cell.method
    found = _Inputs()
    found.add_run(folder, settings.iterations, log)
    settings = replace(settings, methods=tuple(by_type.values()), objective=cell.objective)
    return _compare(found, settings, progress, folder)


def compare_records(
    path: Path,
    model: Path,
    settings: CompareSettings = _DEFAULTS,
    progress: StartProgress = lambda total: lambda done: None,
    log: OnMessage = lambda line: None,
) -> dict[str, Any]:
    """Compare methods on records outside a training run, all sampled by one model. Writes into a folder of stores."""
    found = _Inputs()
    found.add(0, model, path, None, log)
    return _compare(found, settings, progress, folder_of_stores(path))


def folder_of_stores(path: Path) -> RunFolder | None:
    """None for a folder of JSON files, where a comparison would be read as another record."""
    return RunFolder(path) if path.is_dir() and any(path.rglob(f"*{SUFFIX}")) else None


@dataclass
class _Inputs:
    """Records by iteration, and the weights that sampled them."""

    batches: list[ScoredIteration] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rollouts left out, by cause."""
    skipped: list[int] = field(default_factory=list)
    """Iterations whose weights were removed."""

    def add(self, iteration: int, weights: Path, records: Path, version: str | None, log: OnMessage) -> None:
        """Add the records of an iteration. ``version`` is that of the weights; if it is None, records have to agree."""
        usable: list[Record] = []
        expected = version
        left_out: Counter[str] = Counter()
        for entry in read_entries([records]):
            for line in entry.problems:
                log(f"Error: {line}")
            if entry.record is None:
                left_out["damaged"] += 1
            elif (cause := entry.record.meta.not_trained) is not None:
                left_out[cause] += 1
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
            self.batches.append(ScoredIteration(iteration, weights, tuple(usable)))

    def add_run(self, folder: RunFolder, limit: int | None, log: OnMessage) -> None:
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
    return [numbers[round(index)] for index in np.linspace(0, len(numbers) - 1, limit).tolist()]


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
    found: _Inputs, settings: CompareSettings, progress: StartProgress, folder: RunFolder | None
) -> dict[str, Any]:
    if not found.batches:
        raise MemoryWalkerError("there is no valid record")
    if DENOMINATOR not in [method.type for method in settings.methods]:
        raise ConfigError(f"{DENOMINATOR} is not among the methods; costs are measured against it")
    first = found.batches[0].model
    for batch in found.batches:
        check_records(batch.records, batch.model, settings.parallel)
        if Architecture.read(batch.model) != Architecture.read(first):
            raise ConfigError(f"{batch.model}: has another shape than {first}; are both weights of the same run?")
    from slime_plugin.local.compare import compare

    comparison = compare(found.batches, settings, progress)
    value = comparison.to_json() | {"left_out": dict(found.left_out), "skipped": found.skipped}
    if folder is not None:
        _write(folder, comparison, value)
    return value


def _write(folder: RunFolder, comparison: Comparison, value: dict[str, Any]) -> None:
    """Write numbers per token first, the file that names them last; remove those of other methods."""
    arrays = folder.comparison_arrays
    contents: dict[Path, bytes] = {}  # all of them first: files of two comparisons must not be mixed
    for number, method in enumerate(comparison.scorer.methods):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **comparison.arrays(number))
        contents[arrays / f"{method.type}.npz"] = buffer.getvalue()
    try:
        arrays.mkdir(exist_ok=True)
        for path, content in contents.items():
            write_atomically(path, content)
        write_atomically(folder.comparison, json.dumps(value, indent=1, allow_nan=False) + "\n")
        for path in set(arrays.glob("*.npz")) - set(contents):
            path.unlink()
    except OSError as error:
        raise MemoryWalkerError(f"{arrays}: cannot be written: {error.strerror or error}") from error
