"""However the trainer is split over ranks, a run is the same: loss, gradient norm and logdiff of its first update."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.runs import Runs

SPLITS = {"tp": "trainer.tp=2", "pp": "trainer.pp=2"}  # three layers: two and one


@pytest.mark.slow  # what single ranks compute on these splits is proved in test_updates.py
def test_runs_on_two_ranks_begin_as_on_one(runs: Runs) -> None:
    alone = _first_step(runs, "one", "trainer.tp=1")
    assert alone["grad_norm"] > 0
    for name, setting in SPLITS.items():
        step = _first_step(runs, name, setting)
        for key in ("loss", "grad_norm", "logdiff", "entropy", "reference_kl"):
            assert step[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-7), (name, key)


def _first_step(runs: Runs, name: str, setting: str) -> dict[str, Any]:
    run = runs.start(name, setting, "trainer.iterations=1", "trainer.steps=1", "objective.kl=0.1")
    run.finish()
    step, iteration = run.folder.read_metrics()
    assert (step["kind"], iteration["kind"]) == ("step", "iteration")
    return step
