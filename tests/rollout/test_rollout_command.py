"""``memorywalker rollout`` on a real server: interrupted, killed, and called again."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from slime_plugin.record import read_records
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.server import Server
from tests.cli import INTERRUPTIBLE, run
from tests.conftest import ROOT

CELL = "configs/small_world/agentfold.yaml"


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def begun(server: Server, out: Path) -> subprocess.Popen[str]:
    """A run that would take long, at the moment its first rollouts are written."""
    options = ["--out", str(out), "--engine", server.url, "--questions", "200", "--samples", "16"]
    process = subprocess.Popen([*INTERRUPTIBLE, "rollout", CELL, *options], stderr=subprocess.PIPE, text=True)
    store = out / "rollout-0.records"
    for _ in range(2400):
        assert process.poll() is None, process.communicate()[1]
        if store.exists() and store.stat().st_size > 1000:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no rollout within two minutes: {process.communicate()[1]}")


def finished(server: Server, out: Path, questions: int) -> Counter[str]:
    """How often each of the first questions was completed or truncated, after the command was called again."""
    result = run(
        "rollout", CELL, "--out", str(out), "--engine", server.url, "--questions", str(questions), "--samples", "16"
    )
    assert result.exit_code == 0, result.stderr
    assert run("record", "check", str(out)).exit_code == 0
    done = [record for record in read_records([out]) if record.meta.status in ("completed", "truncated")]
    assert len({str(record.meta.id).partition("~")[0] for record in done}) == len(done)  # none of them twice
    asked = [question.id for question in read_questions(ROOT / "examples/small_world/data/questions.jsonl")]
    return Counter(str(record.meta.group) for record in done if record.meta.group in asked[:questions])


def test_settings_on_the_command_line_replace_those_of_the_file(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["harness=tc_rag", "rollout.system=pop", "rollout.samples=2", f"engine.url={server.url}"]
    result = run("rollout", CELL, *settings, "--out", str(out), "--questions", "2")
    assert result.exit_code == 0, result.stderr
    records = list(read_records([out]))
    assert [record.meta.harness for record in records] == ["tc_rag"] * 4
    kept = json.loads((out / "run.json").read_text())["settings"]
    assert (kept["harness.type"], kept["rollout.system"], "harness.threshold" in kept) == ("tc_rag", "pop", False)


def test_a_wrong_setting_is_told_before_anything_is_begun(tmp_path: Path) -> None:
    result = run("rollout", CELL, "harness.treshold=9", "--out", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert result.stderr == "Error: command line: harness.treshold: unknown key; use 'threshold'\n"
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_is_written_down_and_goes_on(server: Server, tmp_path: Path) -> None:
    process = begun(server, tmp_path / "run")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the command again to resume" in errors
    records = list(read_records([tmp_path / "run"]))
    assert 0 < len(records) < 3200
    assert "aborted" in {record.meta.status for record in records}
    assert set(finished(server, tmp_path / "run", 8).values()) == {16}


def test_a_second_interrupt_ends_at_once(server: Server, tmp_path: Path) -> None:
    process = begun(server, tmp_path / "run")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert run("record", "check", str(tmp_path / "run")).exit_code == 0


def test_a_killed_run_goes_on(server: Server, tmp_path: Path) -> None:
    process = begun(server, tmp_path / "run")
    process.kill()
    process.communicate(timeout=60)
    assert set(finished(server, tmp_path / "run", 8).values()) == {16}
