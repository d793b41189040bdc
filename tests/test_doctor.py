"""``memorywalker doctor``: what this machine has, and what it says about one that has less."""

from __future__ import annotations

import importlib.metadata
import json
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slime_plugin import machine
from slime_plugin.machine import Package, Probe
from tests.cli import run
from tests.conftest import ROOT

QUICKSTART = "configs/quickstart.yaml"
SECRET = "sk-not-to-be-shown"


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing packages, which takes seconds: one test does."""
    monkeypatch.setattr(machine, "probe", lambda packages: Probe())


def found(*arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the findings by name."""
    result = run("doctor", *arguments, "--json")
    value: dict[str, Any] = json.loads(result.stdout)
    assert value["ok"] == (result.exit_code == 0)
    findings: dict[str, list[dict[str, str]]] = {}
    for check in value["checks"]:
        assert list(check) == ["name", "status", "found", "remedy"]
        findings.setdefault(check.pop("name"), []).append(check)
    return result.exit_code, findings


def test_this_machine_has_all_that_is_needed(tmp_path: Path) -> None:
    """The real thing: packages are imported, a port is bound, files are written."""
    result = run("doctor", QUICKSTART, "--out", str(tmp_path / "runs"))
    assert result.exit_code == 0, result.stdout
    assert "nothing is missing" in result.stdout
    lines = {line.split()[1]: line.split()[0] for line in result.stdout.splitlines() if line[:1] not in ("", " ")}
    for name in (
        "Python",
        "torch",
        "megatron-core",
        "ray",
        "sglang",
        "ports",
        "model",
        "tokenizer",
        "questions",
        "ranks",
    ):
        assert lines[name] == "ok", result.stdout
    assert "200 questions, 8 per iteration" in result.stdout
    assert "3 layers of 128, 432 tokens, 1 MB" in result.stdout


def test_the_tested_versions_are_the_installed_ones() -> None:
    names = ("requirements.lock", "requirements.sglang", "requirements.torch")
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    pinned = {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)}
    for package in machine.PACKAGES:
        assert package.tested == pinned[package.name.lower()], f"{package.name}: slime_plugin/machine.py"
    tensorboard = machine.TENSORBOARD
    assert tensorboard.tested == pinned.get(tensorboard.name.lower(), tensorboard.tested)


@pytest.mark.usefixtures("quick")
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (*machine.PACKAGES, Package("no-such-package", "1.0", "pip install it", "no_such.package"))
    monkeypatch.setattr(machine, "PACKAGES", absent)
    code, findings = found()
    assert code == 1
    assert findings["no-such-package"] == [{"status": "missing", "found": "not installed", "remedy": "pip install it"}]
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"missing +no-such-package +not installed *\n +-> pip install it", result.stdout)
    assert "missing: no-such-package\n" in result.stdout


