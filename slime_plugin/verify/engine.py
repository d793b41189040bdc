"""A real engine against the trainer: rollouts of the cell's harness, scored with the weights that sampled them.

Then the engine gets other weights, the way a run updates it, and samples again. If it kept the old ones, or mixed both,
its log-probabilities would not be those of the new weights; that the old ones would be noticed is measured as well.
The engine ends before the ranks start, so that both fit on the same GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from slime_plugin.config.cell import Cell
from slime_plugin.config.harness import SearchR1
from slime_plugin.config.method import LogitTree
from slime_plugin.environments import open_environment
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.local.timing import device_name
from slime_plugin.planner.calibration import planned_decoding_step, step_seconds
from slime_plugin.planner.job import ASSUMPTIONS, gpu_named
from slime_plugin.record import Record, StoreWriter
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.environment import RolloutEnvironment
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.runner import DONE, RolloutTask, run_tasks
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.rollout.server.sglang_flags import gpus
from slime_plugin.rollout.server.weight_update import update_weights
from slime_plugin.verify import oracles, world
from slime_plugin.verify.decoding import decoding_seconds
from slime_plugin.verify.measurement import Measurement, SkippedError
from slime_plugin.verify.model import score
from slime_plugin.verify.settings import Verification

PROMPTS = ("What is the capital of France?", "Name three prime numbers.", "Who wrote Hamlet?", "What is a tree?")
"""For a cell without questions."""
SCALE = 0.7
"""Of the last norm, in the other weights: every distribution becomes flatter."""
TURNS, TURN_TOKENS = 4, 256
"""At most."""
NOTICED = 3.0
"""Old weights have to be this many times the limit away, or the check could not tell them from new ones."""
_WEIGHTS = (
    "engine and trainer disagree about the same weights: check that both load the same checkpoint, that nothing but "
    "temperature 1 changes the engine's distribution, and the engine's attention backend"
)
_UPDATE = (
    "the engine does not sample with the weights that it was given: look for a refused or partial weight update in its "
    "log, and check cluster.engine_gpus"
)
_BLIND = "the other weights do not change what is sampled, so that old ones could not be told; report it with the JSON"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rollouts of two versions of the weights."""

    before: list[Record]
    after: list[Record]
    note: str
    """Why they are not those of the cell's harness; empty if they are."""
    step_s: float
    """Seconds of one decoding step."""


def check(verification: Verification) -> Iterator[Measurement]:
    limits, cell = verification.limits, verification.cell
    if verification.device == "cuda" and gpus() < cell.cluster.engine_gpus:
        raise SkippedError(f"an engine has {cell.cluster.engine_gpus} GPUs, and this machine {gpus()}")
    if cell.rollout.temperature != 1:
        raise SkippedError(f"rollout.temperature is {cell.rollout.temperature:g}, and the trainer computes at 1")
    with TemporaryDirectory(prefix="memorywalker-") as folder:
        other = write_other_weights(verification.model, Path(folder) / "other")
        sampled = asyncio.run(_sample(verification, other, Path(folder)))
        ranks = verification.parallel.ranks
        (found, *_) = world.run_on_ranks(ranks, measure, verification, sampled, other)
    if sampled.note:
        yield Measurement("rollouts are of plain prompts", True, sampled.note)
    what = f"log-probabilities of {len(sampled.before)} rollouts"
    yield Measurement.at_most(f"{what}: mean difference", found[0], limits.engine, _WEIGHTS, "nats")
    # Flatter distributions sample less likely tokens, on which both differ more; old weights would be further away.
    updated = max(limits.engine, found[2] / NOTICED)
    yield Measurement.at_most("the same with new weights", found[1], updated, _UPDATE, "nats")
    yield Measurement.at_least("the same by the old weights", found[2], NOTICED * limits.engine, _BLIND, "nats")
    yield from _decoding_step(verification, sampled.step_s)


def _decoding_step(verification: Verification, seconds: float) -> Iterator[Measurement]:
    gpu = gpu_named(device_name())
    architecture, split = verification.architecture, verification.cell.cluster.engine_gpus
    planned = None if gpu is None else planned_decoding_step(architecture, split, gpu)
    yield Measurement.beside_plan("a decoding step of one rollout", seconds, planned, "ms", 1e-3)
    if gpu is not None:
        beside, assumed = step_seconds(architecture, split, gpu, seconds), ASSUMPTIONS.step_seconds
        what = "of that beside reading weights"
        yield Measurement.beside_plan(what, beside, assumed, "ms", 1e-3, assumption="step_seconds")


