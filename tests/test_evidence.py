"""What a start writes down about itself, and what a bundle for a bug report holds: everything but secrets."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime_plugin import __version__
from slime_plugin.cluster import driver
from slime_plugin.config.overrides import load_cell
from slime_plugin.diagnosis import diagnose
from slime_plugin.diagnosis.health import FILE, health_of, write_health
from slime_plugin.run.evidence import collect, read_starts, recorded_start
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.redaction import redact_text, redact_words
from slime_plugin.slime.args import args_of
from tests.cli import run
from tests.conftest import ROOT
from tests.run_parts import QUICKSTART, iteration, job, local_run, start, step

KEYS = {
    "DASHSCOPE_API_KEY": "sk-0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOp1234",
    "RAY_AUTH_TOKEN": "not-a-known-form",
    "OUR_SEARCH": "squeamish ossifrage",
    "SGLANG_ADMIN_PASSWORD": "correct-horse",
    "https_proxy": "http://somebody:letmein99@proxy:3128",
}
SECRETS = [*(value for name, value in KEYS.items() if name != "https_proxy"), "letmein99"]
OWN_KEY = {"tools": [{"type": "search", "backend": {"type": "http", "key_variable": "OUR_SEARCH"}}]}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("EDITOR", "nobody asked")


def everything(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("keys")
def test_a_start_is_written_down(tmp_path: Path) -> None:
    with recorded_start(tmp_path, OWN_KEY, ["memorywalker", "train", "a.yaml", "trainer.tp=2"]):
        (begun,) = read_starts(tmp_path)
        assert "end" not in begun, "a killed run has none"
    (found,) = read_starts(tmp_path)
    assert found["command"] == ["memorywalker", "train", "a.yaml", "trainer.tp=2"]
    assert found["end"]["how"] == "finished"
    assert found["packages"]["memorywalker"] == __version__
    assert {"torch", "megatron-core", "sglang", "ray", "flash-attn", "transformer-engine"} <= found["packages"].keys()
    assert (found["python"], found["host"]) == (platform.python_version(), platform.node())
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 2**30
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert "EDITOR" not in found["environment"], "only variables that matter are written down"


def test_the_verification_beside_a_run(tmp_path: Path) -> None:
    """As ``launch/verify.sh`` writes it, for a job of the same configuration."""
    assert collect(tmp_path / "small", {}, [])["verification"] is None
    (tmp_path / "verify-small").mkdir()
    path = tmp_path / "verify-small" / "verify.json"
    words = ("verify", "configs/quickstart.yaml", "--quick", "--only", "rope", "--out", str(path))
    assert run(*words, "model=examples/small_world/model").exit_code == 0
    found = collect(tmp_path / "small", {}, [])["verification"]
    assert (found["path"], found["ok"], found["verdict"]) == (str(path), True, "1 passed")
    assert found["time"].startswith("20")
    path.write_text("cut o")
    assert collect(tmp_path / "small", {}, [])["verification"] is None


@pytest.mark.usefixtures("keys")
def test_no_secret_is_written(tmp_path: Path) -> None:
    words = ["driver", "--wandb-key", "abc123", "--api-key=hunter2hunter2", f"tools.0.url=http://x?k={SECRETS[0]}"]
    with pytest.raises(ValueError), recorded_start(tmp_path, OWN_KEY, words):
        raise ValueError(f"refused: {' and '.join(KEYS.values())}; Authorization: Bearer abcdefghijk")
    text = everything(tmp_path)
    for secret in [*SECRETS, "abc123", "hunter2", "abcdefghijk"]:
        assert secret not in text
    (found,) = read_starts(tmp_path)
    shown = {name: found["environment"].get(name) for name in KEYS}
    assert shown == {
        **dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "OUR_SEARCH", "SGLANG_ADMIN_PASSWORD"), "set"),
        "DASHSCOPE_API_KEY": None,  # this cell does not name it
        "https_proxy": "http://[redacted]@proxy:3128",
    }
    assert "$OUR_SEARCH" in found["end"]["error"], "which one it was is shown"


def test_how_a_start_ended(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt(), SystemExit(3), SystemExit(15), OSError(28, "No space left on device")):
        with pytest.raises(type(error)), recorded_start(tmp_path, {}, []):
            raise error
    with recorded_start(tmp_path, {}, []):
        pass
    ends = [found["end"]["how"] for found in read_starts(tmp_path)]
    assert ends == ["interrupted", "failed", "interrupted", "failed", "finished"]
    assert "No space left on device" in read_starts(tmp_path)[3]["end"]["error"]


def test_a_killed_start_has_no_end(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from slime_plugin.run.evidence import recorded_start\n"
        "with recorded_start(Path(sys.argv[1]), {}): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "end" not in read_starts(tmp_path)[0]


def test_logs_of_earlier_starts_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text("12345")
    assert collect(tmp_path, {}, [])["log_bytes"] == {"engine.log": 5}


def test_evidence_is_not_worth_failing_for(tmp_path: Path) -> None:
    (tmp_path / "evidence").write_text("a file")
    with recorded_start(tmp_path, {}, []):
        pass
    write_health(RunFolder(tmp_path / "nowhere"), 0, [])
    assert list(tmp_path.iterdir()) == [tmp_path / "evidence"]


def test_a_job_leaves_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = args_of(load_cell(QUICKSTART))
    args.save = str(tmp_path / "run" / "checkpoints")
    monkeypatch.setattr(driver, "check_command_line", lambda words: None)
    monkeypatch.setattr(driver, "contract_problems", list)
    monkeypatch.setattr(driver, "check_args", lambda args: None)
    monkeypatch.setattr(driver, "missing_here", lambda cell: [])
    monkeypatch.setattr(driver, "parsed", lambda words: args)

    def train(args: Namespace) -> None:
        raise RuntimeError("the ranks are gone")

    monkeypatch.setattr(driver, "slime_train", lambda: train)
    with pytest.raises(RuntimeError):
        driver.main(["--num-rollout", "3", "--wandb-key", "abc123"])
    (found,) = read_starts(tmp_path / "run")
    assert found["command"] == ["--num-rollout", "3", "--wandb-key", "[redacted]"]
    assert found["end"]["error"] == "RuntimeError: the ranks are gone"


def test_health_of_the_first_iterations(tmp_path: Path) -> None:
    folder = RunFolder(local_run(tmp_path / "run", done=5, planned=5))
    write_health(folder, 2, [os.getpid()])
    health = json.loads((folder.path / FILE).read_text())
    assert [found["iteration"] for found in health["iterations"]] == [0, 1, 2]
    assert health["memory"]["run_bytes"] > 2**20
    (folder.path / FILE).unlink()
    write_health(folder, 3, [])
    assert not (folder.path / FILE).exists(), "later iterations say nothing new"


def test_the_first_update_of_an_iteration_counts() -> None:
    lines = [step(0, 0, ratio=1.0), step(1, 0, ratio=1.3), iteration(0), step(2, 1, ratio=1.0, grad_norm=None)]
    first, second = health_of(lines)["iterations"]
    assert (first["ratio"], second["grad_norm"], second["reward"]) == (1.0, None, None)


PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nxyz\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc.def-ghi", "abc.def"),
        ('{"api_key": "zyx987wvu"}', "zyx987wvu"),
        ("--sglang-api-key zyx987wvu --tp 2", "zyx987wvu"),
        ("password='p4ssw0rd'", "p4ssw0rd"),
        ("GET http://me:p4ssw0rd@host/", "p4ssw0rd"),
        (f"logged in with {KEYS['WANDB_API_KEY']}", KEYS["WANDB_API_KEY"]),
        ("key sk-ant-api03-abcdefghijkl", "sk-ant"),
        ("ghp_abcdefghijklmnopqrst", "ghp_"),
        ("aws AKIAIOSFODNN7EXAMPLE", "AKIA"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2lnbmF0dXJl", "eyJ"),
        (PRIVATE, "MIIEow"),
        (PRIVATE[:45], "MIIEow"),
    ],
)
def test_what_looks_like_a_key_is_redacted(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "#token: 158, token usage: 0.00, cpu graph: False",
        "'api_key': None, 'admin_api_key': None, 'max_total_tokens': 123456",
        "rollout.turn_tokens=4096 trainer.batch_tokens=8192",
        "tools.0.backend: the environment variable DASHSCOPE_API_KEY is not set",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=118, OpType=ALLREDUCE)",
        "step 3: {'train/loss': 0.0123456789, 'train/grad_norm': 0.31}",
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert redact_text(text) == text
    assert redact_words(text.split()) == text.split()


def bundle(path: Path) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_text(errors="replace") for file in files}


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    """A run whose logs and settings hold keys."""
    noise = "\n".join(f"{name}={value}" for name, value in KEYS.items())
    log = f"POST http://x?api_key=zyx987wvu 401\n{noise}\n"
    folder = local_run(tmp_path / "leaky", done=2, planned=9, logs={"rollout.log": log})
    settings = json.loads((folder / "run.json").read_text())
    settings["cell"]["tracking"]["api_key"] = "zyx987wvu"
    (folder / "run.json").write_text(json.dumps(settings))
    start(folder, end={"how": "failed", "error": f"ValueError: key {SECRETS[0]} is refused: password=zyx987wvu"})
    return folder


@pytest.mark.usefixtures("keys")
def test_a_bundle_holds_what_a_report_needs_and_no_secret(leaky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(leaky.parent)
    monkeypatch.setenv("COLUMNS", "100")
    result = run("doctor", "leaky", "--bundle")
    assert result.exit_code == 1
    assert "wrote leaky-bundle.tar.gz" in result.stderr
    files = bundle(leaky.parent / "leaky-bundle.tar.gz")
    names = {name.removeprefix("leaky/") for name in files}
    wanted = {"diagnosis.txt", "diagnosis.json", "health.json", "records.json", "files.txt", "run.json"}
    assert names == wanted | {
        *("metrics.jsonl", "evidence/start-00000.json", "logs/engine.log", "logs/rank-0.log", "logs/rollout.log")
    }
    shown = "\n".join((*files.values(), result.stdout, run("doctor", "leaky", "--json").stdout))
    for secret in [value for name, value in KEYS.items() if name != "OUR_SEARCH"] + ["letmein99", "zyx987wvu"]:
        assert secret not in shown
    assert "an error: ValueError" in files["leaky/diagnosis.txt"]
    assert json.loads(files["leaky/records.json"])[0]["statuses"] == {"completed": 16}
    assert "rollout-00001.records" in files["leaky/files.txt"]


def test_records_are_packed_if_asked_for(tmp_path: Path) -> None:
    folder, out = local_run(tmp_path / "run"), tmp_path / "report.tar.gz"
    assert run("doctor", str(folder), "--bundle", str(out), "--records").exit_code == 0
    assert {"run/rollout-00000.records", "run/rollout-00002.records"} <= bundle(out).keys()


def test_ends_of_long_logs_are_packed(tmp_path: Path) -> None:
    line = "[2026-11-19 06:05:19] Decode batch, #running-req: 1\n"
    folder = local_run(tmp_path / "run", logs={"engine.log": f"first\n{line * 40000}last\n"})
    out = tmp_path / "report.tar.gz"
    run("doctor", str(folder), "--bundle", str(out))
    log = bundle(out)["run/logs/engine.log"]
    assert log.startswith("first\n")
    assert log.endswith("last\n")
    assert len(log) < 700_000
    assert " bytes left out ...]\n[2026" in log


def test_a_bundle_of_a_job(tmp_path: Path) -> None:
    folder, out = job(tmp_path / "run"), tmp_path / "report.tar.gz"
    assert run("doctor", str(folder), "--bundle", str(out)).exit_code == 0
    assert {"run/plugin.yaml", "run/logs/driver.log"} <= bundle(out).keys()
    assert "agentfold" in bundle(out)["run/plugin.yaml"]


def test_json_and_exit_codes(tmp_path: Path) -> None:
    sound, broken = local_run(tmp_path / "sound"), local_run(tmp_path / "broken", lines=[step(0, grad_norm=None)])
    result = run("doctor", str(sound), "--json")
    value: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code, value["ok"], value["symptoms"], value["kind"]) == (0, True, [], "run")
    assert value["health"] == diagnose(sound).health
    result = run("doctor", str(broken), "--json")
    value = json.loads(result.stdout)
    assert (result.exit_code, value["ok"]) == (1, False)
    assert list(value["symptoms"][0]) == ["name", "severity", "seen", "cause", "remedy", "where", "rank"]
    assert value["symptoms"][0]["name"] == "not a number"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    result = run("doctor", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path}: not the folder of a run: it has neither run.json nor ")
    for arguments in ((str(tmp_path), "trainer.tp=2"), ("--bundle", "a.tar.gz"), (str(tmp_path), "--records")):
        assert run("doctor", *arguments).exit_code == 2, arguments
