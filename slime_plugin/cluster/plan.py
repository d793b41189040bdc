"""Memory, tokens and time of a job, on paper: arithmetic over a cell, without a GPU and without weights.

What it comes to for the shipped cells on 1, 2, 4 and 32 nodes, and what all of it rests on, is in ``docs/scale.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from slime_plugin.cluster.memory import (
    BF16,
    GB,
    EngineMemory,
    RankMemory,
    engine_memory,
    host_memory,
    longest_row,
    micro_batch,
    rank_memory,
)
from slime_plugin.cluster.phases import ASSUMPTIONS, Assumptions, Decoding, Gpu, Phases, decoding, phases, update_flops
from slime_plugin.cluster.workload import OTHERS, WORKLOADS, Computed, Workload, computed
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import EVERY_METHOD, Mask4d, NaiveFull
from slime_plugin.errors import ConfigError

LIMITS = {
    "sampling": "engines reading and decoding",
    "tools": "waiting for tools",
    "tail": "the longest rollout",
    "update": "computing updates",
    "exchange": "exchanging hidden states",
    "imbalance": "replicas waiting for the longest rows",
    "reduction": "summing gradients",
    "swap": "moving weights and optimizer to the host and back",
    "sync": "sending weights to engines",
}
REMEDIES = {
    "sampling": "more GPUs shorten it, and larger engines (cluster.engine_gpus)",
    "tools": "no GPU shortens it; more rollouts at once hide it",
    "tail": "no GPU shortens it; only more rollouts per iteration use the wait",
    "update": "more GPUs shorten it",
    "exchange": "fewer tensor-parallel ranks shorten it (trainer.tp)",
    "imbalance": "more rollouts per replica and step shorten it",
    "reduction": "a faster link or fewer steps shorten it",
    "swap": "a finer split shortens it",
    "sync": "it is the same on any number of nodes",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One job. ``docs/scale.md`` has the formulas."""

    gpu: Gpu
    assumptions: Assumptions
    workload: Workload
    rollouts: int
    """Per iteration."""
    replicas: int
    rows: Computed
    """What the cell's method computes of a rollout."""
    methods: dict[str, Computed]
    """The same for every method."""
    micro_batch: int
    """Tokens of the longest micro-batch of a rank."""
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
    problems: tuple[str, ...]
    """Why it would not run."""
    notes: tuple[str, ...]
    """What is worth knowing."""

    @property
    def saturates(self) -> str:
        """What takes longest, and what comes next."""
        parts = sorted(asdict(self.phases).items(), key=lambda part: -part[1])
        (first, most), (second, next_to_it) = parts[:2]
        return (
            f"{LIMITS[first]} takes {most:,.0f} of {self.phases.total:,.0f} s, then {LIMITS[second]} with "
            f"{next_to_it:,.0f} s; {REMEDIES[first]}"
        )

    def to_json(self) -> dict[str, Any]:
        sums = {
            "rank_bytes": self.rank.total,
            "iteration_seconds": self.phases.total,
            "rollout_seconds": self.phases.rollout,
            "training_seconds": self.phases.training,
        }
        return asdict(self) | sums | {"saturates": self.saturates}


def plan_job(cell: Cell, gpu: Gpu, workload: Workload | None = None, assumptions: Assumptions = ASSUMPTIONS) -> Plan:
    """Of a cell without :func:`slime_plugin.cluster.problems.job_problems`."""
    if cell.model is None:
        raise ConfigError("model: missing; name the folder of a Hugging Face checkpoint")
    model, trainer = Architecture.of(cell.model), cell.trainer
    work = workload or WORKLOADS.get(cell.harness.type, OTHERS)
    context = cell.rollout.context_tokens
    methods: dict[str, Computed] = {method.type: computed(method, work, context) for method in EVERY_METHOD}
    rows = methods[cell.method.type] = computed(cell.method, work, context)
    replicas = cell.cluster.trainer_gpus // trainer.parallel.ranks
    rank = rank_memory(model, cell, replicas, rows)
    engine = engine_memory(model, cell)
    decode = decoding(model, cell, engine, work, gpu, assumptions)
    seconds = phases(model, cell, replicas, rank, decode, work, rows, gpu, assumptions)
    longest = longest_row(model, cell, rank, rows)
    rollouts = trainer.prompts * cell.rollout.samples
    return Plan(
        gpu=gpu,
        assumptions=assumptions,
        workload=work,
        rollouts=rollouts,
        replicas=replicas,
        rows=rows,
        methods=methods,
        micro_batch=micro_batch(trainer, rows),
        capacity=round(cell.cluster.memory * GB),
        rank=rank,
        longest_row=longest,
        host=host_memory(model, cell, rank),
        engine=engine,
        decoding=decode,
        flops=rollouts * update_flops(model, cell, rows),
        sync_bytes=BF16 * model.parameters,
        phases=seconds,
        problems=tuple(_problems(cell, rank, engine, rows, longest)),
        notes=tuple(_notes(cell, engine, rows, work)),
    )


def _problems(cell: Cell, rank: RankMemory, engine: EngineMemory, rows: Computed, longest: int) -> Iterator[str]:
    cluster, method, context = cell.cluster, cell.method, cell.rollout.context_tokens
    if rank.total > cluster.memory * GB:
        yield (
            f"trainer: a rank needs {rank.total / GB:.1f} GB of {cluster.memory:g} GB for micro-batches of "
            f"{micro_batch(cell.trainer, rows):,} tokens, and {longest:,} fit; {_remedy(cell, rows, longest)}"
        )
    if isinstance(method, Mask4d) and method.budget is not None and method.budget < context:
        yield (
            f"method.budget: {method.budget:,}, but a live context may have {context:,} tokens "
            f"(rollout.context_tokens), and a branch cannot be split; use at least {context:,}"
        )
    if engine.contexts < 1:
        yield (
            f"cluster.engine_memory: room for {engine.kv_tokens:,} tokens of a context of {context:,}; give engines "
            "more GPUs (cluster.engine_gpus), or shorten rollout.context_tokens"
        )


def _remedy(cell: Cell, rows: Computed, longest: int) -> str:
    split = "split the model further (trainer.tp)"
    if cell.trainer.batch_tokens * cell.trainer.cp > max(rows.longest, longest):
        return f"lower trainer.batch_tokens, or {split}"
    if isinstance(cell.method, Mask4d) and longest >= cell.rollout.context_tokens:
        return f"set method.budget to at most {longest:,}, or {split}"
    return split if cell.trainer.recompute else f"set trainer.recompute, or {split}"


def _notes(cell: Cell, engine: EngineMemory, rows: Computed, work: Workload) -> Iterator[str]:
    if 1 <= engine.contexts < engine.concurrency:
        yield (
            f"an engine holds {engine.contexts:.1f} contexts of {cell.rollout.context_tokens:,} tokens and is asked "
            f"for {engine.concurrency} rollouts; if all were that long, some would be read again"
        )
    if isinstance(cell.method, NaiveFull) and work.branches > 1:
        yield (
            f"nothing bounds the row of naive_full but the rollout: {rows.longest:,} tokens are the longest tape "
            "expected"
        )
