"""Compares methods on the same rollouts: the logdiff of each, and its cost.

Every batch is scored with the weights that sampled it, one version after the other in the same processes. So an exact
method is at the rounding error of the two engines, the *floor*; what another method has above it is its own error. The
cost is measured on the path that trains: whole iterations on one batch, methods in turn.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import MethodSettings
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.rank import Rank
from slime_plugin.local.sample import recorded_samples
from slime_plugin.local.score import RecordScore, score_on_rank, summarise_scores
from slime_plugin.local.scorer import CompareSettings, ScoredIteration, Scorer, StartProgress
from slime_plugin.local.timing import device_name, median_ratio, time_in_turns
from slime_plugin.methods import DENOMINATOR, method_of
from slime_plugin.record import Meta, Record
from slime_plugin.run.folder import COMPARISON_VERSION
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import Batch
from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.train.transformer_config import torch_dtype

TIMED_ROLLOUTS = 64
"""Maximum rollouts of a timed iteration: the paper's batch."""
_UPDATE, _SCORE = 5, 1
"""Progress per rollout and method, in forward passes: reference, old, and three for the update."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result. All batches have the same methods."""

    batches: Sequence[ScoredIteration]
    scorer: Scorer
    scores: Sequence[Sequence[Sequence[RecordScore]]]
    """By batch and method: one per record."""
    seconds: Mapping[str, Sequence[float]]
    """Seconds of training on the timed batch, by method and repetition."""
    timed: ScoredIteration | None
    """The batch whose training was timed, cut to ``TIMED_ROLLOUTS``."""

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch.records]

    def scores_of(self, number: int) -> list[RecordScore]:
        """Return the scores of all records under one method."""
        return [score for by_method in self.scores for score in by_method[number]]

    def to_json(self) -> dict[str, Any]:
        records = self.records
        methods = {method.type: self._method(method, self.scores_of(i)) for i, method in enumerate(self.scorer.methods)}
        exact = [part["logdiff"] for part in methods.values() if part["exact"] and part["logdiff"]["mean"] is not None]
        return {
            "version": COMPARISON_VERSION,
            "floor": min(exact, key=lambda logdiff: float(logdiff["mean"]), default=None),
            "iterations": [batch.iteration for batch in self.batches],
            "records": len(records),
            "sampled": sum(record.sampled for record in records),
            "machine": _machine(self.scorer),
            "denominator": DENOMINATOR,
            "timed": self._timed(),
            "methods": methods,
            "by_iteration": [
                {
                    "iteration": batch.iteration,
                    "methods": {
                        method.type: summarise_scores(batch.records, scores)["logdiff"]
                        for method, scores in zip(self.scorer.methods, by_method, strict=True)
                    },
                }
                for batch, by_method in zip(self.batches, self.scores, strict=True)
            ],
        }

    def _method(self, method: MethodSettings, scores: Sequence[RecordScore]) -> dict[str, Any]:
        summary = summarise_scores(self.records, scores)
        off_context = [score.off_context for score in scores]
        return {
            "exact": method_of(method).exact,
            "logdiff": summary["logdiff"],
            "share_trained": summary["tokens"] / summary["sampled"] if summary["sampled"] else None,
            "trained": summary["tokens"],
            "tokens": sum(score.tokens for score in scores),
            "teacher_tokens": sum(score.teacher_tokens for score in scores),
            **self._cost(method.type),
            "off_context": None if None in off_context else sum(number or 0 for number in off_context),
            **{key: summary[key] for key in ("lost", "places", "junctions", "leaves")},
        }

    def _timed(self) -> dict[str, int] | None:
        if self.timed is None:
            return None
        rollouts, repeats = len(self.timed.records), len(self.seconds[DENOMINATOR])
        return {"iteration": self.timed.iteration, "records": rollouts, "repeats": repeats}

    def _cost(self, method: str) -> dict[str, float | None]:
        """Ratios are taken within each repetition, because machines are noisy."""
        if self.timed is None or method not in self.seconds:  # it may be one that is only scored
            return {"cost": None, "seconds": None}
        seconds = self.seconds[method]
        return {"cost": median_ratio(seconds, self.seconds[DENOMINATOR]), "seconds": statistics.median(seconds)}

    def arrays(self, number: int) -> dict[str, NDArray[Any]]:
        """Log-probability, record and tape position of every trained token under one method."""
        scores = self.scores_of(number)
        ids = ["" if record.meta.id is None else str(record.meta.id) for record in self.records]
        return {
            "record": np.repeat(np.arange(len(scores), dtype=np.int32), [len(score.tape) for score in scores]),
            "tape": np.concatenate([score.tape for score in scores]),
            "logprob": np.concatenate([score.logprobs for score in scores]).astype(np.float32),
            "ids": np.array(ids, dtype=np.str_),
            "iteration": np.repeat(
                np.array([batch.iteration for batch in self.batches], dtype=np.int32),
                [len(batch.records) for batch in self.batches],
            ),
        }


