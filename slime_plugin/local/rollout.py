"""The actor that owns the engine: questions in, train data out, every rollout written down as it ends.

An iteration that was interrupted keeps what it has: rollouts that are in its store, sampled to their end by the weights
of the iteration, are not sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_plugin.bridge.questions import ATTEMPT, read_questions
from slime_plugin.bridge.run import DONE
from slime_plugin.bridge.server import Flags, Server, ServerError, chosen_device
from slime_plugin.bridge.server.control import update_weights
from slime_plugin.errors import ConfigError
from slime_plugin.hooks import rollout as hooks
from slime_plugin.local.data import questions_of, samples_of
from slime_plugin.local.sample import Sample
from slime_plugin.local.schedule import split_batch
from slime_plugin.record import Record, StoreWriter, scan_store
from slime_plugin.report.folder import RunFolder
from slime_plugin.seam.args import cell_of
from slime_plugin.seam.rollout import NUMBER, put_record, record_of
from slime_plugin.seam.statistics import statistics

WATCH = 0.5
"""Seconds between two looks at whether the engine still runs."""


class Rollouts:
    """The rollouts of a run, on an engine of its own or recorded by another run."""

    def __init__(self, args: Namespace, folder: RunFolder, recorded: RunFolder | None) -> None:
        self._args, self._folder, self._recorded = args, folder, recorded
        self._cell = cell_of(args)
        self._server: Server | None = None
        self._url: str | None = None
        self._done = self._total = 0

    async def start_engine(self, model: Path, version: int) -> None:
        """Have these weights served: by a server of our own, or by the one that the configuration names."""
        self._url = self._cell.engine.url
        if self._url is None:
            flags = Flags(model, chosen_device("auto"), extra=("--weight-version", str(version)))
            self._server = Server(flags, log=self._folder.logs / "engine.log")
            self._server.start()
            await asyncio.to_thread(self._server.wait)
            self._url = self._server.url
        else:
            await self.update(model, version)
        address = urlsplit(self._url)
        self._args.sglang_router_ip, self._args.sglang_router_port = address.hostname, address.port or 80

    async def update(self, model: Path, version: int) -> None:
        """Let the engine sample with these weights from now on."""
        if self._url is not None:
            await update_weights(self._url, model, str(version))

    def progress(self) -> tuple[int, int]:
        """Rollouts of the current iteration that have ended, and all of them."""
        return self._done, self._total

    async def generate(self, iteration: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The parts of an iteration's train data, one per replica, and what there is to tell about its rollouts."""
        begun = time.perf_counter()
        samples = self._replay(iteration) if self._recorded is not None else await self._sample(iteration)
        sampled = time.perf_counter()
        for sample in samples:
            sample.reward = await hooks.reward(self._args, sample) if sample.reward is None else sample.reward
        trainer = self._cell.trainer
        data = hooks.convert_samples(self._args, samples)
        parts = split_batch(
            data,
            replicas=trainer.dp,
            steps=trainer.steps,
            batch_tokens=trainer.batch_tokens * trainer.cp,
            multiple=trainer.parallel.turns,
        )
        told = statistics([record_of(sample) for sample in samples], self._cell)
        seconds = {"generate": sampled - begun, "convert": time.perf_counter() - sampled}
        return parts, {**told, "seconds": seconds}

    async def _sample(self, iteration: int) -> list[Sample]:
        cell = self._cell
        assert cell.rollout.questions is not None
        questions = questions_of(
            read_questions(cell.rollout.questions),
            cell.trainer.prompts,
            iteration,
            cell.trainer.seed,
            cell.rollout.questions,
        )
        samples = samples_of(questions, cell.rollout.samples, iteration)
        self._done, self._total = 0, len(samples)
        slots = asyncio.Semaphore(cell.rollout.concurrency)
        with StoreWriter(self._folder.rollouts(iteration)) as store:
            begun = _begun(store.path)

            async def roll_out(sample: Sample) -> None:
                name = sample.metadata["rollout_name"]
                attempts = begun.get(name, [])
                record = attempts[-1] if attempts else None
                if record is not None and _is_whole(record, str(iteration)):
                    put_record(sample, record)
                else:
                    if attempts:
                        sample.metadata["rollout_name"] = f"{name}{ATTEMPT}{len(attempts)}"
                    async with slots:
                        await hooks.generate(self._args, sample, {})
                    store.append(record_of(sample))
                self._done += 1

            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(self._watch_engine())
                    await asyncio.wait([group.create_task(roll_out(sample)) for sample in samples])
                    watch.cancel()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first is what went wrong; the others were cancelled for it
        self._check_engine()  # what failed for its sake is sampled again when the run goes on
        return samples

    async def _watch_engine(self) -> None:
        """An engine that is gone ends the iteration at once; asking it again for minutes would not bring it back."""
        while True:
            self._check_engine()
            await asyncio.sleep(WATCH)

    def _check_engine(self) -> None:
        server = self._server
        if server is not None and not server.alive:
            raise ServerError(f"the engine (process {server.pid}) is gone; see {server.log}, and go on with --resume")

    def _replay(self, iteration: int) -> list[Sample]:
        assert self._recorded is not None
        path = self._recorded.rollouts(iteration)
        if not path.exists():
            raise ConfigError(f"{path}: there is no such store; the run that is replayed has fewer iterations")
        last = {name: attempts[-1] for name, attempts in _begun(path).items()}
        wanted = self._cell.trainer.prompts * self._cell.rollout.samples
        if len(last) != wanted:
            raise ConfigError(
                f"{path}: holds {len(last)} rollouts, but trainer.prompts x rollout.samples is {wanted}; replay a run "
                "with its own settings"
            )
        samples = []
        ordered = sorted(last.values(), key=lambda record: int(record.meta.extra.get(NUMBER, 0)))
        for number, record in enumerate(ordered):
            sample = Sample(index=iteration * wanted + number)
            put_record(sample, record)
            samples.append(sample)
        self._done = self._total = len(samples)
        return samples


