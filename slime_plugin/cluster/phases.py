"""How long the phases of an iteration take, from stated assumptions. Nothing in here has been measured on a GPU.

slime samples, then trains, then sends weights, one after the other, also where engines have nodes of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_plugin.cluster.memory import BF16, FP32, EngineMemory, RankMemory, rank_parameters, rollouts_per_step
from slime_plugin.cluster.workload import Computed, Workload
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published numbers, and how much of them training reaches."""

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


GPUS = {
    "a100": Gpu("A100", 312e12, 2.0e12, 300e9, 0.40),
    "h100": Gpu("H100", 989e12, 3.35e12, 450e9, 0.30),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the times rest on besides the GPU. Any of them can be given anew with ``--assume``."""

    tool_seconds: float = 3.0
    """s. A search of the live web, or a page fetched and summarised."""
    memory_share: float = 0.6
    """Of a GPU's bandwidth that decoding reaches: many small kernels read each weight once."""
    prefill_share: float = 0.4
    """Of a GPU's operations that reading a prompt reaches: some hundred tokens at a time, behind a cached prefix."""
    step_seconds: float = 0.002
    """s. Scheduling, sampling and HTTP of one decoding step."""
    allreduce_seconds: float = 15e-6
    """s. One of the two all-reduces per layer of an engine with several GPUs: latency, the bytes are few."""
    spread: float = 0.6
    """Standard deviation over mean of the tokens of a rollout: some answer after three turns, some never."""
    link: float = 50e9
    """Bytes per second between nodes, per node: one port of 400 Gb/s. Machines with a port per GPU have eight."""
    pcie: float = 25e9
    """Bytes per second between a GPU and its host, one way."""
    sync: float = 8e9
    """Bytes per second of weights into engines: gathering, renaming and loading in buckets of 512 MB, not the wire."""


ASSUMPTIONS = Assumptions()


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one iteration, which is their sum."""

    sampling: float
    """Engines read and decode, for the rollouts of average length."""
    tools: float
    """Those rollouts wait for tools."""
    tail: float
    """The longest rollout goes on when the others are done: all its turns, one after the other."""
    update: float
    """Reference and old log-probabilities, teacher, forward, recomputation and backward, if all replicas had the same
    to do."""
    exchange: float
    """Tensor-parallel ranks send each other hidden states, within a node."""
    imbalance: float
    """Replicas wait for the one with the longest rows, and stages for each other."""
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
    """How an engine samples while all its rollouts are under way."""

    rollouts: int
    """At once, per engine."""
    step: float
    """s per token of each."""
    prefill: float
    """s in which one rollout's new tokens are read."""
    tokens_per_second: float
    """Of all engines together, while they decode."""
    calls_per_second: float
    """Tool calls of all rollouts together."""


def matrix_parameters(model: Architecture) -> int:
    """Those that a token is multiplied with: all but norms and the lookup in an embedding that is not the head."""
    attention = model.hidden * model.head_size * 2 * (model.heads + model.groups)
    layer = attention + 3 * model.hidden * model.feed_forward
    return model.layers * layer + model.vocabulary * model.hidden


def forward_flops(model: Architecture, tokens: float, pairs: float) -> float:
    """Two operations per parameter and token; two products of a head's size per pair, head and layer."""
    return 2 * matrix_parameters(model) * tokens + 4 * model.layers * model.heads * model.head_size * pairs


def _passes(cell: Cell) -> int:
    """In forward passes: forward, backward for two, perhaps forward again, the policy as it was, the reference."""
    return 3 + cell.trainer.recompute + 1 + bool(cell.objective.kl)


def update_flops(model: Architecture, cell: Cell, work: Computed) -> float:
    """Of one rollout."""
    with_gradient = forward_flops(model, work.tokens, work.pairs)
    return _passes(cell) * with_gradient + forward_flops(model, work.teacher_tokens, work.teacher_pairs)


def decoding(
    model: Architecture, cell: Cell, engine: EngineMemory, work: Workload, gpu: Gpu, given: Assumptions
) -> Decoding:
    cluster = cell.cluster
    wanted = min(cell.rollout.concurrency, cell.trainer.prompts * cell.rollout.samples)
    fitting = max(1, int(engine.kv_tokens / work.live))
    at_once = min(-(-wanted // cluster.engines), fitting)
    read = engine.weights + at_once * work.live * engine.kv_token
    step = given.step_seconds + read / (gpu.bandwidth * given.memory_share)
    if cluster.engine_gpus > 1:
        step += 2 * model.layers * given.allreduce_seconds
    heard = max(0.0, work.trie_tokens - work.sampled)  # a cached prefix is read once: that is the prefix tree
    prefill = forward_flops(model, heard, 0) / (cluster.engine_gpus * gpu.flops * given.prefill_share)
    together = min(wanted, at_once * cluster.engines)
    mean = work.sampled * step + at_once * prefill + work.turns * given.tool_seconds
    return Decoding(at_once, step, prefill, together / step, together * work.turns / mean)


def phases(
    model: Architecture,
    cell: Cell,
    replicas: int,
    rank: RankMemory,
    decode: Decoding,
    work: Workload,
    rows: Computed,
    gpu: Gpu,
    given: Assumptions,
) -> Phases:
    rollouts = cell.trainer.prompts * cell.rollout.samples
    waves = -(-rollouts // (decode.rollouts * cell.cluster.engines))
    sampling = work.sampled * decode.step + decode.rollouts * decode.prefill
    tools = work.turns * given.tool_seconds
    longest = (sampling + tools) * max(1.0, cell.rollout.turns / work.turns)
    longest = min(longest, cell.rollout.seconds or longest)
    update = rollouts * update_flops(model, cell, rows) / (cell.cluster.trainer_gpus * gpu.flops * gpu.mfu)
    exchange = _exchange(model, cell, replicas, rows, gpu)
    waiting = _imbalance(cell, replicas, given.spread) * _bubble(cell, replicas, rows) - 1
    return Phases(
        sampling=waves * sampling,
        tools=waves * tools,
        tail=max(0.0, longest - sampling - tools),
        update=update,
        exchange=exchange,
        imbalance=(update + exchange) * waiting,
        reduction=cell.trainer.steps * _reduction(model, cell, replicas, gpu, given),
        swap=_swap(cell, rank) / given.pcie,
        sync=_sync(model, cell, given),
    )


def _imbalance(cell: Cell, replicas: int, spread: float) -> float:
    """slime deals rows out evenly, so that replicas wait only for a rollout that is longer than a fair share: the
    largest of S normal numbers lies about sqrt(2 ln S) deviations above their mean."""
    together = rollouts_per_step(cell)
    longest = 1 + spread * math.sqrt(2 * math.log(together))
    return max(1.0, longest * replicas / together) if replicas > 1 else 1.0


def _exchange(model: Architecture, cell: Cell, replicas: int, rows: Computed, gpu: Gpu) -> float:
    """Per layer and pass the hidden states of a micro-batch are gathered twice and summed twice over the
    tensor-parallel ranks; backward that is twice as much, as with operations."""
    trainer = cell.trainer
    tokens = cell.trainer.prompts * cell.rollout.samples * rows.tokens / (replicas * trainer.cp)
    moved = 4 * BF16 * model.hidden * (trainer.tp - 1) / trainer.tp
    return tokens * _passes(cell) * model.layers / trainer.pp * moved / gpu.nvlink


def _bubble(cell: Cell, replicas: int, rows: Computed) -> float:
    """Stages of a pipeline wait for the first micro-batch to arrive and the last to return."""
    trainer = cell.trainer
    tokens = rollouts_per_step(cell) / replicas * rows.tokens
    batches = max(1, math.ceil(tokens / (trainer.batch_tokens * trainer.cp)))
    return 1 + (trainer.pp - 1) / (trainer.vpp * batches)


def _reduction(model: Architecture, cell: Cell, replicas: int, gpu: Gpu, given: Assumptions) -> float:
    """float32 gradients once around the ring, and bfloat16 weights once. Between nodes every shard that a node has goes
    through its link."""
    trainer, cluster = cell.trainer, cell.cluster
    members = replicas * trainer.cp
    moved = (FP32 + BF16) * rank_parameters(model, trainer) * (members - 1) / members
    if cluster.trainer_nodes == 1:
        return moved / gpu.nvlink
    shards = min(trainer.tp * trainer.pp, cluster.gpus)
    return moved * shards / given.link


def _swap(cell: Cell, rank: RankMemory) -> int:
    """Bytes of a rank to and from the host in one iteration: the policy is saved once; with a reference, that is
    loaded and the policy again; a trainer that sleeps gives its optimizer away and gets it and its weights back."""
    reference = 2 * rank.weights if cell.objective.kl else 0
    asleep = 2 * rank.optimizer + rank.weights if cell.cluster.shared else 0
    return rank.weights + reference + asleep


def _sync(model: Architecture, cell: Cell, given: Assumptions) -> float:
    """Every node feeds its own engines from its own GPUs; engines elsewhere get all of it over the link as well."""
    weights = BF16 * model.parameters
    return weights / given.sync + (0 if cell.cluster.shared else weights / given.link)
