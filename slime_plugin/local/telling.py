"""Lines of metrics from what the actors report: sums become means only here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_plugin.megatron.diagnostics import DRIFT_KEYS, means
from slime_plugin.megatron.loss import ROLLOUT_KEYS
from slime_plugin.tree.places import PLACES

_STEP_MEANS = (
    *("logdiff", "signed_logdiff", "k3", "multiplicative_error"),
    *("leaves", "leaf_kl", "pinsker", "student_entropy", "teacher_entropy", "entropy_gap"),
)
_PHASES = ("generate", "convert", "put", "transfer", "reference", "old", "train", "export", "update", "save")


def step_lines(iteration: int, steps: int, results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each update."""
    for number, result in enumerate(results):
        sums, average = result["sums"], means(result["sums"])
        yield {
            "kind": "step",
            "iteration": iteration,
            "step": iteration * steps + number,
            "time": time.time(),
            # Already means over the tokens of each rollout; over the rollouts of the step they become so here.
            **{key: sums[key] / result["rollouts"] for key in ROLLOUT_KEYS},
            **{key: result[key] for key in ("grad_norm", "lr", "sdcc_weight", "sdcc_off")},
            **{key: average[key] for key in _STEP_MEANS},
        }


def iteration_line(
    iteration: int, told: Mapping[str, Any], drifts: Sequence[Mapping[str, float]], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """What its rollouts were like, how far the trainer was from them before it changed, and what took how long."""
    sums: Counter[str] = Counter()
    for drift in drifts:
        sums.update({key: drift[key] for key in DRIFT_KEYS})
    average = means({key: float(sums[key]) for key in DRIFT_KEYS})
    phases = {name: seconds.get(name, 0.0) for name in _PHASES}
    trained_on = phases["reference"] + phases["old"] + phases["train"]
    return {
        "kind": "iteration",
        "iteration": iteration,
        "time": time.time(),
        "version": iteration,
        **told,
        "logdiff": {
            "mean": average["logdiff"],
            "max": max(drift["max"] for drift in drifts) if sums["tokens"] else None,
        },
        "k3": average["k3"],
        "places": {
            place: {"tokens": int(sums[f"{place}/tokens"]), "logdiff": average[f"{place}/logdiff"]}
            for place in PLACES
            if sums[f"{place}/tokens"]
        },
        "seconds": {**phases, "other": seconds["total"] - sum(phases.values()), "total": seconds["total"]},
        "rollout_tokens_per_second": told["sampled"] / phases["generate"] if phases["generate"] else None,
        "train_tokens_per_second": told["tokens"] / trained_on if trained_on else None,
    }
