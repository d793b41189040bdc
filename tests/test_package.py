"""The package as a whole: imports point one way, docstrings are true, examples and the README are up to date."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slime_plugin
from examples import make_records
from tests.cli import run
from tests.conftest import ROOT
from tests.documentation import WIDTH, printed, shown_commands

MOVED = ("slime_plugin.bridge", "slime_plugin.tap.drivers")
"""Import paths of version 0.6: importing them warns."""
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(slime_plugin.__path__, "slime_plugin.") if module.name not in MOVED
)


def test_imports_point_one_way() -> None:
    """The contracts are in pyproject.toml; ``lint-imports`` explains what breaks them."""
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a module says what it is for"
    assert doctest.testmod(module).failed == 0


OLD_EDITOR = """
from slime_plugin.bridge.context import Context
from slime_plugin.bridge.editors import Ask, Editor
from slime_plugin.bridge.messages import Message
from slime_plugin.bridge.reward import Outcome
from slime_plugin.bridge.tools.base import Parameter, Schema, ToolError
from slime_plugin.bridge.chat import ChatML, load_chat
from slime_plugin.bridge.chat.base import Chat
from slime_plugin.bridge.engine.base import Engine, Generation, Request
from slime_plugin.bridge.engine import base
from slime_plugin.tap.drivers import DRIVERS, Driver, Errand, Finished, Launch, driver_for, run_agent
from slime_plugin.tap.drivers.base import Driver as BaseDriver, Errand as BaseErrand
from slime_plugin import agents, rollout
assert Context is rollout.context.Context and Editor is rollout.editors.Editor
assert Chat is rollout.chat.Chat and base.Engine is Engine is rollout.engine.engine.Engine
assert BaseErrand is Errand is agents.AgentTask and BaseDriver is Driver is agents.Driver
"""


def test_import_paths_of_the_version_before_work_and_warn() -> None:
    code = [sys.executable, "-W", "always::FutureWarning", "-c", OLD_EDITOR]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "slime_plugin.bridge is now slime_plugin.rollout" in done.stderr
    assert "slime_plugin.tap.drivers is now slime_plugin.agents" in done.stderr


def test_the_shipped_records_are_the_ones_the_script_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_records.main(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in (ROOT / "examples/records").iterdir()}
    assert len(capsys.readouterr().out.splitlines()) == len(made)


@pytest.mark.parametrize(("page", "command", "output"), shown_commands())
def test_commands_in_the_documentation_print_what_it_says(
    page: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", WIDTH)
    assert printed(command) == output, f"{page}: run python -m tests.documentation to write it anew"


def test_the_documentation_shows_commands() -> None:
    assert {command.split()[1] for _, command, _ in shown_commands()} == {"record", "layout", "plan"}


def test_the_python_in_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for code in blocks:
        exec(code, {})
    assert capsys.readouterr().out == "[7 8 9 5] [-1  0  0  2] [False  True False  True]\n"
    assert run("record", "check", "runs").exit_code == 0


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
