"""What the trainer believes about the tokens of some records: the forward pass of a method, and nothing else.

The same model, rows, plan and vocabulary-parallel code as in training. With the weights that sampled the records, an
exact method reproduces the logged log-probabilities up to rounding; whatever is left with another method is its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray

from slime_plugin.config.method import Method
from slime_plugin.errors import ConfigError, LayoutError
from slime_plugin.megatron.architecture import Architecture
from slime_plugin.megatron.batch import pack_within, student_items, teacher_items
from slime_plugin.megatron.diagnostics import PLACES, drift_sums, means, places_of
from slime_plugin.megatron.evaluate import evaluate
from slime_plugin.megatron.launch import Report, run_ranks
from slime_plugin.megatron.model import TreeGPTModel, build_model
from slime_plugin.megatron.parallel import Parallelism, is_first_stage, is_last_stage, start
from slime_plugin.megatron.teacher import run_teacher
from slime_plugin.megatron.weights import load_weights
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.record.arrays import IntArray
from slime_plugin.tree import Trajectory

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Scorer:
    """How records are scored."""

    model: Path
    """Folder of a Hugging Face checkpoint."""
    methods: tuple[Method, ...]
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    budget: int = 8192
    """Tokens per micro-batch."""


@dataclass(frozen=True, slots=True)
class RecordScore:
    """One record under one method, token by token in the order of the tape."""

    method: Method
    tape: IntArray
    """[n] the trained tokens."""
    logprobs: NDArray[np.float64]
    """[n] of the trainer."""
    leaf_tape: IntArray
    """[D] SDCC's diverging leaves; none for other methods."""
    leaf_kl: NDArray[np.float64]
    """[D] KL(teacher || student)."""


def score_records(
    records: Sequence[Record], scorer: Scorer, on_progress: Report = lambda done: None
) -> list[list[RecordScore]]:
    """One score per method, for each record. Starts the processes it needs, and ends them."""
    architecture = Architecture.read(scorer.model)
    if scorer.dtype not in DTYPES:
        raise ConfigError(f"no dtype {scorer.dtype!r:.40}; use one of {', '.join(DTYPES)}")
    for record in records:
        largest = int(record.tokens.max())
        if largest >= architecture.vocabulary:
            at = int(record.tokens.argmax())
            raise LayoutError(
                f"{record.label}: token {at} has id {largest}, the vocabulary of {scorer.model} has "
                f"{architecture.vocabulary}; score it with the model that sampled it"
            )
    everywhere = run_ranks(scorer.parallel.ranks, _score_rank, list(records), scorer, on_progress=on_progress)
    return next(scores for scores in everywhere if scores is not None)


def _score_rank(report: Report, records: list[Record], scorer: Scorer) -> list[list[RecordScore]] | None:
    """On the last stage the scores, elsewhere None."""
    groups = start(scorer.parallel)
    architecture = Architecture.read(scorer.model)
    model = load_model(architecture, scorer, groups)
    scores: list[list[RecordScore]] = []
    for record in records:
        each = [_score(record, method, model, architecture, scorer, groups) for method in scorer.methods]
        scores.append([score for score in each if score is not None])
        report(1)
    return scores if is_last_stage(groups) else None


def load_model(architecture: Architecture, scorer: Scorer, groups: ProcessGroupCollection) -> TreeGPTModel:
    model = build_model(
        architecture.to_megatron(scorer.parallel, DTYPES[scorer.dtype]),
        groups,
        vocabulary=architecture.padded_vocabulary(scorer.parallel.tp),
        rotary_base=architecture.rotary_base,
        max_positions=architecture.max_positions,
        tied=architecture.tied,
        pre_process=is_first_stage(groups),
        post_process=is_last_stage(groups),
    )
    load_weights([model], architecture, scorer.model, groups)
    return model


def _score(
    record: Record,
    method: Method,
    model: TreeGPTModel,
    architecture: Architecture,
    scorer: Scorer,
    groups: ProcessGroupCollection,
) -> RecordScore | None:
    """None on all stages but the last."""
    layout = lay_out(record, method)
    multiple = scorer.parallel.multiple
    batches = pack_within(student_items([layout]), scorer.budget, multiple)
    teacher = run_teacher([model], teacher_items([layout]), groups, budget=scorer.budget, multiple=multiple)
    results = evaluate([model], batches, groups, architecture.vocabulary, teacher) if batches else []
    if not is_last_stage(groups):
        return None
    nothing = np.zeros(0, dtype=np.int32)
    tape = np.concatenate([nothing, *(batch.tape for batch in batches)])
    leaf_tape = np.concatenate([nothing, *(batch.tape[batch.leaves] for batch in batches)])
    logprobs = np.concatenate([np.zeros(0), *(result.logprobs.double().cpu().numpy() for result in results)])
    leaf_kl = np.concatenate([np.zeros(0), *(result.leaf_kl.double().cpu().numpy() for result in results)])
    order = np.argsort(tape)
    return RecordScore(method, tape[order], logprobs[order], leaf_tape, leaf_kl)


def summarise_scores(records: Sequence[Record], scores: Sequence[RecordScore]) -> dict[str, Any]:
    """How far the trainer is from the rollout: over all tokens, by the last edit, by junction, and at the leaves."""
    gaps, places, junctions = [], [], []
    lost: Counter[str] = Counter()
    for record, score in zip(records, scores, strict=True):
        trajectory = Trajectory.of(record)
        gaps.append(score.logprobs - record.logprobs[score.tape])
        places.append(places_of(trajectory)[score.tape])
        junctions.append(trajectory.born[score.tape])
        lost.update(lay_out(trajectory, score.method).lost)
    gap, place, junction = (np.concatenate(parts) for parts in (gaps, places, junctions))
    sums = drift_sums(torch.from_numpy(gap), torch.zeros(len(gap)), torch.from_numpy(place))
    average = means({key: float(value) for key, value in sums.items()})
    leaf_kl = np.concatenate([score.leaf_kl for score in scores])
    return {
        "records": len(records),
        "sampled": sum(int(record.generated.sum()) for record in records),
        "tokens": len(gap),
        "lost": dict(lost),
        "logdiff": {"mean": average["logdiff"], "max": float(np.abs(gap).max()) if gap.size else None},
        "signed_logdiff": average["signed_logdiff"],
        "k3": average["k3"],
        "multiplicative_error": average["multiplicative_error"],
        "places": {
            name: {"tokens": int(average[f"{name}/tokens"] or 0), "logdiff": average[f"{name}/logdiff"]}
            for name in PLACES
            if average[f"{name}/tokens"]
        },
        "junctions": [
            {"junction": k, "tokens": int((junction == k).sum()), "logdiff": float(np.abs(gap[junction == k]).mean())}
            for k in np.unique(junction).tolist()
        ],
        "leaves": {
            "number": len(leaf_kl),
            "kl": float(leaf_kl.mean()),
            "kl_max": float(leaf_kl.max()),
            "pinsker": float(np.sqrt(np.maximum(leaf_kl, 0) / 2).mean()),
        }
        if leaf_kl.size
        else None,
    }
