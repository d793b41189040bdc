"""How fast the path that trains is here: updates of every method, what makes the host wait, memory, and the links.

Methods take turns on the same rollouts: recorded ones, or rollouts of the shape that the cell's harness declares, which
are shortened on a CPU. Beside what was measured stands what ``memorywalker plan`` assumes.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slime_plugin.config.method import METHODS, Distillation, LogitTree, MethodSettings
from slime_plugin.local.rank import Rank
from slime_plugin.local.scorer import check_records
from slime_plugin.local.timing import device_name, median_ratio, plain_chains, time_in_turns
from slime_plugin.methods import DENOMINATOR, Computed, method_of
from slime_plugin.planner.calibration import PlannedUpdate
from slime_plugin.planner.job import ASSUMPTIONS, Gpu, counted_workload, estimated_workload, gpu_named
from slime_plugin.planner.phases import update_passes
from slime_plugin.record import Record
from slime_plugin.slime.batch import Batch
from slime_plugin.train.pipeline import wrap_for_training
from slime_plugin.train.transformer_config import torch_dtype
from slime_plugin.verify import links, world
from slime_plugin.verify.generated import texts_of, workload_record
from slime_plugin.verify.longest_row import planned_bytes
from slime_plugin.verify.measurement import Measurement
from slime_plugin.verify.model import tree_of
from slime_plugin.verify.settings import Verification
from slime_plugin.verify.synchronisation import DeviceTimes, WaitCounter, profiled
from slime_plugin.verify.updates import Update

CHAIN = "plain chain"
"""Of as many tokens as the prefix tree has."""
BASELINES = {DENOMINATOR: "H_comp", CHAIN: "chain", LogitTree().type: "logittree"}
GB = 1e9
LEAST_REPEATS, TIMED_S = 2, 30.0
"""Of an update, and the seconds for all of them together where more are possible."""
SHOWN_PLACES = 3
NOISE = 2.0
"""Between repetitions of the same update; with more, its median means little."""
_INFINITE = (
    "the loss overflows: look whether the head and model checks pass, and which method it is; its seconds say nothing"
)
_MEMORY = (
    "an update takes more than memorywalker plan says: report it with the JSON output, and leave as much room "
    "(method.budget, trainer.batch_tokens)"
)


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """What one rank measured."""

    device: str
    rows: Mapping[str, Computed]
    """By contender: sums over all rollouts."""
    micro_batches: Mapping[str, int]
    seconds: Mapping[str, Sequence[float]]
    """Of an update, by contender and repetition."""
    losses: Mapping[str, float]
    logprob_seconds: float
    """Of a pass for log-probabilities by the cell's method."""
    peak: int
    """Bytes, during an update by the cell's method: allocated on the GPU, or resident on the host."""
    planned: int
    waits: Mapping[str, int]
    """Operations of an update that make the host wait, by line."""
    times: DeviceTimes | None
    links: Mapping[str, float]
    """By name of an assumption, or ``bandwidth``."""


def check(verification: Verification) -> Iterator[Measurement]:
    found = world.run_on_ranks(verification.parallel.ranks, measure, verification)
    first, gpu = found[0], gpu_named(found[0].device)
    yield from _updates(verification, first)
    slowest = {
        key: (max if key.endswith("_seconds") else min)(rank.links[key] for rank in found) for key in first.links
    }
    yield from _shares(verification, first, gpu, slowest.get("nvlink"))
    yield _memory(verification, found)
    yield from _waits(verification, found)
    yield from _links(verification, slowest, gpu)


def rollouts_of(verification: Verification) -> list[Record]:
    """Return what updates are timed on, the same on all ranks."""
    number = verification.size(4, 2)
    if verification.records:
        records = list(verification.records)[:number]
        check_records(records, verification.model, verification.parallel)
        return records
    generator = np.random.default_rng(verification.seed)
    texts = texts_of(verification.cell, verification.architecture.vocabulary, generator)
    work = estimated_workload(verification.cell.harness)
    return [workload_record(i, work, scale_of(verification), texts) for i in range(number)]


def scale_of(verification: Verification) -> float:
    """Return the factor on the lengths that the harness declares, so that contexts fit and a CPU is done in seconds."""
    work = estimated_workload(verification.cell.harness)
    longest = max(work.final, 2 * work.live - work.final)  # contexts grow or shrink evenly
    tape = verification.size(1024, 256) if verification.device == "cpu" else verification.size(round(work.tape), 4096)
    return min(1.0, tape / work.tape, verification.positions / longest)