def measure(verification: Verification, sampled: Sampled, other: Path) -> tuple[float, float, float]:
    """Return the mean difference of each of: first rollouts by their weights; later ones by theirs, by the old ones."""
    rank = world.open_rank(verification)

    def logdiff(records: Sequence[Record]) -> float:
        (scores,) = score(verification, rank, records, (LogitTree(),))
        parts = [s.logprobs - record.logprobs[s.tape] for s, record in zip(scores, records, strict=True)]
        return float(np.abs(np.concatenate(parts)).mean())

    before, old = logdiff(sampled.before), logdiff(sampled.after)
    rank.load_weights(other)
    return before, logdiff(sampled.after), old


async def _sample(verification: Verification, other: Path, folder: Path) -> Sampled:
    cell = _shortened(verification.cell)
    on_gpus = verification.device == "cuda"
    dtype = None if on_gpus or verification.dtype == "float64" else verification.dtype
    flags = Flags(verification.model, verification.device, dtype, tp=cell.cluster.engine_gpus if on_gpus else 1)
    server = Server(flags, log=folder / "engine.log")
    async with _open_any(cell) as (environment, note):
        try:
            server.start()
            await asyncio.to_thread(server.wait)
            number = verification.size(8, 4)
            before = await _roll_out(environment, server.url, cell, number, folder / "before.records")
            step_s = await decoding_seconds(server.url)
            await update_weights(server.url, other, "1")
            after = await _roll_out(environment, server.url, cell, number, folder / "after.records")
        finally:
            await asyncio.to_thread(server.stop)
    return Sampled(before, after, note, step_s)


def _shortened(cell: Cell) -> Cell:
    limits = {"turns": min(cell.rollout.turns, TURNS), "turn_tokens": min(cell.rollout.turn_tokens, TURN_TOKENS)}
    return cell.model_copy(update={"rollout": cell.rollout.model_copy(update=limits)})


@asynccontextmanager
async def _open_any(cell: Cell) -> AsyncIterator[tuple[RolloutEnvironment, str]]:
    """Open the environment of the cell; without its tools or its agent one that asks plain questions."""
    try:
        opened = open_environment(cell)
        environment = await opened.__aenter__()
    except ConfigError as error:
        note = str(error).splitlines()[0]
        opened = open_environment(cell.model_copy(update={"tools": (), "harness": SearchR1()}))
        environment = await opened.__aenter__()
    else:
        note = ""
    try:
        yield environment, note
    finally:
        await opened.__aexit__(None, None, None)


async def _roll_out(environment: RolloutEnvironment, url: str, cell: Cell, number: int, path: Path) -> list[Record]:
    """Return rollouts that ended well and sampled something."""
    records: list[Record] = []
    tasks = [RolloutTask(question, 0) for question in _questions(cell, number)]
    async with SglangEngine(url, cell.engine, cell.rollout, environment.chat.stop_ids) as engine:
        with StoreWriter(path) as store:
            await run_tasks(
                environment, engine, tasks, store, lambda record, _: records.append(record), asyncio.Event()
            )
    good = [record for record in records if record.meta.status in DONE and record.generated.any()]
    if not good:
        report = records[0].meta.report
        raise MemoryWalkerError(
            f"none of {len(records)} rollouts ended well, the first {records[0].meta.status}: "
            f"{report.error or report.stop}; memorywalker rollout shows all of them"
        )
    return good


def _questions(cell: Cell, number: int) -> list[Question]:
    path = cell.rollout.questions
    if path is not None and path.is_file():
        return read_questions(path)[:number]
    return [Question(f"q{i}", PROMPTS[i % len(PROMPTS)], ("",)) for i in range(number)]


def write_other_weights(model: Path, folder: Path) -> Path:
    """Write a checkpoint that differs from another one in its last norm; whatever is equal is linked."""
    name = "model.norm.weight"
    changed = oracles.file_of(model, name)
    folder.mkdir()
    for path in model.iterdir():
        if path.is_file() and path != changed:
            (folder / path.name).symlink_to(path.resolve())
    with safe_open(changed, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dictionary
    tensors[name] = tensors[name] * SCALE
    save_file(tensors, folder / changed.name, metadata={"format": "pt"})
    return folder
