"""Run many rollouts concurrently and store each record as it ends, so that an interrupted run can be resumed.

A folder holds ``run.json``, with the configuration, and ``rollout-0.records``. A rollout is done once it has a
completed or truncated record; others are tried again, with the same seed, as another attempt (``q7-3``, ``q7-3~1``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record, StoreWriter, scan_store
from slime_plugin.rollout.engine.engine import Engine, EngineError
from slime_plugin.rollout.environment import RolloutEnvironment, RolloutHandle
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.questions import ATTEMPT, rollout_name
from slime_plugin.rollout.turn_loop import rollout_seed
from slime_plugin.run.settings import check_rollout_settings

STORE = "rollout-0.records"
DONE = ("completed", "truncated")

MIN_ENGINE_FAILURES = 8
"""Consecutive engine failures before the run is aborted; more if more rollouts run at once."""


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One rollout to sample."""

    question: Question
    sample: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """Name of the rollout: the same for all attempts."""
        return f"{self.question.id}-{self.sample}"

    @property
    def id(self) -> str:
        return f"{self.name}{ATTEMPT}{self.attempt}" if self.attempt else self.name


@dataclass
class RunTotals:
    """Totals of a run so far."""

    total: int
    statuses: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    edits: int = 0
    rewards: list[float] = field(default_factory=list)
    interrupted: bool = False

    @property
    def rollouts(self) -> int:
        return self.statuses.total()

    @property
    def left(self) -> int:
        """Rollouts not started."""
        return self.total - self.rollouts

    @property
    def reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def add(self, record: Record, turns: int) -> None:
        self.statuses[record.meta.status] += 1
        self.turns += turns
        self.tokens += int(record.generated.sum())
        self.edits += len(record.edits)
        if record.meta.reward is not None and not record.meta.excluded:
            self.rewards.append(record.meta.reward)


@contextmanager
def open_run(folder: Path, cell: Cell) -> Iterator[StoreWriter]:
    """Open the store of a run, creating the folder if necessary. One process at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
    with StoreWriter(folder / STORE) as store:
        check_rollout_settings(folder, cell, has_rollouts=any(True for _ in scan_store(store.path)))
        yield store


def tasks_left(store: Path, questions: Sequence[Question], samples: int) -> list[RolloutTask]:
    """Rollouts still to be sampled, question by question so that groups complete early; retries come last."""
    attempts: Counter[str] = Counter()
    done = set()
    asked = {question.id: question.digest for question in questions}
    for found in scan_store(store):
        if not isinstance(found, Record):
            continue
        name = rollout_name(found.meta.id)
        attempts[name] += 1
        if found.meta.status in DONE:
            done.add(name)
        question = found.meta.report.question
        if asked.get(str(found.meta.group), question) != question:
            raise ConfigError(
                f"{store}: {found.label} answers another question than the current {found.meta.group}; "
                "choose another folder, or use the questions it was started with"
            )
    tasks = (RolloutTask(question, sample) for question in questions for sample in range(samples))
    left = [RolloutTask(task.question, task.sample, attempts[task.name]) for task in tasks if task.name not in done]
    return sorted(left, key=lambda task: task.attempt > 0)


async def run_tasks(
    environment: RolloutEnvironment,
    engine: Engine,
    tasks: Iterable[RolloutTask],
    store: StoreWriter,
    watch: Callable[[Record, RolloutHandle], None],
    stop: asyncio.Event,
) -> None:
    """Sample the rollouts. Once ``stop`` is set no more are started, and running ones end as aborted.

    If as many consecutive rollouts as may run at once fail because of the engine, the others would too: ``stop`` is set
    and :class:`EngineError` raised at the end.
    """
    waiting = iter(tasks)
    active: set[RolloutHandle] = set()
    limits = environment.limits
    max_failures = max(limits.concurrency, MIN_ENGINE_FAILURES)
    failures: list[str] = []  # consecutive engine failures

    async def worker() -> None:
        for task in waiting:
            if stop.is_set():
                return
            rollout = environment.begin(engine, task.question, task.id, rollout_seed(limits.seed, task.name))
            active.add(rollout)
            try:
                record = await rollout.run()
            finally:
                active.discard(rollout)
            store.append(record)
            watch(record, rollout)
            report = record.meta.report
            if stop.is_set():
                return
            if (record.meta.status, report.stop) != ("failed", "engine"):
                failures.clear()
            else:
                failures.append(report.error or "unknown")
                if len(failures) >= max_failures:
                    stop.set()

    async def stopper() -> None:
        await stop.wait()
        for rollout in active:
            rollout.stop()

    ending = asyncio.create_task(stopper())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limits.concurrency):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first error cancelled the other workers
    finally:
        ending.cancel()
    if len(failures) >= max_failures:
        raise EngineError(f"{len(failures)} rollouts in a row failed; the last: {failures[-1]}")
