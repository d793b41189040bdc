"""The records of a slime job in its run folder: written by iteration, and replayed by another job or run.

The run folder is the parent of ``--save``. It gets one store per iteration, as a local run has
(:mod:`slime_plugin.run.folder`), so that the same commands read both.
"""

from __future__ import annotations

import itertools
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.files import replacing
from slime_plugin.record import Record, StoreWriter, scan_store
from slime_plugin.rollout.questions import rollout_name
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.metrics import flat_metrics
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.batch import batch_of, current_record
from slime_plugin.slime.retention import latest_checkpoint
from slime_plugin.slime.samples import Sample, put_record, record_of, reward_of
from slime_plugin.slime.tool_failures import ToolCalls

_log = logging.getLogger(__name__)
PREFIX = "rollout/memorywalker/"
"""Prefix of the plugin's metrics among slime's."""
_sampled: set[str | None] = set()
"""Checkpoint folders of jobs that have sampled an iteration in this process."""


def record_rollouts(iteration: int, args: Namespace, samples: Sequence[Sample], metrics: dict[str, Any] | None) -> None:
    """Write the records of an iteration, and add the metrics of the batch to slime's."""
    folder, cell = folder_of(args), cell_of(args)
    _sampled.add(getattr(args, "save", None))
    if cell.cluster.replay is None:
        records = [current_record(sample) for sample in samples]  # as they are trained, so that a replay is the same
        if folder is not None:
            _write(folder.rollouts(iteration), records)
        refuse_failed_tools(folder, iteration, records, cell)
    if metrics is not None:
        metrics.update(flat_metrics(batch_of(args, samples).metrics(), PREFIX))


def refuse_failed_tools(folder: RunFolder | None, iteration: int, records: Iterable[Record], cell: Cell) -> None:
    """Raise :class:`MemoryWalkerError` instead of training rollouts whose tools failed. They are kept under another
    name, so that the iteration is sampled again when the job is resumed."""
    problem = ToolCalls.of(records).problem(cell.rollout.max_tool_failures)
    if problem is None:
        return
    where = "" if folder is None else f"; its rollouts are in {_set_aside(folder.rollouts(iteration))}"
    raise MemoryWalkerError(f"iteration {iteration}: {problem}{where}")


def record_evaluation(
    iteration: int, args: Namespace, data: Mapping[str, Mapping[str, Any]], metrics: dict[str, Any] | None
) -> None:
    """Write the records of an evaluation, and add its tool calls to slime's metrics.

    ``data`` has the samples of each question set by name. Stores are named by the trained iterations of the weights:
    slime evaluates before the first iteration and then after iterations.
    """
    folder, limit = folder_of(args), cell_of(args).rollout.max_tool_failures
    for name, found in data.items():
        records = [record_of(sample) for sample in found["samples"]]
        if folder is not None:
            trained = _iterations_before(iteration, args)
            _write(folder.path / f"evaluation-{name}-{trained:05d}.records", records)
        calls = ToolCalls.of(records)
        if metrics is not None:
            metrics.update(flat_metrics(calls.to_json(), f"eval/{name}/memorywalker/"))
        problem = calls.problem(limit)
        if problem is not None:
            _log.warning("evaluation %s says little about the policy: %s", name, problem)


def _iterations_before(evaluation: int, args: Namespace) -> int:
    """Return the trained iterations at slime's number of an evaluation; a job that only evaluates always has 0."""
    if args.num_rollout == 0:
        latest = latest_checkpoint(Path(args.save))
        return 0 if latest is None else latest + 1
    return 0 if evaluation == 0 and args.save not in _sampled else evaluation + 1


def replayed_groups(iteration: int, args: Namespace, data_source: Any) -> list[list[Sample]]:
    """Return slime's groups of samples with the rollouts that another run recorded for an iteration."""
    replay = cell_of(args).cluster.replay
    if replay is None:
        raise ConfigError("cluster.replay: missing; name the folder of a run that has recorded rollouts")
    expected = args.rollout_batch_size * args.n_samples_per_prompt
    records = recorded_rollouts(RunFolder(replay), iteration, expected)
    groups: list[list[Sample]] = data_source.get_samples(args.rollout_batch_size)
    samples = [sample for group in groups for sample in group]
    if len(samples) != expected:
        raise ConfigError(
            f"rollout.questions: slime provides {len(samples)} samples, but {expected} are replayed; name at "
            "least as many questions as trainer.prompts"
        )
    for sample, record in zip(samples, records, strict=True):
        put_record(sample, record)
        sample.reward = reward_of(sample)
    return groups


def recorded_rollouts(run: RunFolder, iteration: int, expected: int) -> list[Record]:
    """Return the last attempt at every rollout of an iteration, in the order of a batch."""
    path = run.rollouts(iteration)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such store; the run that is replayed has fewer iterations")
    records = [attempts[-1] for attempts in attempts_in(path).values()]
    if len(records) != expected:
        raise ConfigError(
            f"{path}: holds {len(records)} rollouts, but trainer.prompts x rollout.samples is {expected}; replay a run "
            "with its own settings"
        )
    return sorted(records, key=lambda record: record.meta.report.sample or 0)


def attempts_in(store: Path) -> dict[str, list[Record]]:
    """Return the attempts at each rollout in a store, in order, by the name of the rollout."""
    attempts: dict[str, list[Record]] = {}
    for found in scan_store(store):
        if isinstance(found, Record):
            attempts.setdefault(rollout_name(found.meta.id), []).append(found)
    return attempts


def folder_of(args: Namespace) -> RunFolder | None:
    """Return the run folder; None for a job that saves nothing."""
    save = getattr(args, "save", None)
    return None if save is None else RunFolder(Path(save).parent)


def _write(path: Path, records: Iterable[Record]) -> None:
    """Write a store. One that an interrupted job left for the same iteration is kept under another name."""
    if path.exists():
        _set_aside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft, StoreWriter(draft) as store:
        for record in records:
            store.append(record)


def _set_aside(path: Path) -> Path:
    """Rename a store of an iteration that is sampled again. Returns its new path."""
    attempts = (path.with_name(f"{path.stem}.attempt-{number}{path.suffix}") for number in itertools.count(1))
    return path.rename(next(attempt for attempt in attempts if not attempt.exists()))
