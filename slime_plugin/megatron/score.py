"""What the trainer believes about the tokens of some records: the forward pass of a method, and nothing else.

The same model, rows, plan and vocabulary-parallel code as in training. With the weights that sampled the records, an
exact method reproduces the logged log-probabilities up to rounding; whatever is left with another method is its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray

from slime_plugin.config.architecture import Architecture
from slime_plugin.config.method import Method, Sdcc
from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import LayoutError, MemoryWalkerError
from slime_plugin.megatron.batch import pack_within, student_items, teacher_items
from slime_plugin.megatron.diagnostics import drift_sums, means
from slime_plugin.megatron.evaluate import evaluate
from slime_plugin.megatron.launch import Report, run_ranks
from slime_plugin.megatron.parallel import is_last_stage, start_groups
from slime_plugin.megatron.teacher import run_teacher
from slime_plugin.megatron.weights import load_model
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory
from slime_plugin.tree.places import PLACES, places_of

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Scorer:
    """How records are scored."""

    model: Path
    """Folder of a Hugging Face checkpoint."""
    methods: tuple[Method, ...]
    parallel: Parallelism
    dtype: str | None = None
    """A key of ``DTYPES``; float32 on a CPU and bfloat16 on a GPU if not given."""
    batch_tokens: int = 8192
    """Per micro-batch."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")]


@dataclass(frozen=True, slots=True)
class RecordScore:
    """One record under one method."""

    tape: IntArray
    """[n] the trained tokens, in the order of the tape."""
    logprobs: NDArray[np.float64]
    """[n] of the trainer."""
    leaf_kl: NDArray[np.float64]
    """[D] KL(teacher || student) at SDCC's diverging leaves; none for other methods."""
    lost: Mapping[str, int]
    """Sampled tokens that are not trained, by cause."""
    tokens: int
    """Computed with gradient in an update."""
    teacher_tokens: int
    """Computed without."""
    off_context: int | None
    """As in :class:`slime_plugin.methods.Layout`."""


def score_records(
    records: Sequence[Record], scorer: Scorer, on_progress: Report = lambda done: None
) -> list[list[RecordScore]]:
    """For each method the scores of all records. Starts the processes it needs, and ends them."""
    check_records(records, scorer)
    everywhere = run_ranks(scorer.parallel.ranks, _score_rank, list(records), scorer, on_progress=on_progress)
    scores = next(scores for scores in everywhere if scores is not None)
    check_scores(records, scores, scorer)
    return scores


def check_records(records: Sequence[Record], scorer: Scorer) -> None:
    """Refuse, before any process is started, a model that cannot be split so or has not sampled these records."""
    architecture = Architecture.read(scorer.model)
    architecture.check_split(scorer.parallel)
    for record in records:
        at = int(record.tokens.argmax())
        if record.tokens[at] >= architecture.vocabulary:
            raise LayoutError(
                f"{record.label}: token {at} has id {int(record.tokens[at])}, the vocabulary of {scorer.model} has "
                f"{architecture.vocabulary}; score it with the model that sampled it"
            )


def check_scores(records: Sequence[Record], scores: Sequence[Sequence[RecordScore]], scorer: Scorer) -> None:
    """Refuse weights that give no numbers."""
    for by_method in scores:
        for record, score in zip(records, by_method, strict=True):
            wrong = score.tape[~np.isfinite(score.logprobs)]
            if wrong.size:
                raise MemoryWalkerError(
                    f"{record.label}: the model gives token {int(wrong[0])} no finite log-probability; are the weights "
                    f"in {scorer.model} sound, and is {scorer.torch_dtype} wide enough for them?"
                )


def _score_rank(report: Report, records: list[Record], scorer: Scorer) -> list[list[RecordScore]] | None:
    """On the last stage the scores, elsewhere None."""
    groups = start_groups(scorer.parallel)
    model = load_model(scorer.model, groups, scorer.parallel, scorer.torch_dtype)
    scores = score_on_rank(report, records, scorer, [model], groups)
    return scores if is_last_stage(groups) else None


def score_on_rank(
    report: Report,
    records: Sequence[Record],
    scorer: Scorer,
    models: Sequence[torch.nn.Module],
    groups: ProcessGroupCollection,
) -> list[list[RecordScore]]:
    """For each method the scores of all records, on the last stage. ``models`` hold the weights of ``scorer.model``."""
    vocabulary = Architecture.read(scorer.model).vocabulary
    scores: list[list[RecordScore]] = [[] for _ in scorer.methods]
    for some in _portions(records, 4 * scorer.batch_tokens * scorer.parallel.pp):
        trajectories = [Trajectory.of(record) for record in some]
        for of_method, method in zip(scores, scorer.methods, strict=True):
            of_method.extend(_score(trajectories, method, models, vocabulary, scorer, groups))
        report(len(some))
    return scores


