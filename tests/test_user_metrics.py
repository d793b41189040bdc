"""A metric of a user's own: one function and one line of configuration take it to every place that shows metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.tracking import Tracking
from slime_plugin.errors import ConfigError
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.metrics import Metrics, flat_metrics, user_metrics
from slime_plugin.slime.batch import Batch
from tests.local.test_train_data import batch, samples_of
from tests.test_sinks import scalars

MODULE = """
import numpy as np

def sizes(records):
    return {"tape_tokens": np.float32(len(records[0])), "longest": max(map(len, records)), "unknown": None}

def again(records):
    return {"longest": 1}

def number(records):
    return 3

def text(records):
    return {"longest": "many"}

constant = 5
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_metrics_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def path_of(function: str) -> str:
    return f"my_metrics_of_a_test:{function}"


def test_it_reaches_the_file_tensorboard_and_slime(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    samples, tracking = samples_of(batch((1.0, 0.0))), Tracking(metrics=(path_of("sizes"),))
    found = Batch.of(samples, Cell(tracking=tracking)).metrics()
    records = [rollout.record for rollout in Batch.of(samples, Cell()).rollouts]
    first, longest = float(len(records[0])), float(max(map(len, records)))
    assert found["user"] == {"tape_tokens": first, "longest": longest, "unknown": None}
    assert dict(flat_metrics(found, ""))["user/longest"] == longest

    folder = RunFolder(tmp_path / "run")
    with Metrics(folder, tracking, {}) as metrics:
        metrics.write({"kind": "iteration", "iteration": 0, **found})
    (line,) = folder.read_metrics()
    assert line["user"] == found["user"]
    shown = {tag: value for tag, *_, value in scalars(folder.tensorboard / "iterations") if tag.startswith("user/")}
    assert shown == {"user/tape_tokens": first, "user/longest": longest}
    assert json.loads(folder.metrics.read_text())["user"]["unknown"] is None


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (["number"], "number returned 3, not numbers by name; return a dict such as"),
        (["text"], "text returned 'many' for 'longest'; names must be strings, and values numbers"),
        (["sizes", "again"], "'longest' is returned by .*again and by one before it; rename one"),
        (["constant"], "constant is 5, not a function of the records"),
        (["nothing"], "has no 'nothing'"),
    ],
)
def test_what_is_wrong_with_it_is_one_clear_line(functions: list[str], message: str) -> None:
    records = [rollout.record for rollout in Batch.of(samples_of(batch((1.0, 0.0))), Cell()).rollouts]
    with pytest.raises(ConfigError, match=f"^tracking.metrics: .*{message}"):
        user_metrics([path_of(name) for name in functions], records)


def test_a_function_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        Metrics(folder, Tracking(metrics=(path_of("nothing"),)), {})
    assert not folder.metrics.exists()