def _begun(path: Path) -> dict[str, list[Record]]:
    """The attempts at each rollout in a store, in order."""
    attempts: dict[str, list[Record]] = {}
    for found in scan_store(path):
        if isinstance(found, Record):
            attempts.setdefault(str(found.meta.id).partition(ATTEMPT)[0], []).append(found)
    return attempts


def _is_whole(record: Record, version: str) -> bool:
    """It came to its end, and all of it was sampled by those weights."""
    straddles = any("straddles" in turn for turn in record.meta.extra.get("turns", ()))
    return record.meta.status in DONE and str(record.meta.weight_version) == version and not straddles


class RolloutActor:
    """The rollouts as a Ray actor, whose methods run side by side on one event loop."""

    def __init__(self, settings: dict[str, Any], folder: str, recorded: str | None, log: str) -> None:
        from slime_plugin.local.rank import redirect  # the actor's own; Rollouts needs no torch

        redirect(Path(log))
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        other = None if recorded is None else RunFolder(Path(recorded))
        self._rollouts = Rollouts(Namespace(**settings), RunFolder(Path(folder)), other)

    async def pid(self) -> int:
        return os.getpid()

    async def start_engine(self, model: str, version: int) -> None:
        await self._rollouts.start_engine(Path(model), version)

    async def progress(self) -> tuple[int, int]:
        return self._rollouts.progress()

    async def generate(self, iteration: int) -> tuple[list[Any], dict[str, Any]]:
        """References to the parts, in boxes."""
        import ray  # only the actor needs it

        parts, told = await self._rollouts.generate(iteration)
        begun = time.perf_counter()
        boxes = [[ray.put(part)] for part in parts]
        told["seconds"]["put"] = time.perf_counter() - begun
        return boxes, told

    async def update(self, model: str, version: int) -> None:
        await self._rollouts.update(Path(model), version)
