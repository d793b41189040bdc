"""Memory of a training rank, of its host and of an engine, in bytes.

Counts what slime, Megatron and SGLang allocate according to their source; everything else is the assumption
``RESERVE``. Legend: T tokens of a micro-batch on a rank, h hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from slime_plugin.architecture import Architecture
from slime_plugin.config.trainer import Trainer
from slime_plugin.planner.job import Job

GB = 10**9
BF16, FP32 = 2, 4
ADAM = 3 * FP32
"""Master weight and two moments of a parameter."""
LOGIT = 2 * FP32
"""Bytes per logit at the peak of a loss: the float32 logits and one copy. In the forward pass the copy is the rows of
trained tokens; in the backward pass both are gradients. slime's log-probability passes work in chunks, with less."""
RESERVE = 8 * GB
"""Of a training rank: two CUDA contexts, NCCL's buffers, the rest of a sleeping engine, fragmentation. Not measured."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The fullest rank of the trainer during an update. With several pipeline stages no rank has all of it."""

    weights: int
    """bfloat16."""
    gradients: int
    """float32, because slime is configured to accumulate in it."""
    optimizer: int
    """float32 weights and two moments, sharded over data- and context-parallel ranks."""
    activations: int
    """What the backward pass needs of the longest micro-batch, and the layer being computed."""
    logits: int
    keys: int
    """What tree attention gathers in one layer, with gradients, and what its kernel allocates for them."""
    teacher: int
    """SDCC's last hidden states."""
    reserve: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def states(self) -> int:
        """The part that does not depend on the micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.teacher + self.reserve


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One GPU of an engine."""

    weights: int
    kv_token: int
    """Bytes of a token's keys and values in all layers."""
    kv_tokens: int
    """Tokens that fit."""
    contexts: float
    """Contexts of the largest size that fit into the engine at once."""
    concurrency: int
    """Rollouts that run on it at once."""


def rank_parameters(model: Architecture, trainer: Trainer) -> int:
    """Parameters of the fullest pipeline stage on one tensor-parallel rank; norms are not split."""
    norms = 2 * model.head_size + 2 * model.hidden
    layers = -(-model.layers // trainer.pp)
    embedding = model.padded_vocabulary(trainer.tp) * model.hidden // trainer.tp
    tables = 1 if model.tied or trainer.pp > 1 else 2  # the first stage has one and the last stage one
    return layers * (layer_matrices(model) // trainer.tp + norms) + tables * embedding + model.hidden


def layer_matrices(model: Architecture) -> int:
    """Parameters of a layer without its norms."""
    attention = model.hidden * model.head_size * 2 * (model.heads + model.groups)
    return attention + 3 * model.hidden * model.feed_forward


def activation_bytes(model: Architecture, trainer: Trainer) -> int:
    """Per token of a micro-batch. Stages hold as many micro-batches as there are stages, so all layers count."""
    # What the backward pass of one layer needs: inputs of both norms and of what follows them; queries and keys before
    # and after their norm, values, the attention's output, and gate, up and product of SwiGLU.
    sequence_ranks = trainer.tp if trainer.sp else 1
    split = (3 * model.heads + 3 * model.groups) * model.head_size + 3 * model.feed_forward
    layer = BF16 * (4 * model.hidden // sequence_ranks + split // trainer.tp)
    layers = trainer.pp * -(-model.layers // trainer.pp)
    if trainer.vpp > 1:
        layers += -(-layers * (trainer.pp - 1) // (trainer.pp * trainer.vpp))
    if trainer.recompute:  # the input of each layer, and one layer with its gradients
        return layers * (BF16 * model.hidden // sequence_ranks) + 2 * layer
    return (layers + 1) * layer


def token_bytes(job: Job) -> tuple[int, int, int]:
    """Per token of a micro-batch on a rank: activations, logits, gathered keys."""
    model, trainer, rows = job.model, job.cell.trainer, job.rows
    columns = model.padded_vocabulary(trainer.tp) // trainer.tp
    logits = LOGIT * columns * (1 + rows.leaves)  # the rows of leaves, and their gradient, once more
    # Keys and values and their gradients in bfloat16, and one of the gradients in float32 while it is summed.
    width = model.groups * model.head_size // trainer.tp
    gathered = rows.gathered if trainer.cp == 1 else max(rows.gathered, 1.0) * trainer.cp
    kernel = _flash_backward(job, max(gathered, 1.0))
    return activation_bytes(model, trainer), round(logits), round(gathered * width * (4 * BF16 + FP32) + kernel)


def _flash_backward(job: Job, keys: float) -> float:
    """Bytes per token that FlashAttention's backward pass allocates for itself, with so many keys per token.

    The gradient of queries in float32; with grouped heads also those of keys and values: version 3 sums them in
    float32, version 2 writes them per query head.
    """
    model, tp = job.model, job.cell.trainer.tp
    queries, grouped = model.heads * model.head_size // tp, model.groups * model.head_size // tp
    if model.heads == model.groups:
        return FP32 * queries
    return FP32 * queries + keys * 2 * (FP32 * grouped if job.gpu.flash == 3 else BF16 * queries)


def rank_memory(job: Job) -> RankMemory:
    parameters = rank_parameters(job.model, job.cell.trainer)
    activations, logits, keys = (job.micro_batch * size for size in token_bytes(job))
    leaves = job.rows.leaves * job.rows.tokens * job.rollouts_per_step / job.replicas
    return RankMemory(
        weights=BF16 * parameters,
        gradients=FP32 * parameters,
        optimizer=-(-ADAM * parameters // (job.replicas * job.cell.trainer.cp)),
        activations=activations,
        logits=logits,
        keys=keys,
        teacher=round(leaves * job.model.hidden * BF16),
        reserve=RESERVE,
    )


def longest_row(job: Job, rank: RankMemory) -> int:
    """Tokens of the longest row that fits beside the states of a rank."""
    free = round(job.cell.cluster.memory * GB) - rank.states
    return max(0, free // sum(token_bytes(job))) * job.cell.trainer.cp


def host_memory(job: Job, rank: RankMemory) -> int:
    """Of a node: pinned copies of the policy and, with a KL, of the reference; and of the optimizer while engines run.

    Gradients and weights of a sleeping trainer are not kept: weights come back from the pinned copy.
    """
    copies = 2 if job.cell.objective.kl else 1
    optimizer = rank.optimizer if job.cell.cluster.shared else 0
    return job.cell.cluster.gpus * (copies * rank.weights + optimizer)


def engine_memory(job: Job) -> EngineMemory:
    model, cluster, rollout = job.model, job.cell.cluster, job.cell.rollout
    weights = BF16 * model.parameters // cluster.engine_gpus
    heads = max(1, model.groups // cluster.engine_gpus)  # with more GPUs key-value heads are replicated
    kv_token = 2 * model.layers * heads * model.head_size * BF16
    kv_tokens = max(0, (round(cluster.engine_memory * cluster.memory * GB) - weights) // kv_token)
    concurrency = -(-job.concurrency // cluster.engines)
    return EngineMemory(weights, kv_token, kv_tokens, kv_tokens / rollout.context_tokens, concurrency)
