"""Scores records: log-probability passes of the trainer over the rows of a method, and the logdiff that results.

Model, rows, micro-batches and log-probabilities are those of training. With the weights that sampled the records, an
exact method reproduces the logged log-probabilities up to rounding; what remains with another method is its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slime_plugin.config.cell import Cell
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.rank import Rank
from slime_plugin.local.scorer import Scorer
from slime_plugin.record import Record
from slime_plugin.record.arrays import IntArray
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import Batch, LaidOut
from slime_plugin.slime.packed_batch import PackedBatch
from slime_plugin.train.logdiff import logdiff_sums, means
from slime_plugin.train.process_groups import sum_over_ranks
from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.train.transformer_config import torch_dtype
from slime_plugin.tree import Trajectory
from slime_plugin.tree.places import PLACES, places_of

PORTION_MICRO_BATCHES = 4
"""Micro-batches per pipeline stage that are scored between two reports of progress."""


@dataclass(frozen=True, slots=True)
class RecordScore:
    """One record under one method."""

    tape: IntArray
    """[n] the trained tokens, in the order of the tape."""
    logprobs: NDArray[np.float64]
    """[n] log-probabilities of the trainer."""
    leaf_kl: NDArray[np.float64]
    """[D] KL(teacher || student) at the diverging leaves; empty for a method without a teacher."""
    lost: Mapping[str, int]
    """Sampled tokens that are not trained, by cause."""
    tokens: int
    """Tokens computed with gradient in an update."""
    teacher_tokens: int
    """Tokens computed without gradient."""
    off_context: int | None
    """As in :class:`slime_plugin.methods.Layout`."""


def score_records(
    records: Sequence[Record], model: Path, scorer: Scorer, on_progress: OnProgress = lambda done: None
) -> list[list[RecordScore]]:
    """Return for each method the scores of all records, from processes that this starts and terminates.

    The records have passed :func:`slime_plugin.local.scorer.check_records`.
    """
    return run_ranks(scorer.parallel.ranks, _score_rank, list(records), model, scorer, on_progress=on_progress)[0]


def _score_rank(on_progress: OnProgress, records: list[Record], model: Path, scorer: Scorer) -> list[list[RecordScore]]:
    rank = Rank(args_of(scorer.cell(model, scorer.methods[0])), updates=False)
    return score_on_rank(on_progress, records, model, scorer, rank)


def score_on_rank(
    on_progress: OnProgress, records: Sequence[Record], model: Path, scorer: Scorer, rank: Rank
) -> list[list[RecordScore]]:
    """Return for each method the scores of all records, the same on all ranks. Collective.

    ``rank`` has the weights of ``model``.
    """
    scores: list[list[RecordScore]] = [[] for _ in scorer.methods]
    for portion in _portions(records, PORTION_MICRO_BATCHES * scorer.batch_tokens * scorer.parallel.pp):
        for of_method, method in zip(scores, scorer.methods, strict=True):
            of_method.extend(_score(portion, scorer.cell(model, method), rank))
        on_progress(len(portion))
    return scores


def _portions(records: Sequence[Record], tokens: int) -> Iterator[list[Record]]:
    """Yield records in order, in portions of about ``tokens`` tokens."""
    portion: list[Record] = []
    for record in records:
        portion.append(record)
        if sum(map(len, portion)) >= tokens:
            yield portion
            portion = []
    if portion:
        yield portion


def _score(records: Sequence[Record], cell: Cell, rank: Rank) -> Iterator[RecordScore]:
    rank.configure(args_of(cell))
    batch = Batch.for_scoring(records, cell.method)
    rows = [(rollout.number, row) for rollout in batch.rollouts for row in rollout.rows]
    # a row with an attention mask of its own is a micro-batch of its own
    budget = 1 if batch.method.only_scored else cell.trainer.batch_tokens * cell.trainer.cp
    (data,) = split_batch(batch.train_data(), replicas=1, steps=1, batch_tokens=budget)
    training, passes = rank.training, rank.passes
    training.on_batch(data)
    if training.distiller is not None:
        training.distiller.run_teacher(0, rank.models)

    def consume(packed: PackedBatch, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs, trained = training.logprobs(packed, logits)
        return trained.stream, logprobs, *training.leaf_kl(packed, logits)

    starts = np.cumsum([0, *map(len, records)])  # of each record in the columns below
    columns = torch.zeros(2, int(starts[-1]), dtype=torch.float64)  # log-probability and leaf KL by tape position
    results = passes.forward(data, consume)
    for indices, result in zip(data["micro_batch_indices"], results, strict=False):  # empty but on the last stage
        packed_rows = [rows[data["partition"][i]] for i in indices]
        tape = torch.from_numpy(np.concatenate([starts[number] + row.tape for number, row in packed_rows]))
        stream, scored, leaf_stream, kl = (part.cpu() for part in result)
        columns[0, tape[stream]] = scored.double()
        columns[1, tape[leaf_stream]] = kl.double()
    device = next(rank.models[0].parameters()).device
    logprobs, leaf_kl = sum_over_ranks(columns.to(device), rank.groups).cpu().numpy()
    for rollout, start, stop in zip(batch.rollouts, starts[:-1], starts[1:], strict=True):
        yield _record_score(rollout, logprobs[start:stop], leaf_kl[start:stop], cell)


def _record_score(
    rollout: LaidOut, logprobs: NDArray[np.float64], leaf_kl: NDArray[np.float64], cell: Cell
) -> RecordScore:
    """Return the score from [L] log-probabilities and [L] KLs by tape position. Refuse values that are not finite."""
    layout = rollout.layout
    trained = np.sort(np.concatenate([row.tape[row.loss_mask] for row in rollout.rows]))
    leaves = [layout.rows[0].tape[teacher.student] for teacher in layout.teachers]
    wrong = trained[~np.isfinite(logprobs[trained])]
    if wrong.size:
        raise MemoryWalkerError(
            f"{rollout.record.label}: the model gives token {int(wrong[0])} no finite log-probability; are the weights "
            f"in {cell.model} intact, and is {torch_dtype(cell.trainer.dtype)} wide enough for them?"
        )
    sizes = (layout.lost, layout.tokens, layout.teacher_tokens, layout.off_context)
    return RecordScore(trained, logprobs[trained], leaf_kl[np.concatenate([*leaves, trained[:0]])], *sizes)


def summarise_scores(records: Sequence[Record], scores: Sequence[RecordScore]) -> dict[str, Any]:
    """Return the logdiff over all tokens, by place and by layer, and the KL at the leaves."""
    signed_parts, places, layers = [], [], []
    lost: Counter[str] = Counter()
    for record, score in zip(records, scores, strict=True):
        trajectory = Trajectory.of(record)
        signed_parts.append(score.logprobs - record.logprobs[score.tape])
        places.append(places_of(trajectory)[score.tape])
        layers.append(trajectory.born[score.tape])
        lost.update(score.lost)
    signed, place, layer = (np.concatenate(parts) for parts in (signed_parts, places, layers))
    logdiff = np.abs(signed)
    sums = logdiff_sums(torch.from_numpy(signed), torch.zeros(len(signed)), torch.from_numpy(place))
    average = means({key: float(value) for key, value in sums.items()})
    leaf_kl = np.concatenate([score.leaf_kl for score in scores])
    return {
        "records": len(records),
        "sampled": sum(record.sampled for record in records),
        "tokens": len(signed),
        "lost": dict(lost),
        "logdiff": _over(logdiff),
        **{key: average[key] for key in ("signed_logdiff", "k3", "multiplicative_error")},
        "places": {
            name: {"tokens": int((place == i).sum()), **_over(logdiff[place == i])}
            for i, name in enumerate(PLACES)
            if (place == i).any()
        },
        "junctions": [
            {"junction": k, "tokens": int((layer == k).sum()), **_over(logdiff[layer == k])}
            for k in np.unique(layer).tolist()
        ],
        "leaves": {
            "number": len(leaf_kl),
            **{f"kl_{key}": value for key, value in _over(leaf_kl).items()},
            "pinsker": _over(np.sqrt(np.maximum(leaf_kl, 0) / 2))["mean"],
        },
    }


def _over(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Mean and maximum; None for an empty array."""
    return {"mean": float(values.mean()), "max": float(values.max())} if values.size else {"mean": None, "max": None}
