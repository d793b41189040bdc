"""Memory, tokens and time of a cluster job, computed from a cell: without a GPU and without the model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.methods import METHODS, Computed, Workload, method_of
from slime_plugin.planner.job import ASSUMPTIONS, Assumptions, Gpu, Job, estimated_workload
from slime_plugin.planner.memory import (
    BF16,
    GB,
    EngineMemory,
    RankMemory,
    engine_memory,
    host_memory,
    longest_row,
    rank_memory,
)
from slime_plugin.planner.phases import Decoding, Phases, decoding, evaluation_seconds, phases, update_flops

PHASES = {
    "sampling": (
        "prefill and decoding",
        "more GPUs shorten it, and larger engines (cluster.engine_gpus)",
    ),
    "tools": ("waiting for tools", "more GPUs do not shorten it; more rollouts at once overlap it"),
    "tail": ("the longest rollout", "more GPUs do not shorten it; more rollouts per iteration overlap it"),
    "update": ("computing updates", "more GPUs shorten it"),
    "exchange": ("exchanging hidden states", "fewer tensor-parallel ranks shorten it (trainer.tp)"),
    "imbalance": ("replicas waiting for the longest rows", "more rollouts per replica and step shorten it"),
    "reduction": ("summing gradients", "a faster link or fewer steps shorten it"),
    "swap": ("moving weights and optimizer to the host and back", "a finer split shortens it"),
    "sync": ("sending weights to engines", "it is the same on any number of nodes"),
}
"""What happens in each of :class:`Phases`, and what shortens it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job needs. ``docs/scale.md`` has the formulas."""

    job: Job
    methods: dict[str, Computed]
    """What every method computes of the average rollout."""
    capacity: int
    """Bytes of a GPU."""
    rank: RankMemory
    longest_row: int
    """Tokens of the longest row that would fit; for a tree the largest N_trie, and so of ``method.budget``."""
    host: int
    """Bytes of a node's own memory."""
    engine: EngineMemory
    decoding: Decoding
    flops: float
    """Of the updates of an iteration."""
    sync_bytes: int
    """bfloat16 weights, to each engine."""
    phases: Phases
    evaluation_seconds: float
    """Of one evaluation."""
    problems: tuple[str, ...]
    """Why the job would not run."""
    notes: tuple[str, ...]

    @property
    def bottleneck(self) -> str:
        """The phase that takes longest, how to shorten it, and the next one."""
        (first, most), (second, next_most), *_ = sorted(asdict(self.phases).items(), key=lambda phase: -phase[1])
        (name, remedy), (next_name, _) = PHASES[first], PHASES[second]
        total = self.phases.total
        return f"{name} takes {most:,.0f} of {total:,.0f} s, then {next_name} with {next_most:,.0f} s; {remedy}"

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        job = value.pop("job")
        inputs = {key: job[key] for key in ("gpu", "assumptions", "workload", "rows")}
        sizes = {key: getattr(self.job, key) for key in ("rollouts", "replicas", "micro_batch", "evaluation_rollouts")}
        sums = {
            "rank_bytes": self.rank.total,
            "iteration_seconds": self.phases.total,
            "rollout_seconds": self.phases.rollout,
            "training_seconds": self.phases.training,
        }
        return inputs | sizes | value | sums | {"bottleneck": self.bottleneck, "saturates": self.bottleneck}


def plan_job(cell: Cell, gpu: Gpu, workload: Workload | None = None, assumptions: Assumptions = ASSUMPTIONS) -> Plan:
    """Plan a cell for which :func:`slime_plugin.cluster.job_problems.job_problems` finds nothing.

    ``workload`` replaces the estimate that the harness declares.
    """
    work = workload or estimated_workload(cell.harness)
    methods = {
        method.type: method_of(method).cost(work, cell.rollout.context_tokens)
        for method in (*METHODS.values(), cell.method)
    }
    model = Architecture.of(cell.require_model())
    job = Job(model, cell, work, methods[cell.method.type], gpu, assumptions)
    rank, engine = rank_memory(job), engine_memory(job)
    decode = decoding(job, engine)
    longest = longest_row(job, rank)
    return Plan(
        job=job,
        methods=methods,
        capacity=round(cell.cluster.memory * GB),
        rank=rank,
        longest_row=longest,
        host=host_memory(job, rank),
        engine=engine,
        decoding=decode,
        flops=update_flops(job),
        sync_bytes=BF16 * job.model.parameters,
        phases=phases(job, rank, decode),
        evaluation_seconds=evaluation_seconds(job, decode),
        problems=tuple(_problems(job, rank, engine, longest)),
        notes=tuple(_notes(job, engine)),
    )


def _problems(job: Job, rank: RankMemory, engine: EngineMemory, longest: int) -> Iterator[str]:
    cluster, context = job.cell.cluster, job.cell.rollout.context_tokens
    budget = method_of(job.cell.method).budget
    if rank.total > cluster.memory * GB:
        yield (
            f"trainer: a rank needs {rank.total / GB:.1f} GB of {cluster.memory:g} GB for micro-batches of "
            f"{job.micro_batch:,} tokens, and {longest:,} fit; {_remedy(job, longest)}"
        )
    if budget is not None and budget < context:
        yield (
            f"method.budget: {budget:,}, but a live context may have {context:,} tokens "
            f"(rollout.context_tokens), and a branch cannot be split; use at least {context:,}"
        )
    if engine.contexts < 1:
        yield (
            f"cluster.engine_memory: room for {engine.kv_tokens:,} tokens of a context of {context:,}; give engines "
            "more GPUs (cluster.engine_gpus), or shorten rollout.context_tokens"
        )


def _remedy(job: Job, longest: int) -> str:
    trainer, split = job.cell.trainer, "split the model further (trainer.tp)"
    if trainer.batch_tokens * trainer.cp > max(job.rows.longest, longest):
        return f"lower trainer.batch_tokens, or {split}"
    if method_of(job.cell.method).splits and longest >= job.cell.rollout.context_tokens:
        return f"set method.budget to at most {longest:,}, or {split}"
    return split if trainer.recompute else f"set trainer.recompute, or {split}"


def _notes(job: Job, engine: EngineMemory) -> Iterator[str]:
    context = job.cell.rollout.context_tokens
    if 1 <= engine.contexts < engine.concurrency:
        yield (
            f"an engine holds {engine.contexts:.1f} contexts of {context:,} tokens and is asked for "
            f"{engine.concurrency} rollouts; if all were that long, some would be evicted from the KV "
            "cache and prefilled again"
        )
    questions = job.cell.evaluation.questions
    if questions is not None and not questions.is_file() and job.cell.evaluation.limit is None:
        yield f"evaluation.questions: there is no file {questions}, so that the time of an evaluation is unknown"
    if job.concurrency < min(job.rollouts, job.cell.rollout.concurrency):
        yield (
            f"{job.concurrency} agents run at once (harness.processes), so that {job.rollouts} rollouts take "
            f"{-(-job.rollouts // job.concurrency)} waves; each takes a few hundred MB beside slime's rollout manager"
        )
    yield from method_of(job.cell.method).plan_notes(job.workload, job.rows)
