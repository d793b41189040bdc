"""``memorywalker verify``: a sound cell passes, and whatever is broken turns the line red that is about it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_plugin import machine
from slime_plugin.config.method import LogitTree, Mask4d, NaiveFull
from slime_plugin.config.overrides import load_cell
from slime_plugin.machine import Probe
from slime_plugin.methods import lay_out
from slime_plugin.verify import engine, longest_row, resources, training, world
from slime_plugin.verify.checks import CHECKS
from slime_plugin.verify.generated import random_records, random_tree
from slime_plugin.verify.measurement import Measurement, worst
from slime_plugin.verify.settings import LIMITS
from tests.cli import run
from tests.conftest import ROOT
from tests.verify.breakages import run_broken

QUICKSTART = "configs/quickstart.yaml"
COMPUTED = "attention,rope,head,model,sleep,longest_row"
SECRET = "sk-not-to-be-shown"


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without importing packages, which takes seconds."""
    monkeypatch.setattr(machine, "probe", lambda packages: Probe())


def verify(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the checks by name."""
    result = run("verify", QUICKSTART, *arguments, "--quick", "--json")
    value = json.loads(result.stdout)
    assert value["ok"] == (result.exit_code == 0)
    return result.exit_code, {check["check"]: check for check in value["checks"]}


def red(checks: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, check in checks.items() if check["verdict"] == "failed"}


def test_a_sound_cell_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("verify", QUICKSTART, "--quick", "--only", COMPUTED, "--json", "--out", str(page))
    assert result.exit_code == 0, result.stdout
    value = json.loads(result.stdout)
    assert (value["ok"], value["verdict"], value["device"], value["dtype"]) == (True, "6 passed", "cpu", "float32")
    assert value["split"] == {"tp": 1, "pp": 1, "cp": 1, "sp": False}
    assert [check["check"] for check in value["checks"]] == COMPUTED.split(",")
    for check in value["checks"]:
        assert check["verdict"] == "passed"
        assert check["seconds"] > 0
        assert check["remedies"] == []
        assert check["measurements"]
        for finding in check["measurements"]:
            assert finding["ok"]
            if finding["limit"].startswith("<="):
                assert 0 <= finding["value"] <= float(finding["limit"].split()[1])
    parser = HTMLParser()
    parser.feed(page.read_text(encoding="utf-8"))
    assert "6 passed" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("breakage", "settings", "checks", "expected"),
    [
        ("top_left_causality", [], "attention,rope", {"attention"}),
        ("index_for_depth", [], "attention,rope", {"rope"}),
        ("another_base", [], "attention,rope", {"rope"}),
        ("dropped_shard", ["trainer.tp=2"], "rope,head", {"head"}),
        ("teacher_with_gradient", [], "head", {"head"}),
        ("wrong_parent", [], "rope,model", {"model"}),
        ("only_parameters_wake", [], "rope,sleep", {"sleep"}),
        ("overflow", [], "rope,longest_row", {"longest_row"}),
    ],
)
def test_what_is_broken_turns_its_line_red(
    breakage: str, settings: list[str], checks: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "run_ranks", functools.partial(run_broken, breakage))
    code, found = verify(*settings, "--only", checks)
    assert (code, red(found)) == (1, expected), found
    for name in expected:
        assert found[name]["remedies"], "and says what to do"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breakage", "settings", "expected"),
    [
        ("top_left_causality", [], {"attention", "model"}),
        ("index_for_depth", [], {"rope", "model"}),
        ("another_base", [], {"rope"}),
        ("dropped_shard", ["trainer.tp=2"], {"head"}),
        ("teacher_with_gradient", [], {"head"}),
        ("wrong_parent", ["trainer.pp=2"], {"model"}),
        ("only_parameters_wake", ["trainer.cp=2"], {"sleep"}),
        ("overflow", [], {"model", "longest_row"}),
    ],
)
def test_no_other_line_turns_red(
    breakage: str, settings: list[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "run_ranks", functools.partial(run_broken, breakage))
    assert red(verify(*settings, "--only", COMPUTED)[1]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.tp=2", "trainer.sp=true", "trainer.pp=2"],
        ["trainer.cp=2", "method=sdcc", "objective.kl=0.1"],
        ["trainer.pp=3", "trainer.vpp=3", "trainer.dtype=bfloat16"],
        ["trainer.dtype=float64", "trainer.batch_tokens=100"],
        ["trainer.tp=2", "trainer.cp=2", "trainer.dtype=bfloat16", "method={type: mask4d, budget: 400}"],
    ],
    ids=" ".join,
)
def test_every_split_and_precision_passes(settings: list[str]) -> None:
    code, found = verify(*settings, "--only", COMPUTED)
    assert (code, red(found)) == (0, set()), found


@pytest.mark.slow
def test_recorded_rollouts_are_compared_on(tmp_path: Path) -> None:
    records = ROOT / "tests/fixtures/v0_6_0/train/rollout-00000.records"
    code, found = verify("--only", "model", "--records", str(records))
    assert code == 0, found
    assert "log-probabilities of" in found["model"]["measurements"][0]["what"]


@pytest.mark.slow
def test_a_real_engine_and_one_that_keeps_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = verify("--only", "engine")
    assert code == 0, found

    async def forget(url: str, model: Path, version: str) -> None:
        """Answer that the weights are loaded."""

    monkeypatch.setattr(engine, "update_weights", forget)
    code, found = verify("--only", "engine")
    assert (code, red(found)) == (1, {"engine"})
    before, after, *_ = found["engine"]["measurements"]
    assert (before["ok"], after["ok"]) == (True, False)
    assert "does not sample with the weights that it was given" in found["engine"]["remedies"][0]


STEP = {"ratio": 1.0, "reference_kl": 0.0}
LR = [0.0, 1e-4, 2e-4, 3e-4]


@pytest.mark.parametrize(
    ("numbers", "changes", "wrong"),
    [
        ([0, 1, 2, 3], {}, []),
        ([0, 1, 2, 3], {"ratio": 1.001}, ["|ratio - 1| at the first step of an iteration"]),
        ([0, 1, 2, 3], {"reference_kl": 1e-5}, ["reference KL at step 0"]),
        ([0, 1, 2, 3], {"lr": 1e-5}, ["learning rate: error relative to its end"]),
        ([0, 1, 1, 2, 3], {}, ["steps"]),
        ([0, 1], {}, ["steps"]),
    ],
)
def test_steps_of_a_resumed_run(numbers: list[int], changes: dict[str, float], wrong: list[str]) -> None:
    """``changes`` are to the first step."""
    steps = [{**STEP, "step": number, "lr": LR[number], **(changes if not number else {})} for number in numbers]
    found = list(training.findings(steps, training.small_run(load_cell(QUICKSTART)), LIMITS["float32"]))
    assert [finding.what for finding in found if not finding.ok] == wrong
    assert all(finding.remedy for finding in found if not finding.ok)


@pytest.mark.slow
def test_a_run_that_is_killed_and_one_that_loses_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = verify("--only", "training")
    assert code == 0, found
    loses = "from slime_plugin.local import loop; loop.truncate_metrics = lambda run, _: run.metrics.unlink(True); "
    python, flag, script, command = training.COMMAND
    monkeypatch.setattr(training, "COMMAND", (python, flag, loses + script, command))
    code, found = verify("--only", "training")
    assert (code, red(found), found["training"]["message"]) == (1, {"training"}, ""), found
    wrong = {finding["what"]: finding["found"] for finding in found["training"]["measurements"] if not finding["ok"]}
    assert (wrong["steps"], wrong["lines of metrics kept, of those before the kill"]) == ("2, 3", "0")


def test_a_run_that_cannot_be_sampled_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRECRAWL_API_KEY", raising=False)
    code, found = verify("--only", "training", "tools=[{type: visit}]")
    assert (code, found["training"]["verdict"]) == (0, "skipped")
    assert "FIRECRAWL_API_KEY is not set" in found["training"]["message"]


@pytest.mark.usefixtures("quick")
def test_a_key_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", SECRET)
    monkeypatch.delenv("FIRECRAWL_API_KEY", raising=False)
    code, found = verify("--only", "resources,tools", "tools=[{type: visit}]")
    assert (code, red(found)) == (1, {"resources", "tools"})
    assert "export FIRECRAWL_API_KEY=..." in found["resources"]["remedies"]
    assert "FIRECRAWL_API_KEY is not set" in found["tools"]["message"]
    assert SECRET not in json.dumps(found)


@pytest.mark.usefixtures("quick")
def test_versions_that_fail_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify("--only", "resources")[0] == 0
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.3" if name == "uvicorn" else real(name))
    code, found = verify("--only", "resources")
    assert (code, found["resources"]["remedies"][-1]) == (1, "pip install 'uvicorn>=0.51'")


def test_a_proxy_between_machine_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert resources.proxies("cuda").status == "ok"
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert (resources.proxies("cuda").status, resources.proxies("cpu").status) == ("missing", "warn")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert resources.proxies("cuda").status == "ok"


def test_tools_are_called(tmp_path: Path) -> None:
    code, found = verify("--only", "tools")
    assert (code, [finding["what"] for finding in found["tools"]["measurements"]]) == (0, ["search"])
    backend = "{type: http, url: 'http://127.0.0.1:9/retrieve', retries: 0, cache: " + str(tmp_path / "cache") + "}"
    code, found = verify("--only", "tools", f"tools=[{{type: search, backend: {backend}}}]")
    assert (code, red(found)) == (1, {"tools"})
    (finding,) = found["tools"]["measurements"]
    assert finding["found"].startswith("unavailable: search failed: the connection failed")
    assert found["tools"]["remedies"] == ["check the tool's url, the network, and http_proxy with no_proxy"]


def test_what_cannot_run_is_skipped_and_not_passed() -> None:
    result = run("verify", QUICKSTART, "tools=[]", "--only", "tools")
    assert result.exit_code == 0
    assert re.search(r"skipped +tools .*\n +the cell has no tools", result.stdout)
    assert result.stdout.endswith("\n0 passed; 1 skipped: tools\n")


def test_a_check_that_crashes_is_red_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(world, "run_on_ranks", crash)
    code, found = verify("--only", "tools,attention,rope")
    assert (code, red(found)) == (1, {"attention", "rope"})
    assert found["rope"]["message"] == "CUDA error: an illegal memory access was encountered"
    assert "Traceback" in found["rope"]["traceback"]


def test_a_model_that_is_not_there() -> None:
    result = run("verify", QUICKSTART, "model=models/none")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: {QUICKSTART}: model: there is no folder models/none; prepare it first (launch/prepare.sh says how)\n"
    )


def test_a_check_that_does_not_exist() -> None:
    result = run("verify", QUICKSTART, "--only", "attention,roep")
    assert result.exit_code == 2
    assert "there is no check 'roep'; use 'rope'" in result.stderr


def test_a_device_that_is_not_there() -> None:
    result = run("verify", QUICKSTART, "--device", "cuda")
    assert result.exit_code == 1
    assert "--device cuda: torch finds no GPU here" in result.stderr


def test_a_cpu_is_chosen_before_torch_looks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert verify("--device", "cpu", "--only", "tools")[0] == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_worst_of_several_numbers_is_one_that_is_none() -> None:
    assert math.isnan(worst([0.001, math.nan, 0.002]))
    assert worst([0.001, 0.003, 0.002]) == 0.003
    assert worst([]) == 0.0


def test_a_small_run_that_no_disk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "disk_needed", lambda cell: 1e18)
    code, found = verify("--only", "training")
    assert (code, found["training"]["verdict"]) == (0, "skipped")
    assert "up to 1,000,000,000 GB" in found["training"]["message"]


def test_a_number_that_is_none_is_over_its_limit() -> None:
    found = Measurement.at_most("x", float("nan"), 1.0, "y")
    assert (found.ok, found.found, found.value, found.remedy) == (False, "nan", None, "y")
    assert Measurement.at_most("x", 1.0, 1.0, "y").ok


def test_what_is_made_up_is_what_it_should_be() -> None:
    generator = np.random.default_rng(3)
    parent = random_tree(300, 40, generator)
    assert ((parent >= -1) & (parent < np.arange(300))).all()
    assert (parent != np.arange(300) - 1).sum() <= 40
    records = random_records(3, 2000, np.arange(50, dtype=np.int32), generator, 320)
    for record in records:  # made of checked records
        assert len(record.edits) == 3
        assert max(len(record.view_positions(k)) for k in range(4)) <= 320


@pytest.mark.parametrize(("tokens", "context"), [(1000, 320), (300, 300), (1001, 400)])
def test_the_longest_row_has_the_length_that_is_asked_for(tokens: int, context: int) -> None:
    record = longest_row.branching_record(tokens, context, 50)
    assert [len(row) for row in lay_out(record, Mask4d()).rows] == [tokens]
    assert [len(row) for row in lay_out(record, NaiveFull()).rows] == [tokens]
    assert max(len(row) for row in lay_out(record, LogitTree()).rows) == context


def test_every_check_is_a_module_with_a_line_of_documentation() -> None:
    text = (ROOT / "docs/verify.md").read_text(encoding="utf-8")
    for name in CHECKS:
        assert f"| `{name}` |" in text, "docs/verify.md"
