"""A whole run whose harness is a process of its own: trained on what the tap recovered."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from slime_plugin.record import read_records
from tests.local.runs import ROLLOUTS, Runs

SETTINGS = (
    "harness={type: 'examples.black_box.driver:FoldingAgentDriver', corpus: examples/small_world/data/corpus.jsonl}",
    "tools=[]",
    "trainer.iterations=2",
)


@pytest.mark.slow  # exact conditioning is shown by tests/rollout/test_tap_command.py
def test_a_run_through_a_black_box(real_runs: Runs) -> None:
    """Killed in its first iteration, agents and all, and resumed."""
    killed = real_runs.start("run", *SETTINGS)
    killed.until_there("rollout-00000.records")
    killed.signal(signal.SIGINT)
    assert killed.end() == 130
    run = real_runs.start("run", *SETTINGS, "--resume")
    run.finish()
    lines = [line for line in run.folder.read_metrics() if line["kind"] == "iteration"]
    assert [line["iteration"] for line in lines] == [0, 1]
    for line in lines:
        assert line["logdiff"]["mean"] < 2e-6
        assert line["trained"] + sum(line["lost"].values()) == line["sampled"] > 0
        assert line["off_context"] == 0
    records = [record for i in (0, 1) for record in read_records([run.folder.rollouts(i)])]
    whole = [record for record in records if record.meta.status in ("completed", "truncated")]
    assert len(whole) >= 2 * ROLLOUTS
    assert set(Counter(edit.extra["cause"] for record in records for edit in record.edits)) <= {"compaction"}
