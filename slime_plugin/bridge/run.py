"""Many rollouts at once, each written down as it ends, so that a run that was stopped goes on where it stopped.

A folder holds one run: ``run.json`` with the configuration it was started with, and ``rollout-0.records``. A rollout is
done once it has a completed or truncated record; whatever else ended it, the next start tries again, as another attempt
(``q7-3`` and then ``q7-3~1``), with the same seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_plugin.bridge.engine.base import Engine, EngineError
from slime_plugin.bridge.harness import Running, Surroundings
from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.questions import ATTEMPT
from slime_plugin.bridge.session import session_seed
from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record, StoreWriter, scan_store

STORE = "rollout-0.records"
DONE = ("completed", "truncated")

_MAY_CHANGE = {"rollout.samples", "rollout.concurrency", "rollout.seconds", "rollout.tool_seconds"}
"""Settings that do not change what a rollout is."""

FEWEST_FAILURES = 8
"""Rollouts in a row that have to fail for the engine's sake, at least, before it is taken to be gone."""


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
    interrupted: bool = False

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


@contextmanager
def open_run(folder: Path, cell: Cell) -> Iterator[StoreWriter]:
    """The store of a run in that folder, which is made if it is not there. One process at a time may have it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
    with StoreWriter(folder / STORE) as store:
        _check_settings(folder, cell, begun=any(True for _ in scan_store(store.path)))
        yield store


def _check_settings(folder: Path, cell: Cell, *, begun: bool) -> None:
    """Rollouts of one folder have one configuration."""
    path, settings = folder / "run.json", _settings(cell)
    if not begun:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps({"version": 1, "settings": settings}, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
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
    """What makes a rollout what it is, as flat keys. Of tools and reward a digest: the user's own may hold a key."""
    value = cell.model_dump(mode="json", include={"model", "harness", "rollout"})
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat.update(
            {f"{key}.{name}": setting for name, setting in part.items()} if isinstance(part, dict) else {key: part}
        )
    for key in ("tools", "reward"):
        text = json.dumps(cell.model_dump(mode="json", include={key}), sort_keys=True)
        flat[key] = f"digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return flat


def jobs_left(store: Path, questions: Sequence[Question], samples: int) -> list[Job]:
    """What is still to be sampled, question by question so that groups are complete early, then what is tried again."""
    attempts: Counter[str] = Counter()
    done = set()
    asked = {question.id: question.digest for question in questions}
    for found in scan_store(store):
        if not isinstance(found, Record):
            continue
        name = str(found.meta.id).partition(ATTEMPT)[0]
        attempts[name] += 1
        if found.meta.status in DONE:
            done.add(name)
        if asked.get(str(found.meta.group), found.meta.extra["question"]) != found.meta.extra["question"]:
            raise ConfigError(
                f"{store}: {found.label} answers another question than the one that is {found.meta.group} now; "
                "choose another folder, or the questions it was started with"
            )
    jobs = (Job(question, sample) for question in questions for sample in range(samples))
    left = [Job(job.question, job.sample, attempts[job.name]) for job in jobs if job.name not in done]
    return sorted(left, key=lambda job: job.attempt > 0)


async def run_jobs(
    harness: Surroundings,
    engine: Engine,
    jobs: Iterable[Job],
    store: StoreWriter,
    watch: Callable[[Record, Running], None],
    stop: asyncio.Event,
) -> None:
    """Sample the jobs. Once ``stop`` is set no more are begun, and those under way end as aborted.

    An engine that is gone for good ends the run: when as many rollouts in a row as may be under way at once have failed
    for its sake, the others would too. Then ``stop`` is set, and :class:`EngineError` raised at the end.
    """
    waiting = iter(jobs)
    active: set[Running] = set()
    limits = harness.limits
    enough = max(limits.concurrency, FEWEST_FAILURES)
    failures: list[str] = []  # in a row, for the engine's sake

    async def worker() -> None:
        for job in _until(waiting, stop):
            session = harness.begin(engine, job.question, job.id, session_seed(limits.seed, job.name))
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
            if len(failures) >= enough:
                stop.set()

    async def stopper() -> None:
        await stop.wait()
        for session in active:
            session.stop()

    ending = asyncio.create_task(stopper())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limits.concurrency):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first is what went wrong; the others were cancelled for it
    finally:
        ending.cancel()
    if len(failures) >= enough:
        raise EngineError(f"{len(failures)} rollouts in a row failed; the last: {failures[-1]}")


def _until(jobs: Iterator[Job], stop: asyncio.Event) -> Iterator[Job]:
    for job in jobs:
        if stop.is_set():
            return
        yield job