@pytest.mark.usefixtures("quick")
def test_a_package_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    versions = {"ray": "2.1.0", "torch": "2.13.0+cu130"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    code, findings = found()
    assert code == 0
    (ray,), (torch,) = findings["ray"], findings["torch"]
    assert (ray["status"], ray["found"]) == ("warn", "2.1.0; tested with 2.60.0")
    assert "launch/setup.sh" in ray["remedy"]
    assert torch == {"status": "ok", "found": "2.13.0+cu130", "remedy": ""}


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the path, without what pip writes beside it, and raises."""
    (tmp_path / "broken_one.py").write_text("print('noise')\nraise RuntimeError('built for another CUDA')\n")
    (tmp_path / "sound_one.py").write_text("print('noise')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken, sound = Package("broken-one", "1.0", "pip it", "broken_one"), Package("sound-one", "1.0", "", "sound_one")
    probed = machine.probe([broken, sound])
    assert probed == Probe((), {"broken_one": "RuntimeError: built for another CUDA"})
    finding = machine.package(broken, probed)
    assert finding.status == "missing"
    assert finding.found == "cannot be imported: RuntimeError: built for another CUDA"
    assert finding.remedy == "reinstall it: pip it"
    finding = machine.package(sound, probed)
    assert (finding.status, finding.found) == ("warn", "from source, its version is unknown; tested with 1.0")


def test_an_import_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine.probe([Package("endless", "", "")], timeout=0.5).errors == {
        "torch": "importing took longer than 0 s"
    }


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_busy_port_is_named_and_no_problem(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "USUAL_PORTS", {busy: "Ray's default"})
    finding = machine.ports()
    assert finding.status == "ok"
    assert finding.found.endswith(f"; in use: {busy} (Ray's default)")
    assert str(busy) not in finding.found.partition(";")[0], "the one that is said to be free is another one"


def test_no_port_at_all() -> None:
    finding = machine.ports("192.0.2.1")  # an address that is nobody's
    assert finding.status == "missing"
    assert "nothing can be served on 192.0.2.1" in finding.found


@pytest.mark.usefixtures("quick")
def test_an_engine_of_ones_own_is_asked_for(busy: int) -> None:
    code, findings = found(QUICKSTART, f"engine.url=http://127.0.0.1:{busy}")
    assert (code, findings["engine"][0]["status"]) == (0, "ok")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        code, findings = found(QUICKSTART, f"engine.url=http://127.0.0.1:{port}")
    assert (code, findings["engine"][0]["status"]) == (1, "missing")
    assert f"memorywalker engine --port {port}" in findings["engine"][0]["remedy"]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64_000_000, 0, 64_000_000))
    shared = machine.shared_memory()
    assert (shared.status, shared.found) == ("warn", "0.1 of 0.1 GB free")
    assert "--shm-size" in shared.remedy
    disk = machine.folder("run folder", tmp_path / "a" / "b", 2e9)
    assert disk.status == "warn"
    assert disk.remedy == "2.0 GB are needed; free some, or choose another disk"
    assert machine.folder("run folder", tmp_path / "a" / "b", 64e6).status == "ok"
    assert not (tmp_path / "a").exists(), "looking makes nothing"


def test_no_shared_memory(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "shm").status == "warn"


@pytest.mark.usefixtures("quick")
def test_a_folder_that_cannot_be_written_to() -> None:
    code, findings = found("--out", "/proc/runs")
    assert code == 1
    (folder,) = findings["run folder"]
    assert folder["found"].startswith("/proc/runs (to be created in /proc) cannot be written to: ")


def test_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        finding = machine.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (finding.status, finding.found) == ("warn", "at most 1000")
    assert finding.remedy.startswith("ulimit -n 4096")


@pytest.mark.usefixtures("quick")
def test_a_configuration_that_does_not_load() -> None:
    code, findings = found(QUICKSTART, "trainer.tpp=2", "rollout.turns=0")
    assert code == 1
    assert [finding["found"] for finding in findings["configuration"]] == [
        "command line: rollout.turns: Input should be greater than or equal to 1, but it is 0",
        "command line: trainer.tpp: unknown key; use 'tp'",
    ]
    assert "Python" in findings, "the machine is looked at all the same"


@pytest.mark.usefixtures("quick")
def test_a_configuration_that_cannot_be_trained() -> None:
    code, findings = found(QUICKSTART, "trainer.steps=3", "rollout.questions=none.jsonl", "trainer.dp=1000")
    assert code == 1
    assert [finding["found"].partition(":")[0] for finding in findings["configuration"]] == [
        "rollout.questions",
        "trainer.steps",
    ]
    assert "questions" not in findings
    (ranks,) = findings["ranks"]
    assert ranks["status"] == "warn"
    assert ranks["found"].startswith("1000 (tp 1 x pp 1 x cp 1 x dp 1000), ")


@pytest.mark.usefixtures("quick")
def test_wrong_settings_of_a_method_of_ones_own_are_a_finding() -> None:
    method = "method={type: 'examples.methods.last_branch:LastBranch', max_logdif: 2}"
    code, findings = found(QUICKSTART, method, "trainer.steps=7")
    problems = [finding["found"] for finding in findings["configuration"]]
    assert code == 1
    assert any("method: max_logdif: unknown key; use 'max_logdiff'" in problem for problem in problems)
    assert any(problem.startswith("trainer.steps: ") for problem in problems), "and everything else"
    assert findings["Python"][0]["status"] == "ok"


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "H800", "free": 79e9, "total": 80e9}
    monkeypatch.setattr(machine, "probe", lambda packages: Probe((gpu, gpu)))
    code, findings = found(QUICKSTART, "trainer.tp=2")
    assert findings["ranks"][0]["status"] == "ok"
    assert findings["devices"][0]["found"].startswith("2 GPUs: H800 (79 of 80 GB free), H800 (79 of 80 GB free); ")
    assert code == 1
    assert findings["flash-attn"][0]["status"] == "missing", "the attention of trees on a GPU"
    assert findings["apex"][0]["status"] == "warn"
    code, findings = found(QUICKSTART, "trainer.tp=2", "trainer.dp=2")
    assert (findings["ranks"][0]["status"], findings["ranks"][0]["found"]) == (
        "missing",
        "4 (tp 2 x pp 1 x cp 1 x dp 2), 2 GPUs",
    )


@pytest.mark.usefixtures("quick")
def test_keys_are_asked_for_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", SECRET)
    monkeypatch.delenv("FIRECRAWL_API_KEY", raising=False)
    tools = "tools=[{type: search}, {type: visit}]"
    code, findings = found(QUICKSTART, tools)
    assert code == 1
    assert [(key["status"], key["found"].partition(":")[0]) for key in findings["key"]] == [
        ("ok", "tools.0.backend"),
        ("missing", "tools.1.firecrawl"),
        ("ok", "tools.1.summariser"),
    ]
    assert findings["key"][1]["remedy"] == "export FIRECRAWL_API_KEY=..."
    monkeypatch.setenv("FIRECRAWL_API_KEY", f"{SECRET}\n{SECRET}")
    for result in (run("doctor", QUICKSTART, tools), run("doctor", QUICKSTART, tools, "--json")):
        assert result.exit_code == 1
        assert "FIRECRAWL_API_KEY holds characters that no key has" in result.stdout
        assert SECRET not in result.stdout + result.stderr


@pytest.mark.usefixtures("quick")
def test_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("examples/small_world/model", model)
    code, findings = found(QUICKSTART, f"model={model}", "rollout.context_tokens=4096")
    assert code == 0
    assert findings["context"][0]["status"] == "warn"
    assert findings["context"][0]["remedy"].startswith("rollout.context_tokens=2048")

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    code, findings = found(QUICKSTART, f"model={model}")
    assert code == 1
    assert "the tokenizer has 432 tokens and the model 400" in findings["tokenizer"][0]["found"]

    (model / "model.safetensors").unlink()
    code, findings = found(QUICKSTART, f"model={model}")
    assert (code, findings["model"][0]["found"]) == (1, f"{model} has no *.safetensors")


@pytest.mark.usefixtures("quick")
def test_files_and_code_that_a_configuration_names(tmp_path: Path) -> None:
    code, findings = found(
        QUICKSTART, "tools.0.backend.corpus=none.jsonl", "harness=examples.editors.keep_last:KeepLst"
    )
    assert code == 1
    assert findings["corpus"][0]["found"] == (
        "tools.0.backend.corpus: none.jsonl cannot be read (No such file or directory); name a file of JSON lines with "
        "`text`"
    )
    assert "'examples.editors.keep_last' has no 'KeepLst'; use 'KeepLast'" in findings["code"][0]["found"]
    code, findings = found(QUICKSTART, "harness=examples.editors.keep_last:KeepLast")
    assert (code, findings["code"][0]["status"]) == (0, "ok")
    code, findings = found(QUICKSTART, "tracking.metrics=[math:sqroot]")
    assert (code, findings["code"][0]["found"]) == (1, "tracking.metrics: 'math' has no 'sqroot'; use 'sqrt'")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "?", "answers": ["a"]}\n{"question": 1}\n')
    code, findings = found(QUICKSTART, f"rollout.questions={questions}")
    assert code == 1
    assert findings["questions"][0]["found"].startswith(f"{questions}:2: question is 1")


@pytest.mark.usefixtures("quick")
def test_tracking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "TENSORBOARD", Package("no-such-board", "1.0", "pip install it", "no_such_board"))
    monkeypatch.setattr(machine, "WANDB", Package("no-such-wandb", "", "pip install it", "no_such_wandb"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found(QUICKSTART)[0] == 1
    code, findings = found(QUICKSTART, "tracking.tensorboard=false")
    assert (code, findings.keys() & {"no-such-board", "no-such-wandb", "Weights & Biases"}) == (0, set())
    code, findings = found(QUICKSTART, "tracking.tensorboard=false", "tracking.wandb={}")
    assert (code, findings["no-such-wandb"][0]["status"]) == (1, "missing")
    assert findings["Weights & Biases"][0]["status"] == "warn"
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    _, findings = found(QUICKSTART, "tracking.wandb={}")
    assert findings["Weights & Biases"][0] == {"status": "ok", "found": "WANDB_API_KEY is set", "remedy": ""}


@pytest.mark.usefixtures("quick")
def test_the_agent_of_a_black_box(tmp_path: Path) -> None:
    cell = ["configs/black_box.yaml"]
    assert found(*cell)[1]["agent"][0]["status"] == "ok"
    (short,) = found(*cell, "harness={type: opencode, program: /bin/true}")[1]["agent"]
    assert (short["status"], "needs a context of" in short["found"]) == ("missing", True)
    long = ["rollout.context_tokens=40000", "rollout.turn_tokens=2000"]
    (missing,) = found(*cell, f"harness={{type: opencode, program: {tmp_path / 'opencode'}}}", *long)[1]["agent"]
    assert (missing["status"], "launch/harnesses.sh" in missing["found"]) == ("missing", True)
    other = tmp_path / "claude"
    other.write_text("#!/bin/sh\necho 0.0.1\n")
    other.chmod(0o700)
    (old,) = found(*cell, f"harness={{type: claude_code, program: {other}}}", *long)[1]["agent"]
    assert (old["status"], old["found"]) == ("warn", f"{other} is version 0.0.1")


@pytest.mark.usefixtures("quick")
def test_an_editor_needs_no_agent() -> None:
    assert "agent" not in found(QUICKSTART)[1]
