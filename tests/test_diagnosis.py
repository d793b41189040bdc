"""``memorywalker doctor RUN``: prepared runs that went wrong are recognised, and sound ones raise no alarm."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.diagnosis import Diagnosis, diagnose
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import locked
from tests.conftest import ROOT
from tests.prepared_runs import (
    BROKEN,
    SOUND,
    logdiff_after_folds,
    no_edits,
    sound_job,
    trainer_memory,
    truncated,
)
from tests.run_parts import CUDA_MEMORY, NAN, job, local_run, printed_step, rollout, rollouts, start


@pytest.mark.parametrize("name", BROKEN)
def test_broken_runs_are_recognised(name: str, tmp_path: Path) -> None:
    prepare, symptom, remedy = BROKEN[name]
    found = diagnose(prepare(tmp_path / "run"))
    assert not found.ok
    first = found.symptoms[0]
    assert first.name == symptom, [(each.name, each.seen) for each in found.symptoms]
    assert remedy in first.remedy
    assert first.cause


@pytest.mark.parametrize("name", SOUND)
def test_sound_runs_raise_no_alarm(name: str, tmp_path: Path) -> None:
    found = diagnose(SOUND[name](tmp_path / "run"))
    assert found.ok, [(each.name, each.seen) for each in found.symptoms]


def by_name(found: Diagnosis) -> dict[str, str]:
    return {symptom.name: symptom.seen for symptom in found.symptoms}


def test_a_running_run_has_not_ended(tmp_path: Path) -> None:
    run = local_run(tmp_path / "run", done=1, planned=9)
    with locked(run):
        found = diagnose(run)
    assert found.ok
    assert by_name(found) == {"running": "the run is going: 1 of 9 iterations are trained"}
    assert [symptom.name for symptom in diagnose(run).symptoms] == ["ended early"]


def test_numbers_and_places(tmp_path: Path) -> None:
    found = diagnose(no_edits(tmp_path / "edits"))
    assert "harness.threshold is 3000 tokens, and the longest context has 36" in found.symptoms[0].cause
    found = diagnose(truncated(tmp_path / "truncated"))
    assert found.symptoms[0].seen == "32 of 32 rollouts are truncated, 32 of them by turns: rollout.turns is 12"
    found = diagnose(logdiff_after_folds(tmp_path / "logdiff"))
    assert "mean |logdiff| is 0.391 nats" in found.symptoms[0].seen
    assert "fold/near 0.82, fold/far 0.721, start 0.0109" in found.symptoms[0].seen
    found = diagnose(trainer_memory(tmp_path / "memory"))
    name, _, line = found.symptoms[0].where.partition(":")
    text = (found.run.folder.path / name).read_text().splitlines()[int(line) - 1]
    assert text == CUDA_MEMORY
    assert [symptom.name for symptom in found.symptoms] == ["GPU memory", "rank gone", "process gone", "ended early"]


def test_the_health_of_a_job_is_that_of_a_local_run(tmp_path: Path) -> None:
    of_job = diagnose(sound_job(tmp_path / "job")).health
    of_run = diagnose(local_run(tmp_path / "run")).health
    first, other = of_job["iterations"][0], of_run["iterations"][0]
    assert list(first) == list(other)
    assert len(of_job["iterations"]) == len(of_run["iterations"]) == 3
    assert (first["ratio"], first["reference_kl"], first["grad_norm"]) == (1.0001, 0.0, 0.31)
    assert first["logdiff"]["mean"] == pytest.approx(22.5 / 2048)
    assert first["places"]["fold/far"] == {"tokens": 512.0, "logdiff": pytest.approx(5.6 / 512)}
    assert (first["reward"], first["edits"], first["tool_failures"]) == (0.5, {"fold": 16.0}, 0.0)
    assert first["rollout_tokens_per_second"] == pytest.approx(32768 / 61.5)
    assert (first["train_tokens_per_second"], first["seconds"]) == (1085.0, 101.6)
    assert of_job["memory"]["gpu_used_bytes"] == int(59.11 * 2**30)
    assert other["logdiff"]["mean"] == 4e-7


def test_the_error_that_a_run_ended_with(tmp_path: Path) -> None:
    """It is shown whatever else was logged; one of ours says what to do, any other is a bug."""
    run = local_run(tmp_path / "run", done=1, logs={"rollout.log": "OSError: [Errno 24] Too many open files\n"})
    error = "LayoutError: record 3: 12 tokens in a row of 8; raise method.budget"
    start(run, end={"how": "failed", "error": error, "is_bug": False})
    first, second, *_ = diagnose(run).symptoms
    assert (first.seen, second.name) == (error, "open files")
    assert first.remedy.startswith("do what the line says; memorywalker train CONFIG")
    start(run, 1, end={"how": "failed", "error": "KeyError: 'parents'\nmore", "is_bug": True})
    first, *_ = diagnose(run).symptoms
    assert (first.seen, "--bundle" in first.remedy) == ("KeyError: 'parents'", True)


def test_rollouts_without_training(tmp_path: Path) -> None:
    """What ``memorywalker rollout`` leaves has no metrics and no planned end."""
    shutil.copytree(ROOT / "tests/fixtures/v0_6_0/rollout_memexrl", tmp_path / "run")
    found = diagnose(tmp_path / "run")
    assert found.ok, by_name(found)
    assert found.run.stores[0].rollouts


def test_secrets_in_logs_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "correct horse battery")
    line = f"{'x' * 215} correct horse battery: ModuleNotFoundError: No module named 'a'\n"
    found = diagnose(job(tmp_path / "run", done=0, log=f"{line}api_key=zyx987wvu OSError: Too many open files\n"))
    shown = " ".join(by_name(found).values())
    assert "$OUR_API_KEY" in shown
    assert "api_key=[redacted]" in shown
    assert "correct" not in shown, "also where the line is cut"


def test_a_repeated_iteration_counts_once(tmp_path: Path) -> None:
    """A job that resumed has printed it twice; the second one was trained."""
    printed = printed_step(0) + printed_step(1, grad_norm=NAN) + printed_step(1) + printed_step(2)
    found = diagnose(job(tmp_path / "run", printed=printed))
    assert found.ok
    assert [line["step"] for line in found.run.steps] == [0, 1, 2]


def test_retried_rollouts_count_once(tmp_path: Path) -> None:
    """Those that failed with the engine are sampled again when the run is resumed, into the same store."""
    failed = rollouts(0, status="failed", stop="engine", reward=None, error="the engine has gone")
    again = [
        rollout(f"{record.meta.id}~1", group=str(record.meta.group), reward=i % 2) for i, record in enumerate(failed)
    ]
    assert diagnose(local_run(tmp_path / "run", done=1, planned=1, records={0: [*failed, *again]})).ok


def _half_metrics(run: Path) -> None:
    text = RunFolder(run).metrics.read_text()
    RunFolder(run).metrics.write_text(text[:200] + '\n[1]\n{"kind": "step"}\n' + text + '{"kind": "st')


def _half_settings(run: Path) -> None:
    (run / "run.json").write_text((run / "run.json").read_text()[:300])


def _half_store(run: Path) -> None:
    path = run / "rollout-00002.records"
    path.write_bytes(path.read_bytes()[:-40])


def _bytes_everywhere(run: Path) -> None:
    noise = bytes(range(256)) * 64
    for name in (
        "logs/engine.log",
        "rollout-00001.records",
        "metrics.jsonl",
        "evidence/start-00000.json",
        "sdcc.jsonl",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(noise)


def _folders_for_files(run: Path) -> None:
    for name in ("logs/rank-1.log", "evidence/start-00000.json", "rollout-00009.records", "checkpoints/00009"):
        (run / name).mkdir(parents=True)


@pytest.mark.parametrize("damage", [_half_metrics, _half_settings, _half_store, _bytes_everywhere, _folders_for_files])
def test_damaged_files_are_symptoms(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run = local_run(tmp_path / "run")
    damage(run)
    found = diagnose(run)
    assert by_name(found).keys() & {"unreadable file", "damaged records", "checkpoint cut off"}


STRANGE: tuple[Any, ...] = (None, True, -1, 1e308, float("nan"), "x", [], {}, [1], {"a": 1}, 10**30)


def strange(value: Any, rng: random.Random) -> Any:
    """A JSON value with something else somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: strange(value[key], rng)}
    return rng.choice(STRANGE)


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_never_an_error(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    prepare = rng.choice([*SOUND.values(), *(broken[0] for broken in BROKEN.values())])
    run = prepare(tmp_path / "run")
    for path in sorted(path for path in run.rglob("*") if path.is_file() and rng.random() < 0.5):
        data = bytearray(path.read_bytes())
        if path.suffix in (".json", ".jsonl"):
            lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
            number = rng.randrange(len(lines))
            with contextlib.suppress(ValueError):
                lines[number] = json.dumps(strange(json.loads(lines[number]), rng))
            path.write_text("\n".join(lines) + "\n")
        elif data:
            for _ in range(rng.randrange(8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data)
    with contextlib.suppress(MemoryWalkerError):  # nothing may be left of what makes it a run
        diagnose(run)


def test_a_damaged_job(tmp_path: Path) -> None:
    run = job(tmp_path / "run")
    (run / "plugin.yaml").write_bytes(b"\xff\xfe: [")
    (run / "logs/driver.log").write_bytes(bytes(range(256)) + b"step 3: {'train/loss': \n perf 99: {'rollout/\n")
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_bytes(b"\x00")
    assert "unreadable file" in by_name(diagnose(run))


def test_long_logs_are_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_plugin.diagnosis.log_text.HEAD_BYTES", 2000)
    monkeypatch.setattr("slime_plugin.diagnosis.log_text.TAIL_BYTES", 4000)
    filler = "[2026-11-19 06:05:19] Decode batch\n" * 2000
    text = f"ModuleNotFoundError: No module named 'a'\n{filler}OSError: [Errno 24] Too many open files\n"
    run = job(tmp_path / "run", done=0, logs={"RolloutManager-4242.err": f"{text}"})
    where = {symptom.name: symptom.where for symptom in diagnose(run).symptoms}
    assert where["missing package"] == "logs/20261119-061300/node-1/RolloutManager-4242.err:1"
    name, _, byte = where["open files"].partition(" at byte ")
    assert (run / name).read_bytes()[int(byte) :].startswith(b"OSError: [Errno 24]")
