"""What version 0.6.0 wrote is read with the same content. ``tests/fixtures/v0_6_0`` was written by its code:

records.records       every kind of edit, every status, token weights, untrained tokens, further keys and fields
rollout_*/            folders of ``memorywalker rollout``: an editor, and an agent behind the tap
train/                the folder of ``memorywalker train``, without checkpoints and weights
tap/                  logs of the sessions of rollout_blackbox; tap.jsonl is what ``tap recover`` made of them
configs/              its configurations; configs.json has what they came to, apart from the defaults
*.jsonl               the records of each, as interchange JSON
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.overrides import load_cell
from slime_plugin.record import KINDS, STATUSES, dump_record, parse_record, read_records
from slime_plugin.record.rollout_report import RolloutReport
from slime_plugin.report.run_data import read_runs
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.runner import open_run, tasks_left
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.settings import changes
from tests.cli import run
from tests.conftest import ROOT

OLD = ROOT / "tests" / "fixtures" / "v0_6_0"
STORES = ("records.records", "rollout_memexrl", "rollout_blackbox", "train")


def lines(name: str) -> list[str]:
    return (OLD / f"{name.removesuffix('.records')}.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", STORES)
def test_stores_and_interchange_json(name: str) -> None:
    records = list(read_records([OLD / name]))
    assert records
    for record, line in zip(records, lines(name), strict=True):
        value = json.loads(line)
        assert record == parse_record(line)
        assert dump_record(record) == line
        assert record.tokens.tolist() == value["tokens"]
        assert record.generated.tolist() == [bool(flag) for flag in value["generated"]]
        logged = [np.nan if logprob is None else logprob for logprob in value["logprobs"]]
        assert np.array_equal(record.logprobs, np.array(logged, dtype=np.float32), equal_nan=True)
        assert [list(map(list, view)) for view in record.views] == value["views"]
        assert [edit.to_json() for edit in record.edits] == value["edits"]
        assert record.meta.to_json() == value["meta"]
        assert record.extra == {key: value[key] for key in value if key == "pieces"}


def test_the_fixture_has_everything_there_is() -> None:
    records = list(read_records([OLD / "records.records"]))
    assert {edit.kind for record in records for edit in record.edits} >= set(KINDS)
    assert {record.meta.status for record in records} == set(STATUSES)
    (record,) = (record for record in records if record.meta.id == "every-kind")
    report = record.meta.report
    assert (report.weights, report.untrained, report.stop) == (((2, 4, 0.5),), {"retry": 4}, "turns")
    assert record.meta.extra["mine"] == {"a": [1, None, "ü"]}


@pytest.mark.parametrize("name", ["rollout_memexrl", "rollout_blackbox", "train"])
def test_what_rollouts_reported(name: str) -> None:
    """The typed report finds what stands in the metadata."""
    for record in read_records([OLD / name]):
        report, extra = record.meta.report, record.meta.extra
        assert (report.stop, report.question, report.seed) == tuple(extra[key] for key in ("stop", "question", "seed"))
        assert report.calls == extra["calls"]
        assert [turn.span for turn in report.turns] == [tuple(turn["span"]) for turn in extra["turns"]]
        assert report.to_json() == extra


def test_configurations_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys may have come; those of 0.6.0 have the values that they had."""
    monkeypatch.chdir(OLD)
    old: dict[str, Any] = json.loads((OLD / "configs.json").read_text(encoding="utf-8"))
    assert len(old["cells"]) > 20
    for name, changed in old["cells"].items():
        cell = json.loads(json.dumps(load_cell(name).to_json()).replace(f"{OLD}/", ""))
        check_holds(cell, updated(old["defaults"], changed), name)


def updated(defaults: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """A cell of 0.6.0: its defaults with what a file changed. A block with a type is replaced, others are merged."""
    merged = dict(defaults)
    for key, value in changed.items():
        block = isinstance(value, dict) and "type" not in value and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if block else value
    return merged


def check_holds(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert key in found, f"{where}.{key}"
            check_holds(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for i, value in enumerate(wanted):
            check_holds(found[i], value, f"{where}.{i}")
    else:
        assert found == wanted, where


def test_a_training_run() -> None:
    folder = RunFolder(OLD / "train")
    settings = json.loads((OLD / "train" / "run.json").read_text(encoding="utf-8"))
    cell = parse_config(settings["cell"], Cell, "run.json")
    check_holds(cell.to_json(), settings["cell"], "run.json")
    metrics = [json.loads(line) for line in (OLD / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert list(folder.read_metrics()) == metrics
    (found,) = read_runs([folder])
    assert [line["reward"] for line in found.iterations] == [line["reward"] for line in metrics if "reward" in line]
    compared = json.loads((OLD / "train" / "comparison.json").read_text(encoding="utf-8"))
    assert found.comparison == compared


def test_a_training_run_goes_on() -> None:
    """Keys that it did not know have their defaults."""
    settings = json.loads((OLD / "train" / "run.json").read_text(encoding="utf-8"))
    assert "max_tool_failures" not in settings["cell"]["rollout"]
    assert "limit" not in settings["cell"]["evaluation"]
    cell = parse_config(settings["cell"], Cell, "run.json")
    assert list(changes(RunFolder(OLD / "train"), cell)) == []
    other = cell.model_copy(update={"std": not cell.std})
    assert list(changes(RunFolder(OLD / "train"), other)) == [f"std = {cell.std}, not {not cell.std}"]


def test_a_report_of_a_training_run(tmp_path: Path) -> None:
    result = run("report", str(OLD / "train"), "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("folder", "config"), [("rollout_memexrl", "small_world/memexrl"), ("rollout_blackbox", "black_box")]
)
def test_a_folder_of_rollouts_goes_on(
    folder: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are taken for the same, and its rollouts for done."""
    monkeypatch.chdir(ROOT)
    shutil.copytree(OLD / folder, tmp_path / "run")
    overrides = ["rollout.samples=1", *(["harness.keep_folders=true"] if config == "black_box" else [])]
    cell = load_cell(OLD / "configs" / f"{config}.yaml", overrides)
    assert cell.rollout.questions is not None
    questions = read_questions(cell.rollout.questions)
    records = list(read_records([tmp_path / "run"]))
    with open_run(tmp_path / "run", cell) as store:
        assert tasks_left(store.path, questions[: len(records)], 1) == []
        (task,) = tasks_left(store.path, questions[: len(records) + 1], 1)
    assert task.question == questions[len(records)]


def test_logs_of_tap_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out, config = tmp_path / "recovered.records", OLD / "configs" / "black_box.yaml"
    result = run("tap", "recover", str(OLD / "tap"), "--config", str(config), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    for record, line in zip(read_records([out]), lines("tap"), strict=True):
        assert record == parse_record(line)


def test_keys_that_rollouts_always_had_are_written_also_if_they_are_empty() -> None:
    """As 0.6.0 did: scripts that read them need not ask whether they are there."""
    assert RolloutReport(calls=0).to_json() == {"calls": 0, "turns": []}
    agent = RolloutReport(calls=0, retokenised={"messages": 0, "tokens": 0}).to_json()
    assert (agent["conversations"], agent["breaks"]) == ([], {})
    assert RolloutReport(sample=3).to_json() == {"sample": 3}
