"""Configuration of tools and rewards: what a file may say, what a mistake is answered with, and code of one's own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_plugin.agents import Driver
from slime_plugin.config import tools as config
from slime_plugin.config.custom import Custom, load_class, load_custom, load_object
from slime_plugin.config.frozen import Frozen, load_config, parse_config
from slime_plugin.config.reward import CustomReward, ExactMatch, Reward
from slime_plugin.errors import ConfigError
from slime_plugin.methods import Method
from slime_plugin.rollout.editors import Editor
from slime_plugin.rollout.tools import Tool, open_tools


class Part(Frozen):
    """The part of a cell that is ours."""

    tools: config.Tools = ()
    reward: Reward = ExactMatch()


def test_a_file_of_everything(tmp_path: Path) -> None:
    path = tmp_path / "cell.yaml"
    path.write_text("""
tools:
  - type: search
    top_k: 5
    numbered: false
    backend: {type: bm25, corpus: data/corpus.jsonl}
  - {type: search, name: wiki, backend: {type: http, url: "http://127.0.0.1:8000/retrieve", rate: 2, cache: runs/cache}}
  - {type: search, name: web, backend: {type: dashscope, rate: 0.5, timeout: 5, parameters: {scene: x}}}
  - {type: visit, summariser: {model: qwen3, url: "http://127.0.0.1:30000/v1", key_variable: null}}
  - {type: "my_tools:Clock", zone: UTC}
reward: {type: "my_rewards:judge"}
""")
    part = load_config(path, Part)
    local, wiki, web, visit, custom = part.tools
    assert isinstance(local, config.Search)
    assert local.backend == config.Bm25(corpus=Path("data/corpus.jsonl"))
    assert (local.top_k, local.numbered) == (5, False)
    assert isinstance(wiki, config.Search)
    assert isinstance(wiki.backend, config.HttpRetriever)
    assert (wiki.backend.rate, wiki.backend.cache, wiki.backend.key_variable) == (2.0, Path("runs/cache"), None)
    assert isinstance(web, config.Search)
    assert web.backend == config.DashScope(rate=0.5, timeout=5.0, parameters={"scene": "x"})
    assert isinstance(visit, config.Visit)
    assert visit.summariser is not None
    assert visit.summariser.key_variable is None
    assert isinstance(custom, config.CustomTool)
    assert custom.settings == {"zone": "UTC"}
    assert part.reward == CustomReward(type="my_rewards:judge")
    assert parse_config(yaml.safe_load(yaml.safe_dump(part.model_dump(mode="json"))), Part, "again") == part


def test_the_defaults_are_those_of_the_paper() -> None:
    search, visit = config.Search(), config.Visit()
    assert search.top_k == 3
    assert search.backend == config.DashScope()
    assert visit.firecrawl.url == "https://api.firecrawl.dev"
    assert visit.summariser is not None
    assert visit.summariser.model == "qwen-turbo"  # what DashScope calls Qwen3-Turbo
    assert ExactMatch().format == 0.2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"tools": [{"type": "serch"}]}, ["tools.0.type: there is no 'serch'; use 'search'"]),
        ({"tools": [{"type": "x"}]}, ["use one of search, visit, package.module:Name"]),
        ({"tools": [{"top_k": 3}]}, ["tools.0.type", "one of search, visit"]),
        ({"tools": ["search"]}, ["tools.0.type", "one of search, visit"]),
        ({"tools": [{"type": "search", "topk": 3}]}, ["topk: unknown key; use 'top_k'"]),
        ({"tools": [{"type": "search", "top_k": 0}]}, ["top_k", "greater than or equal to 1"]),
        ({"tools": [{"type": "search", "top_k": "3"}]}, ["top_k", "valid integer", "'3'"]),
        ({"tools": [{"type": "search", "name": "two words"}]}, ["name", "pattern"]),
        ({"tools": [{"type": "search", "backend": {"type": "bm26"}}]}, ["there is no 'bm26'; use 'bm25'"]),
        ({"tools": [{"type": "search", "backend": {"type": "bm25"}}]}, ["corpus"]),
        ({"tools": [{"type": "search", "backend": {"type": "http", "url": "a:80"}}]}, ["url: scheme 'a' is neither"]),
        ({"tools": [{"type": "search", "backend": {"type": "http", "url": "http://"}}]}, ["url"]),
        ({"tools": [{"type": "visit", "firecrawl": {"key_variable": "sk-secret"}}]}, ["key_variable", "pattern"]),
        ({"tools": [{"type": "visit", "firecrawl": {"rate": 0}}]}, ["rate", "greater than 0"]),
        ({"tools": [{"type": "a b:c"}]}, ["type", "pattern"]),
        ({"tools": [{"type": "a:"}]}, ["type", "pattern"]),
        ({"reward": {"type": "exact"}}, ["reward.type: there is no 'exact'; use 'exact_match'"]),
        ({"reward": {"type": "exact_match", "format": 2}}, ["reward.format", "less than or equal to 1"]),
        ({"reward": {}}, ["reward.type"]),
    ],
)
def test_mistakes_are_named(value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(value, Part, "cell.yaml")
    (line,) = str(caught.value).splitlines()
    for word in words:
        assert word in line


def test_a_password_in_an_address_is_refused_unseen() -> None:
    value = {"tools": [{"type": "search", "backend": {"type": "http", "url": "http://me:hunter2@host/"}}]}
    with pytest.raises(ConfigError, match="has a password in it") as caught:
        parse_config(value, Part, "cell.yaml")
    assert "hunter2" not in str(caught.value)


# Code of one's own


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of the user, in which a command is run. Modules have names of their own, since imports last."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def module(folder: Path, code: str, name: str = "own") -> str:
    name = f"{name}_{folder.name}"
    (folder / f"{name}.py").write_text(code)
    return name


def test_the_current_folder_is_looked_into(folder: Path) -> None:
    name = module(folder, "class Tool: pass\nvalue = 3\n")
    assert load_object(f"{name}:Tool", "x").__name__ == "Tool"
    assert load_object(f"{name}:value", "x") == 3
    assert sys.path.count(str(folder)) == 1
    package = folder / f"package_{folder.name}"
    package.mkdir()
    (package / "inner.py").write_text("value = 4\n")
    assert load_object(f"{package.name}.inner:value", "x") == 4


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:X", "there is no module 'no_such_module' for 'no_such_module:X'"),
        ("no_such.module:X", "there is no module 'no_such' for"),
        ("json.no_such:X", "there is no module 'json.no_such' for"),
        ("math.sqrt:X", "there is no module 'math.sqrt' for"),
        ("json:laods", "'json' has no 'laods'; use 'loads'"),
        ("json", "is not an import path; write it as package.module:Name"),
        ("json:", "is not an import path"),
        (":x", "is not an import path"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path, "harness.type")
    assert str(caught.value).startswith("harness.type: ")
    assert words in str(caught.value)


def test_an_error_inside_the_module_is_shown_as_it_is(folder: Path) -> None:
    name = module(folder, "import no_such_dependency\n", "imports")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        load_object(f"{name}:X", "x")
    assert caught.traceback[-1].path == folder / f"{name}.py"
    name = module(folder, "1 / 0\n", "divides")
    with pytest.raises(ZeroDivisionError) as divided:
        load_object(f"{name}:X", "x")
    assert divided.traceback[-1].path == folder / f"{name}.py"
    name = module(folder, "def f(:\n", "syntax")
    with pytest.raises(SyntaxError):
        load_object(f"{name}:X", "x")


TOOL = """
from slime_plugin.rollout.tools import Parameter, Schema, ToolError
from slime_plugin.config.frozen import Frozen

