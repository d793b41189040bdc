"""Lines of ``metrics.jsonl`` from the results of the actors. Sums become means only here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_plugin.local.actors import StepResult
from slime_plugin.run.metrics import ITERATION_PHASES
from slime_plugin.train.logdiff import LEAF_KEYS, LOGDIFF_KEYS, means
from slime_plugin.train.loss import ROLLOUT_KEYS
from slime_plugin.tree.places import PLACES

_STEP_MEANS = ("logdiff", "signed_logdiff", "k3", "multiplicative_error", *LEAF_KEYS)


def step_lines(iteration: int, steps: int, results: Sequence[StepResult]) -> Iterator[dict[str, Any]]:
    """Yield a line per update step."""
    for number, result in enumerate(results):
        sums, average = result.sums, means(result.sums)
        yield {
            "kind": "step",
            "iteration": iteration,
            "step": iteration * steps + number,
            "time": time.time(),
            # Sums over rollouts of means over their tokens: every rollout of the step counts, trained or not.
            **{key: sums[key] / result.rollouts for key in ROLLOUT_KEYS},
            **{key: getattr(result, key) for key in ("grad_norm", "lr", "sdcc_weight", "sdcc_off")},
            **{key: average[key] for key in _STEP_MEANS},
        }


def iteration_line(
    iteration: int, batch: Mapping[str, Any], logdiffs: Sequence[Mapping[str, float]], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return metrics of the batch, the logdiff before the first update, and seconds by phase."""
    sums: Counter[str] = Counter()
    for logdiff in logdiffs:
        sums.update({key: logdiff[key] for key in LOGDIFF_KEYS})
    average = means({key: float(sums[key]) for key in LOGDIFF_KEYS})
    phases = {name: seconds.get(name, 0.0) for name in ITERATION_PHASES}
    trained_on = phases["reference"] + phases["old"] + phases["train"]
    return {
        "kind": "iteration",
        "iteration": iteration,
        "time": time.time(),
        "version": iteration,
        **batch,
        "logdiff": {
            "mean": average["logdiff"],
            "max": max(logdiff["max"] for logdiff in logdiffs) if sums["tokens"] else None,
        },
        "k3": average["k3"],
        "places": {
            place: {"tokens": int(sums[f"{place}/tokens"]), "logdiff": average[f"{place}/logdiff"]}
            for place in PLACES
            if sums[f"{place}/tokens"]
        },
        "seconds": {**phases, "other": seconds["total"] - sum(phases.values()), "total": seconds["total"]},
        "rollout_tokens_per_second": batch["sampled"] / phases["generate"] if phases["generate"] else None,
        "train_tokens_per_second": batch["tokens"] / trained_on if trained_on else None,
    }
