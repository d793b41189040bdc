"""Let the model of the trainer sample in given contexts, without an engine: all positions at once, a few times over.

Every pass draws each sampled token anew from the distribution in front of it, with the same random numbers; a run of
as many tokens as there are passes is then sampled as if token by token, and longer ones nearly so. What counts is that
tokens are likely: log-probabilities of unlikely ones say more about rounding than a rollout would.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.config.method import LogitTree
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.rank import Rank
from slime_plugin.record import Record
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import Batch
from slime_plugin.slime.packed_batch import PackedBatch
from slime_plugin.train.process_groups import sum_over_ranks
from slime_plugin.verify.settings import Verification

PASSES, QUICK_PASSES = 6, 3
CHUNK = 256
"""Rows of logits that get noise at a time."""


def sampled_by_model(records: Sequence[Record], rank: Rank, verification: Verification) -> list[Record]:
    """Return the records with other sampled tokens and their log-probabilities, the same on all ranks. Collective."""
    records = list(records)
    for _ in range(verification.size(PASSES, QUICK_PASSES)):
        records = _pass(records, rank, verification, keep_tokens=False)
    return _pass(records, rank, verification, keep_tokens=True)


def _pass(records: list[Record], rank: Rank, verification: Verification, *, keep_tokens: bool) -> list[Record]:
    """Draw all sampled tokens again, or note their log-probabilities."""
    cell = verification.one_replica().model_copy(update={"method": LogitTree()})
    rank.configure(args_of(cell))
    batch = Batch.for_scoring(records, cell.method)
    rows = [(rollout.number, row) for rollout in batch.rollouts for row in rollout.rows]
    budget = cell.trainer.batch_tokens * cell.trainer.cp
    (data,) = split_batch(batch.train_data(), replicas=1, steps=1, batch_tokens=budget)
    device = next(rank.models[0].parameters()).device
    generator = torch.Generator(device).manual_seed(verification.seed + rank.groups.tp.rank())

    def consume(packed: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, trained = rank.training.logprobs(packed, logits)
        drawn = logprobs if keep_tokens else _draw(logits[0].index_select(0, trained.logits), rank, generator)
        return trained.stream.cpu(), drawn.double().cpu()

    starts = np.cumsum([0, *map(len, records)])
    column = torch.zeros(int(starts[-1]), dtype=torch.float64)
    results = rank.passes.forward(data, consume)
    for indices, (stream, drawn) in zip(data["micro_batch_indices"], results, strict=False):  # only on the last stage
        packed = [rows[data["partition"][i]] for i in indices]
        tape = torch.from_numpy(np.concatenate([starts[number] + row.tape for number, row in packed]))
        column[tape[stream]] = drawn
    found = sum_over_ranks(column.to(device), rank.groups).cpu().numpy()
    parts = (found[start:stop] for start, stop in pairwise(starts))
    return [_changed(record, part, keep_tokens) for record, part in zip(records, parts, strict=True)]


def _draw(logits: Tensor, rank: Rank, generator: torch.Generator) -> Tensor:
    """[M] token ids drawn from logits [M, V/tp]: the largest of logit and Gumbel noise, over all ranks."""
    first = rank.groups.tp.rank() * logits.shape[1]
    size = min(logits.shape[1], rank.training.architecture.vocabulary - first)
    parts = []
    for rows in torch.split(logits[:, :size], CHUNK):
        noise = -torch.empty(rows.shape, device=rows.device).exponential_(generator=generator).log()
        best = (rows.float() + noise).max(dim=1)
        parts.append(torch.stack((best.values.double(), (best.indices + first).double())))
    mine = torch.cat(parts, dim=1)  # [2, M]
    everywhere = [torch.empty_like(mine) for _ in range(rank.groups.tp.size())]
    dist.all_gather(everywhere, mine, group=rank.groups.tp)
    offers = torch.stack(everywhere)  # [tp, 2, M]
    return offers[:, 1].gather(0, offers[:, 0].argmax(dim=0, keepdim=True))[0]


def _changed(record: Record, drawn: np.ndarray, keep_tokens: bool) -> Record:
    sampled = record.generated
    tokens = record.tokens if keep_tokens else np.where(sampled, drawn.astype(np.int32), record.tokens)
    logprobs = np.where(sampled, drawn if keep_tokens else -1.0, np.nan)
    return Record(tokens, sampled, np.minimum(logprobs, 0.0), record.views, record.edits, record.meta)
