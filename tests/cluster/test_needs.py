"""What a cell needs from outside is looked for before anything is started, where it will be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_plugin.agents import environment
from slime_plugin.cluster import driver
from slime_plugin.cluster.job_problems import missing_here
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.needs import needs_of, rollout_problems
from slime_plugin.slime.args import args_of
from tests.cli import run
from tests.conftest import ROOT

CELL = str(ROOT / "configs" / "cells" / "tc_rag-mask4d.yaml")
KEYS = ("DASHSCOPE_API_KEY", "FIRECRAWL_API_KEY", "JUDGE_KEY")
SEARCH = {"type": "search", "backend": {"type": "dashscope"}}
RETRIEVER = {"type": "http", "url": "http://127.0.0.1:1/retrieve", "key_variable": "JUDGE_KEY"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


def cell(**settings: Any) -> Cell:
    return Cell.model_validate({"method": {"type": "mask4d"}, **settings})


def problems(**settings: Any) -> list[str]:
    return list(rollout_problems(cell(**settings)))


def test_keys_of_every_service(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [SEARCH, {"type": "visit"}, {"type": "search", "name": "own", "backend": RETRIEVER}]
    wanted = {
        "tools.0.backend": "DASHSCOPE_API_KEY",
        "tools.1.firecrawl": "FIRECRAWL_API_KEY",
        "tools.1.summariser": "DASHSCOPE_API_KEY",
        "tools.2.backend": "JUDGE_KEY",
    }
    found = problems(tools=tools)
    assert len(found) == len(wanted)
    for problem, (where, variable) in zip(found, wanted.items(), strict=True):
        assert problem.startswith(where)
        assert variable in problem
    for name in KEYS:
        monkeypatch.setenv(name, "a-key")
    assert problems(tools=tools) == []


@pytest.mark.parametrize("content", [None, ""])
def test_a_corpus(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    tools = [{"type": "search", "backend": {"type": "bm25", "corpus": str(path)}}]
    if content is not None:
        path.write_text(content)
    (problem,) = problems(tools=tools)
    assert problem.startswith(f"tools.0.backend.corpus: {path} ")
    path.write_text('{"text": "Paris"}\n')
    assert problems(tools=tools) == []


def test_code_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def judge(outcome):\n    return 1.0\n\ndef folds(records):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = problems(reward={"type": "mine:jugde"}, tracking={"metrics": ["mine:fold"]}, tools=[{"type": "no.such:T"}])
    assert sorted(problem.partition(":")[0] for problem in wrong) == ["reward.type", "tools.0.type", "tracking.metrics"]
    assert problems(reward={"type": "mine:judge"}, tracking={"metrics": ["mine:folds"]}) == []


def test_code_that_cannot_be_imported_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may need packages that only the nodes have; the command line is shown all the same."""
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems(reward={"type": "needy:judge"})
    assert problem.startswith("reward.type: cannot be imported here (ModuleNotFoundError: No module named")
    (problem,) = problems(tracking={"metrics": ["needy:folds"]})
    assert problem.startswith("tracking.metrics: cannot be imported here")
    assert run("slime-args", CELL, "reward=needy:judge").exit_code == 0


def test_the_program_of_an_agent(tmp_path: Path) -> None:
    long = {"context_tokens": 40000, "turn_tokens": 2000}
    (problem,) = problems(harness={"type": "slime_plugin.agents:Driver"})
    assert problem == "harness.type: slime_plugin.agents:Driver does not define prepare; name a class that does"
    (problem,) = problems(harness={"type": "opencode", "program": str(tmp_path / "opencode")}, rollout=long)
    assert "launch/harnesses.sh" in problem


@pytest.mark.parametrize(
    ("found", "state"),
    [(None, "not installed"), ("0.38.2", "0.38.2, and has to be 0.51 or newer")],
    ids=["missing", "older"],
)
def test_the_packages_that_serve_an_agent(found: str | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's image is installed without dependencies, and brings versions of its own."""
    monkeypatch.setattr(environment, "_version", lambda package: found if package == "uvicorn" else "9.0")
    monkeypatch.chdir(ROOT)
    (problem,) = rollout_problems(load_cell("configs/black_box.yaml"))
    assert f"is served with uvicorn, which is {state}; pip install 'memorywalker[tap]'" in problem


def test_nothing_is_needed_twice_or_for_nothing() -> None:
    assert list(needs_of(cell())) == []
    assert len(problems(harness={"type": "examples.black_box.driver:Drvier"})) == 1
    assert list(missing_here(cell(cluster={"replay": str(ROOT)}, tools=[SEARCH]))) == []  # no tool is called


def test_the_command_line_is_shown_without_them_and_written_only_with_them(tmp_path: Path) -> None:
    shown = run("slime-args", CELL)
    assert shown.exit_code == 0
    assert "Missing: tools.0.backend: the environment variable DASHSCOPE_API_KEY is not set" in shown.stderr
    written = run("slime-args", CELL, "--write", "--out", str(tmp_path / "run"))
    assert written.exit_code == 1
    assert "DASHSCOPE_API_KEY" in written.stderr
    assert "FIRECRAWL_API_KEY" in written.stderr
    assert not (tmp_path / "run").exists()


def test_the_driver_looks_again_before_slime_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may run on another machine than the one where the job was typed."""
    trained: list[object] = []
    monkeypatch.setattr(driver, "check_command_line", lambda words: None)
    monkeypatch.setattr(driver, "contract_problems", list)
    monkeypatch.setattr(driver, "slime_train", lambda: trained.append)
    monkeypatch.setattr(driver, "check_args", lambda args: None)
    monkeypatch.setattr(driver, "parsed", lambda words: args_of(cell(tools=[SEARCH])))
    with pytest.raises(SystemExit) as ended:
        driver.main([])
    assert ended.value.code == 1
    assert "Error: tools.0.backend" in capsys.readouterr().err
    assert trained == []
    monkeypatch.setenv("DASHSCOPE_API_KEY", "a-key")
    driver.main([])
    assert len(trained) == 1
