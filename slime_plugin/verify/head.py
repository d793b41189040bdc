"""The output layer and what the loss makes of its logits, on the tensor-parallel ranks of the cell, against float64.

The oracle has the whole vocabulary in one place: random logits, and the output matrix of the checkpoint. The sharded
functions are those of the loss. Legend: M rows, V vocabulary, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_plugin.local.rank import Rank
from slime_plugin.train import loss, vocabulary
from slime_plugin.train.process_groups import context_group
from slime_plugin.train.transformer_config import torch_dtype
from slime_plugin.train.tree_sequence import tree_sequence
from slime_plugin.verify import oracles, world
from slime_plugin.verify.generated import random_tree
from slime_plugin.verify.measurement import Measurement, worst
from slime_plugin.verify.settings import Verification

PADDING = 100.0
"""Logit of the columns beyond the vocabulary, which count nowhere."""
_SHARDS = (
    "a shard of the vocabulary is missing, counted twice or in another place: check the tensor-parallel group "
    "(NCCL_DEBUG=INFO shows its ranks), or train with trainer.tp=1"
)
_TEACHER = "SDCC's teacher would be trained as well; this is a bug of this package: report it with the JSON output"
_EMPTY = "a rank without a trained token would stop the others or change the loss; report it with the JSON output"


def check(verification: Verification) -> Iterator[Measurement]:
    found = world.run_on_ranks(verification.parallel.ranks, measure, verification)
    limits, ranks = verification.limits, verification.parallel.tp
    shards = f"vocabulary on {ranks} rank{'s' * (ranks > 1)}"
    for key, what, limit, remedy, unit in (
        ("logprobs", f"{shards}: log-probabilities", limits.statistics, _SHARDS, "nats"),
        ("entropy", f"{shards}: entropy", limits.statistics, _SHARDS, "nats"),
        ("gradient", f"{shards}: gradient", limits.statistics_gradient, _SHARDS, ""),
        ("kl", "SDCC's KL", limits.divergence, _SHARDS, ""),
        ("kl_gradient", "SDCC's KL: gradient", limits.divergence, _SHARDS, ""),
        ("teacher", "SDCC's KL: gradient of the teacher", 0.0, _TEACHER, ""),
        ("empty", "loss and gradient of rows without trained tokens", 0.0, _EMPTY, ""),
        ("head", "output layer: mean log-probability", limits.head, _SHARDS, "nats"),
    ):
        values = [rank[key] for rank in found if key in rank]
        yield Measurement.at_most(what, worst(values), limit, remedy, unit)


def measure(verification: Verification) -> dict[str, float]:
    rank = world.open_rank(verification)
    generator = np.random.default_rng(verification.seed)
    part = _Part(verification, rank, generator)
    found = _statistics(part) | _divergence(part) | _empty(part)
    head = _output_layer(verification, rank, generator)
    return found if head is None else {**found, "head": head}


class _Part:
    """This rank's columns of what all ranks draw alike."""

    def __init__(self, verification: Verification, rank: Rank, generator: np.random.Generator) -> None:
        self.generator, self.dtype = generator, torch_dtype(verification.dtype)
        self.rows = verification.size(256, 64)
        self.vocabulary, self.hidden = verification.architecture.vocabulary, min(256, verification.architecture.hidden)
        self.columns = verification.architecture.padded_vocabulary(rank.groups.tp.size()) // rank.groups.tp.size()
        self.start = rank.groups.tp.rank() * self.columns
        self.shard = vocabulary.Shard.of(self.vocabulary, self.columns, rank.groups.tp)
        self.objective = verification.cell.objective

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = world.random_tensor(self.generator, *shape, dtype=torch.float32)
        return (scale * drawn).to(self.dtype)

    def targets(self) -> Tensor:
        return torch.from_numpy(self.generator.integers(0, self.vocabulary, self.rows)).to(world.device())

    def own(self, full: Tensor, dimension: int, fill: float = PADDING) -> Tensor:
        """Return this rank's part of the vocabulary along a dimension, padded."""
        part = full.narrow(dimension, self.start, min(self.columns, self.vocabulary - self.start))
        size = list(part.shape)
        size[dimension] = self.columns - size[dimension]
        return torch.cat((part, part.new_full(size, fill)), dim=dimension)

    def difference(self, gradient: Tensor | None, expected: Tensor | None) -> float:
        """Compare the gradient of this rank's logits with that of all logits; padding has none."""
        assert gradient is not None
        assert expected is not None
        return oracles.relative(gradient, self.own(expected, 1, fill=0.0))


