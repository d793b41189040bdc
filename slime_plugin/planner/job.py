"""What a plan is computed from: model, cell, average rollout, GPU, and assumptions, none of them measured on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from slime_plugin.agents import driver_for
from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.harness import CustomHarness, Harness
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.methods import Computed, Workload, teachers_of
from slime_plugin.record import Record
from slime_plugin.rollout.editors import editor_factory
from slime_plugin.tree import Trajectory, count, diverging_leaves


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published numbers, and the share of them that training reaches."""

    name: str
    flops: float
    """bfloat16 operations per second, dense."""
    bandwidth: float
    """Bytes per second from its own memory."""
    nvlink: float
    """Bytes per second to the other GPUs of a node, one way."""
    mfu: float
    """Share of ``flops`` that an update reaches: packed rows of a 4B model, split in two. An estimate; faster GPUs
    wait for memory and launches for a larger share of the time."""
    flash: int
    """Version of FlashAttention."""


GPUS = {
    "a100": Gpu("A100", 312e12, 2.0e12, 300e9, 0.40, flash=2),
    "h100": Gpu("H100", 989e12, 3.35e12, 450e9, 0.30, flash=3),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the times depend on besides the GPU. ``--assume`` replaces any of them."""

    tool_seconds: float = 3.0
    """Seconds of a tool call: a web search, or a page fetched and summarised."""
    memory_share: float = 0.6
    """Share of a GPU's bandwidth that decoding reaches: many small kernels read each weight once."""
    prefill_share: float = 0.4
    """Share of a GPU's operations that prefill reaches: some hundred tokens at a time, behind a cached prefix."""
    step_seconds: float = 0.002
    """Seconds of scheduling, sampling and HTTP in one decoding step."""
    allreduce_seconds: float = 15e-6
    """Seconds of one of the two all-reduces per layer, in an engine with several GPUs: latency, the bytes are few."""
    spread: float = 0.6
    """Standard deviation over mean of the tokens of a rollout: some answer after three turns, some never."""
    link: float = 50e9
    """Bytes per second between nodes, per node: one port of 400 Gb/s. Machines with a port per GPU have eight."""
    pcie: float = 25e9
    """Bytes per second between a GPU and its host, one way."""
    sync: float = 8e9
    """Bytes per second of weights into engines: gathering, renaming and loading in buckets of 512 MB, not the wire."""


ASSUMPTIONS = Assumptions()
GPU_SPEEDS = ("flops", "bandwidth", "nvlink", "mfu")
"""Numbers of a GPU that ``--assume`` replaces, too."""
MAY_BE_ZERO = ("sampled", "teacher_tokens", "leaves", "tool_seconds", "step_seconds", "allreduce_seconds", "spread")
"""Of a workload and of what is assumed: nothing is divided by them."""


def gpu_named(device: str) -> Gpu | None:
    """Return the GPU that the driver calls by a name such as NVIDIA H100 80GB HBM3; None if plans do not know it."""
    return next((gpu for gpu in GPUS.values() if gpu.name in device.replace("-", " ").split()), None)


@dataclass(frozen=True, slots=True)
class Job:
    """One cell on one kind of GPU."""

    model: Architecture
    cell: Cell
    workload: Workload
    rows: Computed
    """What the cell's method computes of the average rollout."""
    gpu: Gpu
    assumptions: Assumptions

    @property
    def replicas(self) -> int:
        return self.cell.cluster.trainer_gpus // self.cell.trainer.parallel.ranks

    @property
    def rollouts(self) -> int:
        """Per iteration."""
        return self.cell.trainer.prompts * self.cell.rollout.samples

    @property
    def concurrency(self) -> int:
        """Rollouts that may run at once."""
        driver, limit = driver_for(self.cell.harness), self.cell.rollout.concurrency
        return limit if driver is None else min(limit, driver.settings.processes)

    @property
    def evaluation_rollouts(self) -> int:
        """Of one evaluation; 0 without a file of questions. A file that is not here counts as ``evaluation.limit``."""
        evaluation = self.cell.evaluation
        if evaluation.questions is None or self.cell.cluster.replay is not None:
            return 0
        there = evaluation.limit or 0
        if evaluation.questions.is_file():
            with open(evaluation.questions, "rb") as file:
                lines = sum(1 for line in file if line.strip())
            there = lines if evaluation.limit is None else min(lines, evaluation.limit)
        return there * evaluation.samples

    @property
    def rollouts_per_step(self) -> int:
        return self.rollouts // self.cell.trainer.steps

    @property
    def micro_batch(self) -> int:
        """T, tokens per rank: a row longer than ``batch_tokens`` gets a micro-batch of its own."""
        trainer = self.cell.trainer
        return max(trainer.batch_tokens, -(-self.rows.longest // trainer.cp))


def estimated_workload(harness: Harness) -> Workload:
    """What the settings of a harness declare or, of one by import path, its class."""
    if isinstance(harness, CustomHarness):
        return (driver_for(harness) or editor_factory(harness)()).workload
    return harness.workload


def counted_workload(records: Iterable[Record]) -> Workload:
    """The workload of recorded rollouts, to replace the estimate of their harness."""
    trajectories = [Trajectory.of(record) for record in records if record.generated.any()]
    if not trajectories:
        raise MemoryWalkerError("no record with a sampled token to count")
    counts = [count(trajectory) for trajectory in trajectories]
    return Workload(
        turns=fmean(_turns(trajectory.record) for trajectory in trajectories),
        sampled=fmean(c.R for c in counts),
        tape=fmean(c.L for c in counts),
        final=fmean(c.C for c in counts),
        branches=fmean(c.K + 1 for c in counts),
        branch_tokens=fmean(c.branch_tokens for c in counts),
        trie_tokens=fmean(c.trie_tokens for c in counts),
        teacher_tokens=fmean(map(_teacher_tokens, trajectories)),
        leaves=fmean(c.D for c in counts),
        longest_tape=max(c.L for c in counts),
    )


def _teacher_tokens(trajectory: Trajectory) -> int:
    return sum(len(teacher.row) for teacher in teachers_of(trajectory, diverging_leaves(trajectory)))


def _turns(record: Record) -> int:
    """Runs of sampled tokens on the tape."""
    generated = record.generated
    return int(generated[0]) + int((generated[1:] & ~generated[:-1]).sum())