def contenders(verification: Verification, records: Sequence[Record]) -> dict[str, tuple[Batch, MethodSettings]]:
    """Return rollouts laid out by every method, the cell's with its settings, and as plain chains."""
    own, chain = verification.cell.method, LogitTree()
    methods = [method for method in {**METHODS, own.type: own}.values() if not method_of(method).only_scored]
    laid_out = {
        method.type: (Batch.for_scoring(records, _past_warm_up(method)), _past_warm_up(method)) for method in methods
    }
    trees = Batch.for_scoring(records, tree_of(verification))
    chains = tuple(replace(rollout, layout=plain_chains(rollout.layout)) for rollout in trees.rollouts)
    return {**laid_out, CHAIN: (Batch(method_of(chain), chains), chain)}


def _past_warm_up(method: MethodSettings) -> MethodSettings:
    """While the coefficient of a teacher is 0, it does not run."""
    return method.model_copy(update={"warmup": 0.0}) if isinstance(method, Distillation) else method


def measure(verification: Verification) -> RankSpeed:
    rank = world.open_rank(verification)
    rank.models = wrap_for_training(rank.models[0].config, rank.models, rank.groups)
    records = rollouts_of(verification)
    batches = contenders(verification, records)
    updates = {name: Update.of(verification, rank, *laid_out) for name, laid_out in batches.items()}
    losses = {}

    def run(name: str) -> None:
        losses[name] = updates[name].run(rank)

    actions = {name: partial(run, name) for name in updates}
    repeats = _repeats(verification, actions)
    seconds = time_in_turns(actions, repeats, prepare=lambda name: dist.barrier())
    own = verification.cell.method.type
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    actions[own]()
    peak, planned = _peak(verification, records, batches[own][0])
    with WaitCounter() as counter:
        actions[own]()
    return RankSpeed(
        device=device_name(),
        rows={name: Computed.counted([r.layout for r in batch.rollouts]) for name, (batch, _) in batches.items()},
        micro_batches={name: update.micro_batches for name, update in updates.items()},
        seconds=seconds,
        losses=losses,
        logprob_seconds=links.seconds_of(lambda: (updates[own].logprobs(rank), dist.barrier())),
        peak=peak,
        planned=planned,
        waits=dict(counter.places),
        times=profiled(actions[own]) if torch.cuda.is_available() else None,
        links=_measure_links(verification, rank),
    )


def _repeats(verification: Verification, actions: Mapping[str, Callable[[], None]]) -> int:
    """Run a first round, which finds neither memory nor caches warm; return how many more there is time for."""
    begin = time.perf_counter()
    for action in actions.values():
        action()
    taken = torch.tensor(time.perf_counter() - begin, device=world.device())
    dist.all_reduce(taken, dist.ReduceOp.MAX)  # the same on all ranks
    return max(LEAST_REPEATS, min(verification.size(5, LEAST_REPEATS), int(TIMED_S / taken.item())))


def _peak(verification: Verification, records: Sequence[Record], batch: Batch) -> tuple[int, int]:
    """Return the bytes of the update before and, on a GPU, those that the plan expects of such rows."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    peak, cell = torch.cuda.max_memory_allocated(), verification.cell
    expected = method_of(cell.method).cost(counted_workload(records), cell.rollout.context_tokens)
    longest = max(len(row) for rollout in batch.rollouts for row in rollout.rows)
    return peak, planned_bytes(verification, replace(expected, longest=longest), len(records))


def _measure_links(verification: Verification, rank: Rank) -> dict[str, float]:
    dtype, on_gpu = torch_dtype(verification.dtype), torch.cuda.is_available()
    size = verification.size(1 << 30, 1 << 28) if on_gpu else 1 << 24
    found = {"bandwidth": links.read_bandwidth(size, dtype)}
    if on_gpu:
        found["pcie"] = links.host_bandwidth(size // 4)
    if rank.groups.tp.size() > 1:
        found["nvlink"] = links.gather_bandwidth(size // 4, rank.groups.tp)
        found["allreduce_seconds"] = links.sum_latency(verification.architecture.hidden, dtype, rank.groups.tp)
    return found


def _updates(verification: Verification, found: RankSpeed) -> Iterator[Measurement]:
    """Yield a line per contender."""
    records = rollouts_of(verification)
    mean = statistics.fmean(map(len, records))
    shape = "recorded" if verification.records else f"{scale_of(verification):.2%} of the harness's"
    yield Measurement("rollouts", True, f"{len(records)} of {mean:,.0f} tokens, {shape}")
    columns = f"seconds; / {', / '.join(BASELINES.values())}; tokens/s/rank"
    spread = max(max(seconds) / min(seconds) for seconds in found.seconds.values())
    noise = f"repetitions differ by up to {spread:.1f}x: other processes use this machine" if spread > NOISE else ""
    yield Measurement("an update by each method, in turn", True, columns, remedy=noise)
    for name, seconds in found.seconds.items():
        rows, taken, loss = found.rows[name], statistics.median(seconds), found.losses[name]
        times = {base: median_ratio(seconds, found.seconds[base]) for base in BASELINES}
        speed = (rows.tokens + rows.teacher_tokens) / taken / verification.parallel.ranks
        finite = math.isfinite(loss)
        shown = " ".join(f"{ratio:6.2f}" for ratio in times.values())
        yield Measurement(
            f"  {name}{' *' * (name == verification.cell.method.type)}",
            finite,
            f"{taken:7.3f} {shown} {speed:9,.0f}" if finite else f"loss {loss}",
            remedy="" if finite else _INFINITE,
            value=taken,
            numbers={
                "tokens": rows.tokens,
                "teacher_tokens": rows.teacher_tokens,
                "tokens_per_second": speed,
                **{f"over {BASELINES[base]}": ratio for base, ratio in times.items()},
            },
        )


def _shares(
    verification: Verification, found: RankSpeed, gpu: Gpu | None, nvlink: float | None
) -> Iterator[Measurement]:
    """Yield what the seconds of the cell's method come to, beside what a plan expects; ``nvlink`` was measured."""
    trainer, own = verification.one_replica().trainer, verification.cell.method.type
    taken = statistics.median(found.seconds[own])
    if gpu is not None:
        update = PlannedUpdate(verification.architecture, trainer, gpu, found.rows[own], found.micro_batches[own])
        yield Measurement.beside_plan(f"update by {own}", taken, update.seconds, "s")
        mfu = replace(update, gpu=gpu if nvlink is None else replace(gpu, nvlink=nvlink)).mfu(taken)
        if mfu is not None:
            yield Measurement.beside_plan("share of the GPU's operations", mfu, gpu.mfu, "", assumption="mfu")
    share = found.logprob_seconds / taken
    yield Measurement.beside_plan("log-probabilities alone, of an update", share, 1 / update_passes(trainer), "")