def _statistics(part: _Part) -> dict[str, float]:
    full, targets = part.random(part.rows, part.vocabulary, scale=3.0), part.targets()
    factors = part.random(2, part.rows).float()
    mine = part.own(full, 1).requires_grad_()
    logprobs, entropy = vocabulary.token_statistics(mine, targets, part.shard)
    torch.autograd.backward(factors[0] @ logprobs.float() + factors[1] @ entropy.float())
    whole = full.double().requires_grad_()
    right, uncertainty = oracles.token_statistics(whole, targets)
    torch.autograd.backward(factors[0].double() @ right + factors[1].double() @ uncertainty)
    return {
        "logprobs": float((logprobs.detach() - right.detach()).abs().max()),
        "entropy": float((entropy.detach() - uncertainty.detach()).abs().max()),
        "gradient": part.difference(mine.grad, whole.grad),
    }


def _divergence(part: _Part) -> dict[str, float]:
    full = part.random(part.rows, part.vocabulary, scale=2.0)
    hidden = part.random(part.rows, part.hidden)
    matrix = part.random(part.vocabulary, part.hidden, scale=2.0 * part.hidden**-0.5)
    mine, states = part.own(full, 1).requires_grad_(), hidden.clone().requires_grad_()
    weight = part.own(matrix, 0).requires_grad_()
    kl = vocabulary.forward_kl(mine, states, weight, part.shard).kl
    torch.autograd.backward(kl.sum())
    whole = full.double().requires_grad_()
    right = oracles.forward_kl(whole, hidden.double() @ matrix.double().T)
    torch.autograd.backward(right.sum())
    leaked = [x.grad.abs().max().item() for x in (states, weight) if x.grad is not None]
    return {
        "kl": oracles.relative(kl.detach(), right.detach()),
        "kl_gradient": part.difference(mine.grad, whole.grad),
        "teacher": worst(leaked),
    }


def _empty(part: _Part) -> dict[str, float]:
    """The loss of a micro-batch in which nothing is trained."""
    logits = part.random(2, part.columns).requires_grad_()
    none, numbers = logits[:0], torch.zeros(0, device=logits.device)
    ids = torch.zeros(0, dtype=torch.long, device=logits.device)
    targets = loss.Targets(numbers, numbers, numbers, numbers)
    value, _ = loss.update_loss(none, ids, targets, numbers, ids, part.objective, part.shard)
    torch.autograd.backward(value)
    assert logits.grad is not None
    return {"empty": float(value.detach().abs() + logits.grad.abs().max())}


def _output_layer(verification: Verification, rank: Rank, generator: np.random.Generator) -> float | None:
    """Return the mean difference of log-probabilities from those of the last hidden states, on the last stage."""
    architecture, parallel = verification.architecture, verification.parallel
    multiple = 2 * parallel.tp * parallel.cp
    parent = random_tree(-(-128 // multiple) * multiple, 8, generator)
    tokens = generator.integers(0, architecture.vocabulary, len(parent)).astype(np.int32)
    followers = np.flatnonzero(parent >= 0).astype(np.int32)
    predict = followers[: len(followers) // multiple * multiple]
    settings: dict[str, Any] = {"device": world.device(), "cp_group": context_group(rank.groups), "predict": predict}
    logits = world.run_model(rank, tokens, tree_sequence(parent, **settings))
    hidden = world.run_model(rank, tokens, tree_sequence(parent, **settings, project=False))
    if logits is None or hidden is None:
        return None
    targets = torch.from_numpy(tokens[predict]).long().to(logits.device)
    shard = vocabulary.Shard.of(architecture.vocabulary, logits.shape[2], rank.groups.tp)
    logprobs, _ = vocabulary.token_statistics(logits[0], targets, shard)
    matrix = oracles.output_matrix(verification.model, tied=architecture.tied).to(logits.device)
    expected = _in_chunks(hidden[:, 0], matrix, targets)
    return float((logprobs - expected).abs().mean())


def _in_chunks(hidden: Tensor, matrix: Tensor, targets: Tensor, chunk: int = 32) -> Tensor:
    """[M] log-probabilities in float64: all logits at once would be large."""
    exact = matrix.double()
    parts: Sequence[Tensor] = [
        oracles.token_statistics(rows.double() @ exact.T, ids)[0]
        for rows, ids in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    ]
    return torch.cat(list(parts))
