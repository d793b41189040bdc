"""The same rollouts under several methods: how far each trainer is from the policy that sampled them, and its price.

Every batch is scored with the weights that sampled it, one version after the other in the same processes. So what is
left of an exact method is the rounding error of two engines, the *floor*, and whatever another method has above it is
its own. The price is measured: whole updates of one batch, methods in turn.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray

from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import LogitTree, Mask4d, Method, NaiveCompressed
from slime_plugin.config.objective import Objective
from slime_plugin.errors import ConfigError
from slime_plugin.megatron.launch import Report, run_ranks
from slime_plugin.megatron.parallel import is_last_stage, start_groups
from slime_plugin.megatron.score import (
    RecordScore,
    Scorer,
    check_records,
    check_scores,
    score_on_rank,
    summarise_scores,
)
from slime_plugin.megatron.step import wrap_for_training
from slime_plugin.megatron.update import Updates
from slime_plugin.megatron.weights import load_model, load_weights
from slime_plugin.record import Meta, Record

VERSION = 1
DENOMINATOR = NaiveCompressed().type
"""What costs are measured against."""
TIMED_ROLLOUTS = 64
"""At most so many are in an update that is timed: the paper's batch."""
_UPDATE, _SCORE = 3, 1
"""Progress of a rollout under a method: a backward pass takes twice as long as a forward pass."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of one iteration, and how to score them: with the weights that sampled them."""

    iteration: int
    records: tuple[Record, ...]
    scorer: Scorer

    @property
    def edits(self) -> int:
        return sum(len(record.edits) for record in self.records)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out of it. All batches have the same methods."""

    batches: Sequence[Batch]
    scores: Sequence[Sequence[Sequence[RecordScore]]]
    """Of each batch under each method: one per record."""
    timed: Batch | None
    """Whose updates were timed, cut to the rollouts that were in them."""
    seconds: Mapping[str, Sequence[float]]
    """Of an update under each method, per repetition."""

    @property
    def methods(self) -> tuple[Method, ...]:
        return self.batches[0].scorer.methods

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch.records]

    def scores_of(self, number: int) -> list[RecordScore]:
        """Of all records under one method."""
        return [score for by_method in self.scores for score in by_method[number]]

    def to_json(self) -> dict[str, Any]:
        records = self.records
        methods = {method.type: self._method(method, self.scores_of(i)) for i, method in enumerate(self.methods)}
        exact = [part["logdiff"] for part in methods.values() if part["exact"] and part["logdiff"]["mean"] is not None]
        return {
            "version": VERSION,
            "floor": min(exact, key=lambda logdiff: float(logdiff["mean"]), default=None),
            "iterations": [batch.iteration for batch in self.batches],
            "records": len(records),
            "sampled": sum(record.sampled for record in records),
            "machine": _machine(self.batches[0].scorer),
            "denominator": DENOMINATOR,
            "timed": self._timed(),
            "methods": methods,
            "by_iteration": [
                {
                    "iteration": batch.iteration,
                    "methods": {
                        method.type: summarise_scores(batch.records, scores)["logdiff"]
                        for method, scores in zip(self.methods, by_method, strict=True)
                    },
                }
                for batch, by_method in zip(self.batches, self.scores, strict=True)
            ],
        }

    def _method(self, method: Method, scores: Sequence[RecordScore]) -> dict[str, Any]:
        summary = summarise_scores(self.records, scores)
        off_context = [score.off_context for score in scores]
        return {
            "exact": is_exact(method),
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
        if self.timed is None:
            return {"cost": None, "seconds": None}
        ratios = [a / b for a, b in zip(self.seconds[method], self.seconds[DENOMINATOR], strict=True)]
        return {"cost": statistics.median(ratios), "seconds": statistics.median(self.seconds[method])}

    def arrays(self, number: int) -> dict[str, NDArray[Any]]:
        """What the trainer gives every trained token under one method, and of which record it is."""
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


def is_exact(method: Method) -> bool:
    """Every trained token is conditioned on what it was sampled under."""
    return isinstance(method, LogitTree) or (isinstance(method, Mask4d) and method.packing != "union")


def compare(batches: Sequence[Batch], repeats: int, on_progress: Report = lambda done: None) -> Comparison:
    """Score all batches, and time ``repeats`` updates of the one with most edits; none if it is 0.

    Starts the processes it needs, and ends them. Progress adds up to :func:`units_of_work`.
    """
    first = batches[0].scorer
    if DENOMINATOR not in [method.type for method in first.methods]:
        raise ConfigError(f"{DENOMINATOR} is not among the methods; costs are measured against it")
    for batch in batches:
        check_records(batch.records, batch.scorer)
        if Architecture.read(batch.scorer.model) != Architecture.read(first.model):
            raise ConfigError(
                f"{batch.scorer.model}: of another shape than {first.model}; a run has one model, so are both its own?"
            )
    timed = _timed_batch(batches) if repeats else None
    everywhere = run_ranks(first.parallel.ranks, _compare_rank, list(batches), timed, repeats, on_progress=on_progress)
    scores = next(scores for scores, _ in everywhere if scores is not None)
    for batch, by_method in zip(batches, scores, strict=True):
        check_scores(batch.records, by_method, batch.scorer)
    return Comparison(batches, scores, timed, everywhere[0][1])


def units_of_work(batches: Sequence[Batch], repeats: int) -> int:
    """What the progress of a comparison adds up to."""
    methods = len(batches[0].scorer.methods)
    scored = _SCORE * methods * sum(len(batch.records) for batch in batches)
    return scored + (_UPDATE * methods * (repeats + 1) * len(_timed_batch(batches).records) if repeats else 0)


def _timed_batch(batches: Sequence[Batch]) -> Batch:
    """The batch with most edits. An update takes as long whatever its rollouts are worth, so that those that nobody
    has scored are timed too."""
    batch = max(batches, key=lambda batch: batch.edits)
    records = []
    for number, record in enumerate(batch.records[:TIMED_ROLLOUTS]):
        meta = Meta(id=number, group=record.meta.group or 0, reward=record.meta.reward or 0.0)
        records.append(Record(record.tokens, record.generated, record.logprobs, record.views, record.edits, meta))
    return dataclasses.replace(batch, records=tuple(records))


_Scores = list[list[list[RecordScore]]]


def _compare_rank(
    report: Report, batches: list[Batch], timed: Batch | None, repeats: int
) -> tuple[_Scores | None, dict[str, list[float]]]:
    """Scores on the last stage, elsewhere None; and the seconds of updates as this rank saw them."""
    first = batches[0].scorer
    groups = start_groups(first.parallel)
    architecture = Architecture.read(first.model)
    model = load_model(first.model, groups, first.parallel, first.torch_dtype)
    models = wrap_for_training(model.config, [model], groups) if repeats else [model]

    def scored(records: int) -> None:
        report(_SCORE * len(first.methods) * records)

    scores: _Scores = []
    seconds: dict[str, list[float]] = {}
    for number, batch in enumerate(batches):
        if number:
            load_weights(models, architecture, batch.scorer.model, groups)
        scores.append(score_on_rank(scored, batch.records, batch.scorer, models, groups))
        if timed is not None and timed.iteration == batch.iteration:
            seconds = _time_updates(report, timed, models, groups, architecture.vocabulary, repeats)
    return scores if is_last_stage(groups) else None, seconds


def _time_updates(
    report: Report,
    batch: Batch,
    models: Sequence[Any],
    groups: ProcessGroupCollection,
    vocabulary: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds from records to gradients, per repetition. Methods take turns, another one begins each time, and the
    first round only warms memory and caches up."""
    scorer, methods = batch.scorer, batch.scorer.methods
    seconds: dict[str, list[float]] = {method.type: [] for method in methods}
    for repetition in range(repeats + 1):
        begin = repetition % len(methods)
        for method in methods[begin:] + methods[:begin]:
            updates = Updates.of(  # each time anew: guard rails that have switched SDCC off would make it cheap
                models,
                groups,
                scorer.parallel,
                Cell(method=method, objective=Objective(kl=0.0)),
                vocabulary=vocabulary,
                batch_tokens=scorer.batch_tokens,
                steps=1,
            )
            for model in models:
                model.zero_grad_buffer()
            dist.barrier()
            begun = time.perf_counter()
            updates.gradients(batch.records, range(len(batch.records)), step=1)  # past any warm-up of 1 step
            taken = time.perf_counter() - begun  # it ends with a sum over all ranks, so none is still at it
            if repetition:
                seconds[method.type].append(taken)
            report(_UPDATE * len(batch.records))
    return seconds


def _machine(scorer: Scorer) -> str:
    """What the seconds were measured on."""
    parallel, dtype = scorer.parallel, str(scorer.torch_dtype).removeprefix("torch.")
    if torch.cuda.is_available():
        device = f"{parallel.ranks} x {torch.cuda.get_device_name()}"
    else:
        device = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    split = f"tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}"
    return f"{device}, {split}, {dtype}, torch {torch.__version__}, megatron-core {version('megatron-core')}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
