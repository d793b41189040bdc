"""Memory of a training rank, of its host and of an engine, in bytes.

What is counted is what slime, Megatron and SGLang allocate by their source; what they allocate beside it is one
assumption, ``RESERVE``. Legend: T tokens of a micro-batch on a rank, h hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from slime_plugin.cluster.workload import Computed
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.trainer import Trainer

GB = 10**9
BF16, FP32 = 2, 4
ADAM = 3 * FP32
"""Master weight and two moments of a parameter."""
LOGIT = 2 * FP32
"""Bytes per logit at the peak of a loss: the float32 logits and one copy. Going forward that is the rows of trained
tokens, in slime's log-probability passes the softmax; going backward two gradients, because the logits are freed."""
RESERVE = 8 * GB
"""Of a training rank: two CUDA contexts, NCCL's buffers, what stays of a sleeping engine, gaps between blocks. An
estimate; it has not been measured."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The fullest rank of the trainer while it updates. With several pipeline stages no rank has all of it."""

    weights: int
    """bfloat16."""
    gradients: int
    """float32, because slime is told to accumulate them so."""
    optimizer: int
    """float32 weights and two moments, dealt out over data- and context-parallel ranks."""
    activations: int
    """What the backward pass needs of the longest micro-batch, and the layer that is computed now."""
    logits: int
    keys: int
    """What tree attention gathers in one layer, with gradients."""
    teacher: int
    """SDCC's last hidden states."""
    reserve: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def states(self) -> int:
        """What is there whatever the micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.teacher + self.reserve


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One GPU of an engine."""

    weights: int
    kv_token: int
    """Bytes of a token's keys and values in all layers."""
    kv_tokens: int
    """How many of them fit."""
    contexts: float
    """Longest contexts that fit into the engine at once."""
    concurrency: int
    """Rollouts that it is asked to hold."""


def rank_parameters(model: Architecture, trainer: Trainer) -> int:
    """Parameters of the fullest pipeline stage on one tensor-parallel rank; norms are not split."""
    attention = model.hidden * model.head_size * 2 * (model.heads + model.groups)
    matrices = attention + 3 * model.hidden * model.feed_forward
    norms = 2 * model.head_size + 2 * model.hidden
    layers = -(-model.layers // trainer.pp)
    embedding = model.padded_vocabulary(trainer.tp) * model.hidden // trainer.tp
    tables = 1 if model.tied or trainer.pp > 1 else 2  # the first stage has one and the last stage one
    return layers * (matrices // trainer.tp + norms) + tables * embedding + model.hidden


def layer_bytes(model: Architecture, trainer: Trainer) -> int:
    """Per token, what the backward pass of one layer needs: inputs of both norms and of what follows them, queries
    and keys before and after their norm, values, the attention's output, and gate, up and product of SwiGLU."""
    whole = 4 * model.hidden
    split = (3 * model.heads + 3 * model.groups) * model.head_size + 3 * model.feed_forward
    return BF16 * (whole // _sequence_ranks(trainer) + split // trainer.tp)


def activation_bytes(model: Architecture, trainer: Trainer) -> int:
    """Per token of a micro-batch. Stages hold as many micro-batches as there are stages, so that all layers count."""
    layer = layer_bytes(model, trainer)
    kept = BF16 * model.hidden // _sequence_ranks(trainer) if trainer.recompute else layer
    layers = trainer.pp * -(-model.layers // trainer.pp)
    if trainer.vpp > 1:
        layers += -(-layers * (trainer.pp - 1) // (trainer.pp * trainer.vpp))
    now = 2 * layer if trainer.recompute else layer  # its activations and their gradients; else those are kept
    return layers * kept + now


def token_bytes(model: Architecture, trainer: Trainer, work: Computed) -> tuple[int, int, int]:
    """Per token of a micro-batch on a rank: activations, logits, gathered keys."""
    columns = model.padded_vocabulary(trainer.tp) // trainer.tp
    logits = LOGIT * columns * (1 + work.leaves)  # the rows of leaves, and their gradient, once more
    # Keys and values and their gradients in bfloat16, and one of the gradients in float32 while it is summed.
    width = model.groups * model.head_size // trainer.tp
    gathered = work.gathered if trainer.cp == 1 else max(work.gathered, 1.0) * trainer.cp
    return activation_bytes(model, trainer), round(logits), round(gathered * width * (4 * BF16 + FP32))


def rank_memory(model: Architecture, cell: Cell, replicas: int, work: Computed) -> RankMemory:
    trainer = cell.trainer
    parameters = rank_parameters(model, trainer)
    tokens = micro_batch(trainer, work)
    activations, logits, keys = (tokens * size for size in token_bytes(model, trainer, work))
    leaves = work.leaves * work.tokens * rollouts_per_step(cell) / replicas
    return RankMemory(
        weights=BF16 * parameters,
        gradients=FP32 * parameters,
        optimizer=-(-ADAM * parameters // (replicas * trainer.cp)),
        activations=activations,
        logits=logits,
        keys=keys,
        teacher=round(leaves * model.hidden * BF16),
        reserve=RESERVE,
    )


def micro_batch(trainer: Trainer, work: Computed) -> int:
    """T: a row that is longer than a micro-batch gets one of its own."""
    return max(trainer.batch_tokens, -(-work.longest // trainer.cp))


def longest_row(model: Architecture, cell: Cell, rank: RankMemory, work: Computed) -> int:
    """Tokens of the longest row that fits into what the states of a rank leave."""
    free = round(cell.cluster.memory * GB) - rank.states
    return max(0, free // sum(token_bytes(model, cell.trainer, work))) * cell.trainer.cp


def rollouts_per_step(cell: Cell) -> int:
    return cell.trainer.prompts * cell.rollout.samples // cell.trainer.steps


def host_memory(model: Architecture, cell: Cell, rank: RankMemory) -> int:
    """Of a node: pinned copies of the policy and, with a KL, of the reference; and of the optimizer while engines run.

    Gradients and weights of a sleeping trainer are not kept: weights come back from the pinned copy.
    """
    copies = 2 if cell.objective.kl else 1
    asleep = rank.optimizer if cell.cluster.shared else 0
    return cell.cluster.gpus * (copies * rank.weights + asleep)


def engine_memory(model: Architecture, cell: Cell) -> EngineMemory:
    cluster = cell.cluster
    weights = BF16 * model.parameters // cluster.engine_gpus
    heads = max(1, model.groups // cluster.engine_gpus)  # beyond that key-value heads are held twice
    kv_token = 2 * model.layers * heads * model.head_size * BF16
    free = round(cluster.engine_memory * cluster.memory * GB) - weights
    kv_tokens = max(0, free // kv_token)
    return EngineMemory(
        weights=weights,
        kv_token=kv_token,
        kv_tokens=kv_tokens,
        contexts=kv_tokens / cell.rollout.context_tokens,
        concurrency=-(-cell.rollout.concurrency // cluster.engines),
    )


def _sequence_ranks(trainer: Trainer) -> int:
    return trainer.tp if trainer.sp else 1
