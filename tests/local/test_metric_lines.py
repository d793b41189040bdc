"""Lines of metrics: sums of ranks become means, and what is undefined is None."""

from __future__ import annotations

import pytest

from slime_plugin.local.actors import StepResult
from slime_plugin.local.metric_lines import iteration_line, step_lines
from slime_plugin.train.logdiff import LOGDIFF_KEYS
from slime_plugin.train.loss import SUM_KEYS

TOLD = {"rollouts": 4, "reward": 0.5, "sampled": 30, "tokens": 90}
SECONDS = {"generate": 3.0, "convert": 0.1, "reference": 0.5, "old": 0.5, "train": 2.0, "total": 7.0}


def test_a_step_is_a_mean_over_rollouts_and_a_mean_over_tokens() -> None:
    sums = dict.fromkeys(SUM_KEYS, 0.0) | {"loss": 2.0, "entropy": 6.0, "tokens": 50.0, "logdiff": 5.0, "k3": 10.0}
    result = StepResult(sums, rollouts=4, grad_norm=1.5, lr=1e-3, sdcc_weight=0.0, sdcc_off=None)
    first, second = step_lines(3, 2, [result, result])
    assert (first["kind"], first["iteration"], first["step"], second["step"]) == ("step", 3, 6, 7)
    assert (first["loss"], first["entropy"], first["grad_norm"], first["lr"]) == (0.5, 1.5, 1.5, 1e-3)
    assert (first["logdiff"], first["k3"]) == (0.1, 0.2)
    assert (first["leaves"], first["leaf_kl"]) == (0.0, None), "absent is not zero"


def test_replicas_add_up_in_an_iteration() -> None:
    logdiff = dict.fromkeys(LOGDIFF_KEYS, 0.0)
    one = logdiff | {"tokens": 10.0, "logdiff": 1.0, "start/tokens": 6.0, "start/logdiff": 0.6, "max": 0.5}
    other = logdiff | {"tokens": 30.0, "logdiff": 7.0, "start/tokens": 2.0, "start/logdiff": 1.0, "max": 2.5}
    other |= {"fold/near/tokens": 5.0, "fold/near/logdiff": 1.5}
    line = iteration_line(3, TOLD, [one, other], SECONDS)
    assert (line["kind"], line["version"], line["reward"]) == ("iteration", 3, 0.5)
    assert line["logdiff"] == {"mean": 0.2, "max": 2.5}
    assert line["places"] == {
        "start": {"tokens": 8, "logdiff": pytest.approx(0.2)},
        "fold/near": {"tokens": 5, "logdiff": pytest.approx(0.3)},
    }
    assert line["seconds"]["other"] == pytest.approx(7.0 - 6.1)
    assert (line["rollout_tokens_per_second"], line["train_tokens_per_second"]) == (10.0, 30.0)


def test_an_iteration_without_trained_tokens_has_no_logdiff() -> None:
    line = iteration_line(0, TOLD, [dict.fromkeys(LOGDIFF_KEYS, 0.0) | {"max": 0.0}], SECONDS)
    assert line["logdiff"] == {"mean": None, "max": None}
    assert line["places"] == {}