def _memory(verification: Verification, found: Sequence[RankSpeed]) -> Measurement:
    peak, what = max(rank.peak for rank in found), "memory of the fullest rank"
    if verification.device == "cpu":
        return Measurement(what, True, f"{peak / GB:.3g} GB", value=peak / GB)
    return Measurement.at_most(what, peak / GB, max(rank.planned for rank in found) / GB, _MEMORY, "GB")


def _waits(verification: Verification, found: Sequence[RankSpeed]) -> Iterator[Measurement]:
    """Yield how often the host waits, on the rank where it does so most often, and what that costs."""
    worst = max(found, key=lambda rank: sum(rank.waits.values()))
    number, most = sum(worst.waits.values()), Counter(worst.waits).most_common(SHOWN_PLACES)
    places = ((place.partition(" in "), times) for place, times in most)
    where = ", ".join(f"{times} {operation} in {Path(line).name}" for (operation, _, line), times in places)
    verb = "wait" if verification.device == "cuda" else "would wait"
    what = f"operations that {verb} for a GPU"
    yield Measurement(what, True, f"{number}{f': {where}' if where else ''}", value=number, numbers=worst.waits)
    if worst.times is None:
        if verification.device == "cuda":
            yield Measurement("GPU without work", True, "unknown: the profiler saw no work of the GPU")
    else:
        idle, lost = worst.times.idle / worst.times.seconds, worst.times.lost / worst.times.seconds
        yield Measurement("GPU without work", True, f"{idle:.1%} of an update", value=idle)
        text = f"{lost:.1%} of an update, at {worst.times.calls} waits and copies"
        yield Measurement("  of that because the host waited", True, text, value=lost)


def _links(verification: Verification, slowest: Mapping[str, float], gpu: Gpu | None) -> Iterator[Measurement]:
    """Yield what the slowest rank gets, beside what a plan assumes."""
    on_gpu = verification.device == "cuda"
    for key, what, unit, per_unit, assumed in (
        # What decoding reaches is a share of the published bandwidth, and engines sum in another way than the trainer:
        # these two replace nothing.
        ("bandwidth", "reading weights from memory", "GB/s", GB, None if gpu is None else gpu.bandwidth),
        ("pcie", "between a GPU and its host", "GB/s", GB, ASSUMPTIONS.pcie),
        ("nvlink", "between tensor-parallel ranks", "GB/s", GB, None if gpu is None else gpu.nvlink),
        ("allreduce_seconds", "all-reduce of a token", "us", 1e-6, ASSUMPTIONS.allreduce_seconds if on_gpu else None),
    ):
        if key in slowest:
            assumption = key if key in ("pcie", "nvlink") else ""
            yield Measurement.beside_plan(what, slowest[key], assumed, unit, per_unit, assumption)