def _portions(records: Sequence[Record], tokens: int) -> Iterator[list[Record]]:
    """Records in turn, as many at a time as fill some micro-batches."""
    portion: list[Record] = []
    for record in records:
        portion.append(record)
        if sum(map(len, portion)) >= tokens:
            yield portion
            portion = []
    if portion:
        yield portion


def _score(
    trajectories: list[Trajectory],
    method: Method,
    models: Sequence[torch.nn.Module],
    vocabulary: int,
    scorer: Scorer,
    groups: ProcessGroupCollection,
) -> Iterator[RecordScore]:
    """One for each record on the last stage, nothing on the others."""
    layouts = [lay_out(trajectory, method) for trajectory in trajectories]
    budget, multiple = scorer.batch_tokens, scorer.parallel.multiple
    batches = pack_within(student_items(layouts), budget, multiple)
    teacher = run_teacher(models, teacher_items(layouts), groups, budget=budget, multiple=multiple)
    top_k = method.top_k if isinstance(method, Sdcc) else None
    results = evaluate(models, batches, groups, vocabulary, teacher, top_k) if batches else []
    if not is_last_stage(groups):
        return
    logprobs = np.concatenate([np.zeros(0), *(result.logprobs.double().cpu().numpy() for result in results)])
    leaf_kl = np.concatenate([np.zeros(0), *(result.leaf_kl.double().cpu().numpy() for result in results)])
    whose = np.concatenate([np.zeros(0, dtype=np.int32), *(batch.rollout for batch in batches)])
    whose_leaf = np.concatenate([np.zeros(0, dtype=np.int32), *(batch.rollout[batch.leaves] for batch in batches)])
    tape = np.concatenate([np.zeros(0, dtype=np.int32), *(batch.tape for batch in batches)])
    for rollout, layout in enumerate(layouts):
        mine = np.flatnonzero(whose == rollout)
        mine = mine[np.argsort(tape[mine])]
        yield RecordScore(
            tape[mine],
            logprobs[mine],
            leaf_kl[whose_leaf == rollout],
            layout.lost,
            layout.tokens,
            layout.teacher_tokens,
            layout.off_context,
        )


def summarise_scores(records: Sequence[Record], scores: Sequence[RecordScore]) -> dict[str, Any]:
    """How far the trainer is from the rollout: over all tokens, by the last edit, by junction, and at the leaves."""
    gaps, places, junctions = [], [], []
    lost: Counter[str] = Counter()
    for record, score in zip(records, scores, strict=True):
        trajectory = Trajectory.of(record)
        gaps.append(score.logprobs - record.logprobs[score.tape])
        places.append(places_of(trajectory)[score.tape])
        junctions.append(trajectory.born[score.tape])
        lost.update(score.lost)
    gap, place, junction = (np.concatenate(parts) for parts in (gaps, places, junctions))
    distance = np.abs(gap)
    sums = drift_sums(torch.from_numpy(gap), torch.zeros(len(gap)), torch.from_numpy(place))
    average = means({key: float(value) for key, value in sums.items()})
    leaf_kl = np.concatenate([score.leaf_kl for score in scores])
    return {
        "records": len(records),
        "sampled": sum(record.sampled for record in records),
        "tokens": len(gap),
        "lost": dict(lost),
        "logdiff": _over(distance),
        **{key: average[key] for key in ("signed_logdiff", "k3", "multiplicative_error")},
        "places": {
            name: {"tokens": int((place == i).sum()), **_over(distance[place == i])}
            for i, name in enumerate(PLACES)
            if (place == i).any()
        },
        "junctions": [
            {"junction": k, "tokens": int((junction == k).sum()), **_over(distance[junction == k])}
            for k in np.unique(junction).tolist()
        ],
        "leaves": {
            "number": len(leaf_kl),
            **{f"kl_{key}": value for key, value in _over(leaf_kl).items()},
            "pinsker": _over(np.sqrt(np.maximum(leaf_kl, 0) / 2))["mean"],
        },
    }


def _over(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Mean and maximum; None of nothing."""
    return {"mean": float(values.mean()), "max": float(values.max())} if values.size else {"mean": None, "max": None}