class Clock:
    class Settings(Frozen):
        zone: str = "UTC"
    def __init__(self, settings):
        self.zone, self.open = settings.zone, False
        self.schema = Schema("clock", "Tells the time.", {"day": Parameter("string")})
    async def __aenter__(self):
        self.open = True
    async def __aexit__(self, *error):
        self.open = False
    async def __call__(self, arguments):
        return f"{arguments['day']} {self.zone} {self.open}"

class Plain:
    schema = Schema("plain", "")
    async def __call__(self, arguments):
        raise ToolError("never")

class NoTool:
    pass

class Loose:
    class Settings:
        pass
"""


def test_tools_of_ones_own(folder: Path) -> None:
    name = module(folder, TOOL)
    value = {"tools": [{"type": f"{name}:Clock", "zone": "CET"}, {"type": f"{name}:Plain"}]}

    async def run() -> dict[str, Tool]:
        async with open_tools(parse_config(value, Part, "x").tools) as tools:
            assert await tools["clock"]({"day": "Monday"}) == "Monday CET True"
            return tools

    tools = asyncio.run(run())
    assert list(tools) == ["clock", "plain"]
    assert asyncio.run(_called(tools["clock"])) == "now CET False"  # closed with the rest


async def _called(tool: Tool) -> str:
    return await tool({"day": "now"})


def test_tools_of_ones_own_that_are_none(folder: Path) -> None:
    name = module(folder, TOOL)
    written = [
        {"type": f"{name}:NoTool"},
        {"type": f"{name}:Clock", "zon": "CET"},
        {"type": f"{name}:Clok"},
        {"type": f"{name}:Plain", "x": 1},
        {"type": f"{name}:Plain"},
        {"type": f"{name}:Plain"},
        {"type": f"{name}:Loose"},
    ]

    async def run() -> None:
        async with open_tools(parse_config({"tools": written}, Part, "x").tools):
            raise AssertionError

    with pytest.raises(ConfigError) as caught:
        asyncio.run(run())
    assert str(caught.value).splitlines() == [
        f"tools.0: {name}:NoTool is not a tool: it needs a schema (rollout.tools.Schema) and __call__",
        "tools.1: zon: unknown key; use 'zone'",
        f"tools.2.type: '{name}' has no 'Clok'; use 'Clock'",
        f"tools.3: {name}:Plain takes no settings, but x is given; make it a class with a model named Settings",
        "tools.5: there are two tools named 'plain'; give one another name",
        f"tools.6: {name}:Loose.Settings has to derive from slime_plugin.config.frozen.Frozen",
    ]


def test_what_is_no_class_is_taken_as_it_is() -> None:
    assert load_custom(CustomReward(type="math:pi"), "x") == pytest.approx(3.14159, abs=1e-5)


@pytest.mark.parametrize(("where", "base"), [("method", Method), ("harness", Editor), ("harness", Driver)])
def test_a_class_that_is_no_subclass_names_the_base_as_users_import_it(where: str, base: type[Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_class(Custom(type="collections:Counter"), base, where)
    path = str(caught.value).removeprefix(f"{where}.type: collections:Counter is not a subclass of ")
    assert load_object(path.replace(f".{base.__name__}", f":{base.__name__}"), "x") is base
