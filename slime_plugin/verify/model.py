"""The model at the cell's split, by the passes that train: mask4d against logittree on the same rollouts.

A chain per branch needs no tree anywhere, so what a tree computes has to be the same: log-probabilities, the loss of an
update and its gradient. Rollouts are recorded ones, or random contexts in which the model itself has sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings
from slime_plugin.local.rank import Rank
from slime_plugin.local.score import RecordScore, score_on_rank
from slime_plugin.local.scorer import Scorer, check_records
from slime_plugin.record import Record
from slime_plugin.slime.batch import Batch
from slime_plugin.train.pipeline import wrap_for_training
from slime_plugin.verify import world
from slime_plugin.verify.generated import random_records, texts_of
from slime_plugin.verify.measurement import Measurement
from slime_plugin.verify.sampling import sampled_by_model
from slime_plugin.verify.settings import Verification
from slime_plugin.verify.updates import Update

ROLLOUTS = 4
_TREE = (
    "a tree is not trained on what its branches are: the attention, rope and head checks say where, if one of them "
    "fails too; otherwise change trainer.tp, pp or cp to find the split that is wrong, or train with method=logittree"
)


def check(verification: Verification) -> Iterator[Measurement]:
    found = world.run_on_ranks(verification.parallel.ranks, measure, verification)
    limits, split = verification.limits, verification.parallel
    worst = max(found, key=lambda rank: rank.sort_key)
    what = f"tp {split.tp}, pp {split.pp}, cp {split.cp}: "
    logprobs = f"{what}log-probabilities of {worst.tokens:,} tokens"
    limit = limits.logprob if verification.records else limits.made_up
    yield Measurement.at_most(logprobs, worst.logprob, limit, _TREE, "nats")
    yield Measurement.at_most(f"{what}loss", worst.loss, limits.loss, _TREE)
    yield Measurement.at_most(f"{what}gradient", worst.gradient, limits.gradient, _TREE)


@dataclass(frozen=True, slots=True)
class Difference:
    """Between mask4d and logittree, the same on all ranks but for the gradient."""

    tokens: int
    logprob: float
    """Mean size of the difference, in nats."""
    loss: float
    gradient: float
    """Relative."""

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Put what is not a number last."""
        return self.gradient != self.gradient, self.gradient


def measure(verification: Verification) -> Difference:
    rank = world.open_rank(verification)
    records = rollouts_of(verification, rank)
    methods = tree_of(verification), LogitTree()
    scores = score(verification, rank, records, methods)
    rank.models = wrap_for_training(rank.models[0].config, rank.models, rank.groups)
    difference = np.concatenate([a.logprobs - b.logprobs for a, b in zip(*scores, strict=True)])
    tree_loss = update(verification, rank, records, methods[0])
    gradients = [gradient.clone() for gradient in _gradients(rank)]
    loss = update(verification, rank, records, methods[1])
    squares = torch.zeros(2, dtype=torch.float64, device=world.device())
    for mine, right in zip(gradients, _gradients(rank), strict=True):
        squares += torch.stack([(mine.double() - right.double()).square().sum(), right.double().square().sum()])
    dist.all_reduce(squares)
    return Difference(
        tokens=len(difference),
        logprob=float(np.abs(difference).mean()),
        loss=abs(tree_loss - loss) / max(1.0, abs(loss)),
        gradient=float((squares[0] / squares[1]).sqrt()),
    )


def tree_of(verification: Verification) -> Mask4d:
    """Return mask4d with the cell's settings, if that is its method."""
    method = verification.cell.method
    return method if isinstance(method, Mask4d) and method.packing == "trie" else Mask4d()


def rollouts_of(verification: Verification, rank: Rank) -> list[Record]:
    """Return the rollouts to compare on, the same on all ranks. Collective."""
    if verification.records:
        records = list(verification.records)[: verification.size(16, ROLLOUTS)]
        check_records(records, verification.model, verification.parallel)
        return records
    generator = np.random.default_rng(verification.seed)
    tokens, positions = verification.size(2048, 256), verification.positions
    texts = texts_of(verification.cell, verification.architecture.vocabulary, generator)
    records = random_records(verification.size(ROLLOUTS, 2), tokens, texts, generator, positions)
    return sampled_by_model(records, rank, verification)


def score(
    verification: Verification, rank: Rank, records: Sequence[Record], methods: tuple[MethodSettings, ...]
) -> list[list[RecordScore]]:
    """Return the scores of all records under each method, on all ranks. Collective."""
    batch_tokens = verification.cell.trainer.batch_tokens
    scorer = Scorer(methods, verification.parallel, verification.dtype, batch_tokens, verification.cell.objective)
    return score_on_rank(lambda done: None, records, verification.model, scorer, rank)


def _gradients(rank: Rank) -> list[Tensor]:
    parameters: list[Any] = [parameter for model in rank.models for parameter in model.parameters()]
    return [parameter.main_grad for parameter in parameters]


def update(verification: Verification, rank: Rank, records: Sequence[Record], method: MethodSettings) -> float:
    """Leave the gradients of an update in the buffers, and return its loss."""
    return Update.of(verification, rank, Batch.for_scoring(records, method), method).run(rank)
