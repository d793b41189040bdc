"""The rollouts of a job of slime's, written down in the folder of its run and read again.

The folder is the one that ``--save`` is in. It then has, for every iteration, the store that a run on one machine has
too (:mod:`slime_plugin.report.folder`), so that the same commands read it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_plugin.errors import ConfigError
from slime_plugin.record import Record, StoreWriter, scan_store
from slime_plugin.report.folder import RunFolder
from slime_plugin.seam.args import cell_of
from slime_plugin.seam.retention import latest_checkpoint
from slime_plugin.seam.rollout import NUMBER, Sample, put_record, record_of, reward_of
from slime_plugin.seam.statistics import statistics

PREFIX = "rollout/memorywalker/"
"""Of our statistics among slime's."""
_SAMPLED: set[str | None] = set()
"""Folders of checkpoints whose jobs have sampled an iteration in this process."""


def record_rollouts(iteration: int, args: Namespace, samples: Sequence[Sample], metrics: dict[str, Any] | None) -> None:
    """Write the records of an iteration down, and put what they come to among slime's metrics."""
    cell, records = cell_of(args), [record_of(sample) for sample in samples]
    folder = folder_of(args)
    _SAMPLED.add(getattr(args, "save", None))
    if folder is not None and cell.cluster.replay is None:
        _write(folder.rollouts(iteration), records)
    if metrics is not None:
        metrics.update(_flat(statistics(records, cell), PREFIX))


def record_evaluation(iteration: int, args: Namespace, data: Mapping[str, Mapping[str, Any]]) -> None:
    """``data`` has the samples of each set of questions, by its name. Stores are named after how many iterations the
    weights have been trained: slime evaluates once before the first, and otherwise behind one."""
    folder = folder_of(args)
    if folder is None:
        return
    trained = _iterations_before(iteration, args)
    for name, found in data.items():
        records = [record_of(sample) for sample in found["samples"]]
        _write(folder.path / f"evaluation-{name}-{trained:05d}.records", records)


def _iterations_before(evaluation: int, args: Namespace) -> int:
    """Of an evaluation that slime gives that number: a job that only evaluates always says 0."""
    if args.num_rollout == 0:
        latest = latest_checkpoint(Path(args.save))
        return 0 if latest is None else latest + 1
    return 0 if evaluation == 0 and args.save not in _SAMPLED else evaluation + 1


def recorded_samples(iteration: int, args: Namespace, data_source: Any) -> list[list[Sample]]:
    """The groups of an iteration that another run has recorded, in slime's samples."""
    replay = cell_of(args).cluster.replay
    if replay is None:
        raise ConfigError("cluster.replay: missing; name the folder of a run that has recorded rollouts")
    path = RunFolder(replay).rollouts(iteration)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such store; the run that is replayed has fewer iterations")
    found = [record for record in scan_store(path) if isinstance(record, Record)]
    wanted = args.rollout_batch_size * args.n_samples_per_prompt
    if len(found) != wanted:
        raise ConfigError(
            f"{path}: holds {len(found)} rollouts, but trainer.prompts x rollout.samples is {wanted}; replay a run "
            "with its own settings"
        )
    ordered = iter(sorted(found, key=lambda record: int(record.meta.extra.get(NUMBER, 0))))
    groups: list[list[Sample]] = data_source.get_samples(args.rollout_batch_size)
    there = sum(map(len, groups))
    if there != wanted:
        raise ConfigError(
            f"rollout.questions: slime makes {there} samples of them where {wanted} are replayed; name at least as "
            "many questions as trainer.prompts"
        )
    for group in groups:
        for sample in group:
            put_record(sample, next(ordered))
            sample.reward = reward_of(sample)
    return groups


def folder_of(args: Namespace) -> RunFolder | None:
    """The folder of the run; None for a job that saves nothing."""
    save = getattr(args, "save", None)
    return None if save is None else RunFolder(Path(save).parent)


def _write(path: Path, records: Iterable[Record]) -> None:
    """A whole store. One that an interrupted job left for the same iteration stays, under another name."""
    if path.exists():
        attempt = next(n for n in range(1, 10_000) if not _attempt(path, n).exists())
        path.rename(_attempt(path, attempt))
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with StoreWriter(draft) as store:
        for record in records:
            store.append(record)
    draft.rename(path)


def _attempt(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.attempt-{number}{path.suffix}")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Numbers only; what is undefined is left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif value is not None:
            yield f"{prefix}{key}", float(value)
