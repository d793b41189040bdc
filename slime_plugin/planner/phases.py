"""How long the phases of an iteration take, from the assumptions of a job.

slime samples, then trains, then sends weights, one after the other, even where engines have nodes of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_plugin.architecture import Architecture
from slime_plugin.config.trainer import Trainer
from slime_plugin.planner.job import Assumptions, Gpu, Job
from slime_plugin.planner.memory import BF16, FP32, EngineMemory, RankMemory, layer_matrices, rank_parameters


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one iteration, which is their sum."""

    sampling: float
    """Engines prefill and decode, for rollouts of average length."""
    tools: float
    """Those rollouts wait for tools."""
    tail: float
    """The longest rollout continues when the others are done: all its turns, one after the other."""
    update: float
    """Reference and old log-probabilities, teacher, forward, recomputation and backward, with equal shares for all
    replicas."""
    exchange: float
    """Tensor-parallel ranks exchange hidden states within a node."""
    imbalance: float
    """Replicas wait for the one with the longest rows, and pipeline stages for each other."""
    reduction: float
    """Gradients are summed and weights gathered over the replicas, after each step."""
    swap: float
    """Weights of the reference in and out, optimizer to the host and back."""
    sync: float
    """The new weights go to all engines."""

    @property
    def rollout(self) -> float:
        return self.sampling + self.tools + self.tail

    @property
    def training(self) -> float:
        return self.update + self.exchange + self.imbalance + self.reduction + self.swap

    @property
    def total(self) -> float:
        return self.rollout + self.training + self.sync


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an engine samples while all its rollouts are running."""

    rollouts: int
    """At once, per engine."""
    step: float
    """Seconds per token of each rollout."""
    prefill: float
    """Seconds to prefill the new tokens of one rollout."""
    tokens_per_second: float
    """Of all engines together, while they decode."""
    calls_per_second: float
    """Tool calls of all rollouts together."""


def forward_flops(model: Architecture, tokens: float, pairs: float, projected: float | None = None) -> float:
    """Two operations per matrix parameter and token; two products of a head's size per pair, head and layer. The output
    layer projects ``projected`` tokens, by default all of them."""
    layers = 2 * model.layers * layer_matrices(model) * tokens
    head = 2 * model.vocabulary * model.hidden * (tokens if projected is None else projected)
    return layers + head + 4 * model.layers * model.heads * model.head_size * pairs


def _passes(job: Job) -> int:
    """In forward passes: an update, the policy before it, the reference."""
    return update_passes(job.cell.trainer) + 1 + bool(job.cell.objective.kl)


def update_flops(job: Job) -> float:
    """Of all updates of an iteration."""
    rows = job.rows
    with_gradient = _passes(job) * forward_flops(job.model, rows.tokens, rows.pairs)
    return job.rollouts * (with_gradient + forward_flops(job.model, rows.teacher_tokens, rows.teacher_pairs))


def update_passes(trainer: Trainer) -> int:
    """Of an update alone, in forward passes: forward, backward for two, recomputation."""
    return 3 + trainer.recompute


def decoding(job: Job, engine: EngineMemory) -> Decoding:
    cluster, work, gpu, assumed = job.cell.cluster, job.workload, job.gpu, job.assumptions
    running = min(job.concurrency, job.rollouts)
    per_engine = min(-(-running // cluster.engines), max(1, int(engine.kv_tokens / work.live)))
    read = engine.weights + per_engine * work.live * engine.kv_token
    step = decoding_step(job.model, cluster.engine_gpus, gpu, assumed, read)
    new = max(0.0, work.trie_tokens - work.sampled)  # a cached prefix is read once: that is the prefix tree
    prefill = forward_flops(job.model, new, 0) / (cluster.engine_gpus * gpu.flops * assumed.prefill_share)
    running = min(running, per_engine * cluster.engines)
    seconds = work.sampled * step + per_engine * prefill + work.turns * assumed.tool_seconds
    return Decoding(per_engine, step, prefill, running / step, running * work.turns / seconds)


def decoding_step(model: Architecture, gpus: int, gpu: Gpu, assumed: Assumptions, read: float) -> float:
    """Seconds of one decoding step of an engine, each of whose GPUs reads so many bytes of weights and cache."""
    step = assumed.step_seconds + read / (gpu.bandwidth * assumed.memory_share)
    return step + 2 * model.layers * assumed.allreduce_seconds if gpus > 1 else step


def phases(job: Job, rank: RankMemory, decode: Decoding) -> Phases:
    cell, gpu, assumed = job.cell, job.gpu, job.assumptions
    sampling, tools, tail = _rollout_seconds(job, decode, job.rollouts)
    update = update_flops(job) / (cell.cluster.trainer_gpus * gpu.flops * gpu.mfu)
    exchange = _exchange(job)
    return Phases(
        sampling=sampling,
        tools=tools,
        tail=tail,
        update=update,
        exchange=exchange,
        imbalance=(update + exchange) * (_imbalance(job) * _bubble(job) - 1),
        reduction=cell.trainer.steps * _reduction(job),
        swap=_swap_bytes(job, rank) / assumed.pcie,
        sync=_sync(job),
    )


def evaluation_seconds(job: Job, decode: Decoding) -> float:
    """How long an evaluation takes, with rollouts like those of training."""
    return sum(_rollout_seconds(job, decode, job.evaluation_rollouts)) if job.evaluation_rollouts else 0.0


def _rollout_seconds(job: Job, decode: Decoding, rollouts: int) -> tuple[float, float, float]:
    """Seconds of sampling, of tools, and of the longest rollout alone, for so many rollouts in waves."""
    work, limits = job.workload, job.cell.rollout
    waves = -(-rollouts // min(job.concurrency, decode.rollouts * job.cell.cluster.engines))
    sampling = work.sampled * decode.step + decode.rollouts * decode.prefill
    tools = work.turns * job.assumptions.tool_seconds
    longest = (sampling + tools) * max(1.0, limits.turns / work.turns)
    longest = min(longest, limits.seconds or longest)
    return waves * sampling, waves * tools, max(0.0, longest - sampling - tools)


def _imbalance(job: Job) -> float:
    """Factor on the update time. slime balances rows over replicas, so that these wait only for a rollout that is
    longer than an even share: the largest of S normal numbers lies about sqrt(2 ln S) deviations above their mean."""
    if job.replicas == 1:
        return 1.0
    longest = 1 + job.assumptions.spread * math.sqrt(2 * math.log(job.rollouts_per_step))
    return max(1.0, longest * job.replicas / job.rollouts_per_step)


def _bubble(job: Job) -> float:
    trainer = job.cell.trainer
    tokens = job.rollouts_per_step / job.replicas * job.rows.tokens
    return bubble(trainer, max(1, math.ceil(tokens / (trainer.batch_tokens * trainer.cp))))


def bubble(trainer: Trainer, micro_batches: int) -> float:
    """Factor on the update time: pipeline stages wait for the first micro-batch to arrive and the last to return."""
    return 1 + (trainer.pp - 1) / (trainer.vpp * micro_batches)


def _exchange(job: Job) -> float:
    tokens = job.rollouts * job.rows.tokens / job.replicas
    return exchange_seconds(job.model, job.cell.trainer, job.gpu, tokens, _passes(job))


def exchange_seconds(model: Architecture, trainer: Trainer, gpu: Gpu, tokens: float, passes: int) -> float:
    """Seconds of a replica. Per layer and pass the hidden states of a micro-batch are gathered twice and summed twice
    over the tensor-parallel ranks; the backward pass moves twice as much, as with operations."""
    moved = 4 * BF16 * model.hidden * (trainer.tp - 1) / trainer.tp
    return tokens / trainer.cp * passes * model.layers / trainer.pp * moved / gpu.nvlink


def _reduction(job: Job) -> float:
    """float32 gradients once around the ring, and bfloat16 weights once. Between nodes all shards of a node share its
    link."""
    trainer, cluster = job.cell.trainer, job.cell.cluster
    members = job.replicas * trainer.cp
    moved = (FP32 + BF16) * rank_parameters(job.model, trainer) * (members - 1) / members
    if cluster.trainer_nodes == 1:
        return moved / job.gpu.nvlink
    return moved * min(trainer.tp * trainer.pp, cluster.gpus) / job.assumptions.link


def _swap_bytes(job: Job, rank: RankMemory) -> int:
    """Bytes of a rank to and from the host in one iteration: the policy is saved once; with a reference, that is
    loaded and the policy again; a trainer that sleeps offloads its optimizer and loads it and its weights again."""
    reference = 2 * rank.weights if job.cell.objective.kl else 0
    sleep = 2 * rank.optimizer + rank.weights if job.cell.cluster.shared else 0
    return rank.weights + reference + sleep


def _sync(job: Job) -> float:
    """Every node feeds its own engines from its own GPUs; engines on other nodes get them over the link."""
    weights = BF16 * job.model.parameters
    return weights / job.assumptions.sync + (0 if job.cell.cluster.shared else weights / job.assumptions.link)