def compare(batches: Sequence[ScoredIteration], settings: CompareSettings, progress: StartProgress) -> Comparison:
    """Score all batches, and time training, if it is repeated at all, on the one with most edits.

    Start and terminate the processes for that.
    """
    timed = _timed_batch(batches) if settings.repeats else None
    work = _SCORE * sum(len(batch.records) for batch in batches)
    if timed is not None:
        work += _UPDATE * (settings.repeats + 1) * len(timed.records)
    ranks = run_ranks(
        settings.parallel.ranks,
        _compare_rank,
        *(list(batches), settings, timed),
        on_progress=progress(len(settings.methods) * work),
    )
    return Comparison(batches, settings, *ranks[0], timed)


def _timed_batch(batches: Sequence[ScoredIteration]) -> ScoredIteration:
    """Return the batch with most edits. The time does not depend on rewards, so rollouts without one get 0."""
    batch = max(batches, key=lambda batch: batch.edits)
    records = []
    for number, record in enumerate(batch.records[:TIMED_ROLLOUTS]):
        meta = Meta(id=number, group=record.meta.group or 0, reward=record.meta.reward or 0.0)
        records.append(Record(record.tokens, record.generated, record.logprobs, record.views, record.edits, meta))
    return dataclasses.replace(batch, records=tuple(records))


def _compare_rank(
    on_progress: OnProgress,
    batches: list[ScoredIteration],
    settings: CompareSettings,
    timed: ScoredIteration | None,
) -> tuple[list[list[list[RecordScore]]], dict[str, list[float]]]:
    """Return the scores of each batch under each method, and the seconds of training as measured on this rank."""
    rank = Rank(args_of(settings.cell(batches[0].model, settings.methods[0])), updates=timed is not None)

    def scored(records: int) -> None:
        on_progress(_SCORE * len(settings.methods) * records)

    scores: list[list[list[RecordScore]]] = []
    seconds: dict[str, list[float]] = {}
    for number, batch in enumerate(batches):
        if number:
            rank.load_weights(batch.model)
        scores.append(score_on_rank(scored, batch.records, batch.model, settings, rank))
        if timed is not None and timed.iteration == batch.iteration:
            seconds = time_training(on_progress, timed, settings, rank)
    return scores, seconds


def time_training(
    on_progress: OnProgress, timed: ScoredIteration, settings: CompareSettings, rank: Rank
) -> dict[str, list[float]]:
    """Measure seconds from rollouts to updated weights per repetition: layout, log-probability passes, an update.

    Methods take turns, another one comes first each time, and the first round only warms up memory and caches. The
    weights change meanwhile, which does not change the time.
    """
    samples = recorded_samples(timed.records)
    cells = {
        method.type: settings.cell(timed.model, method)
        for method in settings.methods
        if not method_of(method).only_scored
    }

    def prepare(method: str) -> None:
        rank.configure(args_of(cells[method]))  # each time, or guard rails that switched SDCC off would make it cheap
        rank.open_average()
        dist.barrier()

    def train(cell: Cell) -> None:
        (data,) = split_batch(
            Batch.of(samples, cell).train_data(),  # laid out each time; the hooks would keep the last batch
            replicas=1,
            steps=1,
            batch_tokens=cell.trainer.batch_tokens * cell.trainer.cp,
        )
        rank.train(1, data)  # past the warm-up of SDCC, which is a part of iteration 0; ends on all ranks at once

    return time_in_turns(
        {method: partial(train, cell) for method, cell in cells.items()},
        settings.repeats,
        prepare=prepare,
        warm_ups=1,
        on_timed=lambda *_: on_progress(_UPDATE * len(timed.records)),
    )


def _machine(scorer: Scorer) -> str:
    """Describe the hardware and versions that the seconds were measured with."""
    parallel, dtype = scorer.parallel, str(torch_dtype(scorer.dtype)).removeprefix("torch.")
    if torch.cuda.is_available():
        device = f"{parallel.ranks} x {device_name()}"
    else:
        device = f"{device_name()}, {len(os.sched_getaffinity(0))} cores"
    split = f"tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}"
    return f"{device}, {split}, {dtype}, torch {torch.__version__}, megatron-core {version('megatron-core')}"
