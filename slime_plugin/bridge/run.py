"""Many rollouts at once, each written down as it ends, so that a run that was stopped goes on where it stopped.

A folder holds one run: ``run.json`` with the configuration it was started with, and ``rollout-0.records``. A rollout is
done once it has a completed or truncated record; whatever else ended it, the next start tries again, as another attempt
(``q7-3`` and then ``q7-3~1``), with the same seed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_plugin.bridge.engine.base import Engine, EngineError
from slime_plugin.bridge.harness import Harness
from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.questions import ATTEMPT
from slime_plugin.bridge.session import Session, session_seed
from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record, StoreWriter, scan_store

STORE = "rollout-0.records"
DONE = ("completed", "truncated")

_MAY_CHANGE = {"rollout.samples", "rollout.concurrency", "rollout.seconds", "rollout.tool_seconds"}
"""Settings that do not change what a rollout is."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to sample."""

    question: Question
    sample: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """The same for all attempts."""
        return f"{self.question.id}-{self.sample}"

    @property
    def id(self) -> str:
        return f"{self.name}{ATTEMPT}{self.attempt}" if self.attempt else self.name


@dataclass
class Tally:
    """What a run has come to so far."""

    total: int
    statuses: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    tokens: int = 0
    """Sampled ones."""
    edits: int = 0
    rewards: list[float] = field(default_factory=list)

    @property
    def sessions(self) -> int:
        return self.statuses.total()

    @property
    def left(self) -> int:
        """Not begun."""
        return self.total - self.sessions

    @property
    def reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def add(self, record: Record, turns: int) -> None:
        self.statuses[record.meta.status] += 1
        self.turns += turns
        self.tokens += int(record.generated.sum())
        self.edits += len(record.edits)
        if record.meta.reward is not None:
            self.rewards.append(record.meta.reward)


def open_run(folder: Path, cell: Cell) -> None:
    """Make the folder of a run, or check that it is one of this configuration."""
    path = folder / "run.json"
    settings = _settings(cell)
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".part")
            draft.write_text(json.dumps({"version": 1, "settings": settings}, indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}); choose another folder") from error
    for key in sorted({*before, *settings}):
        if before.get(key) != settings.get(key) and key not in _MAY_CHANGE:
            raise ConfigError(
                f"{folder}: holds rollouts with {key} = {before.get(key)!r:.60}, not {settings.get(key)!r:.60}; "
                "choose another folder, or the configuration it was started with"
            )


def _settings(cell: Cell) -> dict[str, Any]:
    """What makes a rollout what it is, as flat keys."""
    value = cell.model_dump(mode="json", include={"model", "harness", "rollout", "tools", "reward"})
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat.update(
            {f"{key}.{name}": setting for name, setting in part.items()} if isinstance(part, dict) else {key: part}
        )
    return flat


def jobs_left(folder: Path, questions: Sequence[Question], samples: int) -> list[Job]:
    """What is still to be sampled, question by question, so that groups are complete early."""
    attempts: Counter[str] = Counter()
    done = set()
    path = folder / STORE
    for found in scan_store(path) if path.exists() else ():
        if isinstance(found, Record):
            name = str(found.meta.id).partition(ATTEMPT)[0]
            attempts[name] += 1
            if found.meta.status in DONE:
                done.add(name)
    jobs = (Job(question, sample) for question in questions for sample in range(samples))
    return [Job(job.question, job.sample, attempts[job.name]) for job in jobs if job.name not in done]


async def run_jobs(
    harness: Harness,
    engine: Engine,
    jobs: Iterable[Job],
    folder: Path,
    watch: Callable[[Record, Session], None],
    stop: asyncio.Event,
) -> None:
    """Sample the jobs. Once ``stop`` is set no more are begun, and those under way end as aborted.

    An engine that is gone for good ends the run: when as many rollouts in a row as may be under way at once have failed
    for its sake, the others would too. Then ``stop`` is set, and :class:`EngineError` raised at the end.
    """
    waiting = iter(jobs)
    active: set[Session] = set()
    limits = harness.limits
    failures: list[str] = []  # in a row, for the engine's sake

    async def worker(store: StoreWriter) -> None:
        for job in _until(waiting, stop):
            session = Session(harness, engine, job.question, job.id, session_seed(limits.seed, job.name))
            active.add(session)
            try:
                record = await session.run()
            finally:
                active.discard(session)
            store.append(record)
            watch(record, session)
            if stop.is_set():
                continue
            if (record.meta.status, record.meta.extra["stop"]) != ("failed", "engine"):
                failures.clear()
                continue
            failures.append(record.meta.extra["error"])
            if len(failures) >= limits.concurrency:
                stop.set()

    async def stopper() -> None:
        await stop.wait()
        for session in active:
            session.stop()

    with StoreWriter(folder / STORE) as store:
        ending = asyncio.create_task(stopper())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(limits.concurrency):
                    group.create_task(worker(store))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first is what went wrong; the others were cancelled for it
        finally:
            ending.cancel()
    if len(failures) >= limits.concurrency:
        raise EngineError(f"{len(failures)} rollouts in a row failed; the last: {failures[-1]}")


def _until(jobs: Iterator[Job], stop: asyncio.Event) -> Iterator[Job]:
    for job in jobs:
        if stop.is_set():
            return
        yield job
