"""The actor that owns the engine: questions in, train data out, every rollout recorded as it ends.

A resumed iteration keeps the complete rollouts in its store that were sampled by its weights.
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

from slime_plugin.hooks import rollout as hooks
from slime_plugin.local.actors import IterationRollouts, redirect
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.sample import Sample, questions_of, recorded_samples, samples_of
from slime_plugin.record import Record, StoreWriter
from slime_plugin.rollout.questions import ATTEMPT, read_questions
from slime_plugin.rollout.runner import DONE
from slime_plugin.rollout.server import Flags, Server, ServerError, chosen_device
from slime_plugin.rollout.server.weight_update import update_weights
from slime_plugin.run.folder import RunFolder
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.batch import batch_of
from slime_plugin.slime.recording import attempts_in, recorded_rollouts, refuse_failed_tools
from slime_plugin.slime.samples import put_record, record_of

ENGINE_POLL_S = 0.5
"""Between two checks whether the engine still runs."""


class RolloutActor:
    """The rollouts of a run, sampled or recorded by another run. Ray runs its methods on one event loop."""

    def __init__(self, settings: dict[str, Any], folder: RunFolder, recorded: RunFolder | None, log: Path) -> None:
        redirect(log)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
        self._args, self._folder, self._recorded = Namespace(**settings), folder, recorded
        self._cell = cell_of(self._args)
        self._server: Server | None = None
        self._url: str | None = None
        self._done = self._total = 0

    async def pid(self) -> int:
        return os.getpid()

    async def start_engine(self, model: Path, version: int) -> None:
        """Serve these weights, by a server of this run or the one that the configuration names."""
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
        """Load these weights into the engine."""
        if self._url is not None:
            await update_weights(self._url, model, str(version))

    async def progress(self) -> tuple[int, int]:
        """Return the number of rollouts of the current iteration that have ended, and of all."""
        return self._done, self._total

    async def generate(self, iteration: int) -> IterationRollouts:
        """Sample or replay an iteration, convert it, and put a part of train data per replica into Ray's store."""
        import ray

        started = time.perf_counter()
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
            multiple=trainer.parallel.micro_batch_multiple,
        )
        metrics = batch_of(self._args, samples).metrics()
        converted = time.perf_counter()
        references = [ray.put(part) for part in parts]
        times = (sampled - started, converted - sampled, time.perf_counter() - converted)
        return IterationRollouts(references, metrics, dict(zip(("generate", "convert", "put"), times, strict=True)))

    async def _sample(self, iteration: int) -> list[Sample]:
        cell = self._cell
        path = cell.require_questions()
        questions = questions_of(read_questions(path), cell.trainer.prompts, iteration, cell.trainer.seed, path)
        samples = samples_of(questions, cell.rollout.samples, iteration)
        self._done, self._total = 0, len(samples)
        slots = asyncio.Semaphore(cell.rollout.concurrency)
        with StoreWriter(self._folder.rollouts(iteration)) as store:
            earlier = attempts_in(store.path)

            async def roll_out(sample: Sample) -> None:
                name = sample.metadata["rollout_name"]
                attempts = earlier.get(name, [])
                record = attempts[-1] if attempts else None
                if record is not None and _is_complete(record, str(iteration)):
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
                raise errors.exceptions[0] from None  # the first is the cause; the others were cancelled
        self._check_engine()  # rollouts that failed because of it are sampled again when the run is resumed
        refuse_failed_tools(self._folder, iteration, map(record_of, samples), cell)
        return samples

    async def _watch_engine(self) -> None:
        """Abort the iteration at once if the engine has exited, without minutes of retries."""
        while True:
            self._check_engine()
            await asyncio.sleep(ENGINE_POLL_S)

    def _check_engine(self) -> None:
        server = self._server
        if server is not None and not server.alive:
            raise ServerError(
                f"the engine (process {server.pid}) has exited; see {server.log}, and continue with --resume"
            )

    def _replay(self, iteration: int) -> list[Sample]:
        assert self._recorded is not None
        expected = self._cell.trainer.prompts * self._cell.rollout.samples
        samples = recorded_samples(recorded_rollouts(self._recorded, iteration, expected), iteration * expected)
        self._done = self._total = len(samples)
        return samples


def _is_complete(record: Record, version: str) -> bool:
    """Whether the rollout is done, and all of it was sampled by these weights."""
    meta = record.meta
    return meta.status in DONE and str(meta.weight_version) == version and not meta.report.straddles
