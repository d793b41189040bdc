"""Configuration files: every shipped one loads, and a wrong one says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from slime_plugin.bridge.editors import EDITORS
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import Frozen, load_config
from slime_plugin.config.method import Mask4d
from slime_plugin.errors import ConfigError
from slime_plugin.methods import METHODS
from tests.conftest import ROOT

SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_configuration_loads(path: Path) -> None:
    cell = load_config(path, Cell)
    named_by = {"methods": cell.method.type, "small_world": cell.harness.type}
    assert named_by[path.parent.name] == path.stem


def test_there_is_one_per_method_and_one_per_editor() -> None:
    for folder, names in (("methods", METHODS), ("small_world", EDITORS)):
        assert sorted(path.stem for path in (ROOT / "configs" / folder).glob("*.yaml")) == sorted(names)


def test_the_default_is_the_cheapest_exact_method(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert load_config(empty, Cell).method == Mask4d(packing="trie")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methd: {type: mask4d}", ["methd: unknown key; use 'method'"]),
        ("method: {type: mask4d, paking: trie}", ["method.paking: unknown key; use 'packing'"]),
        ("method: {type: mask4d, packing: tree}", ["packing", "'trie'", "'tree'"]),
        ("method: {type: mask5d}", ["method.type: there is no 'mask5d'; use 'mask4d'"]),
        ("method: {packing: trie}", ["method", "type"]),
        ("method: {type: mask4d, packing: union, budget: 9}", ["method: a budget splits", "packing union"]),
        ("std: true\nstd: false", ["'std' is given twice"]),
        ("std: 2020-13-45", ["month must be in 1..12"]),
        ("method: {type: mask4d, budget: 0}", ["budget", "greater than or equal to 1", "0"]),
        ("method: {type: mask4d, budget: '9'}", ["budget", "valid integer", "'9'"]),
        ("std: 1", ["std", "valid boolean", "1"]),
        ("method: [", ["not YAML", "line 1"]),
        ("- 1", ["the whole file", "[1]"]),
        ("std: !!python/object/apply:os.getcwd []", ["not YAML", "python/object"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, Cell)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: ")
    for word in words:
        assert word in line


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("st: true\nmethod: {type: sdcc, x: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, Cell)
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", Cell)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        load_config(tmp_path / "binary.yaml", Cell)


class _Rates(Frozen):
    rate: float = Field(ge=0)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", ".000001", "1e-06"])
def test_scientific_notation_is_a_number(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rate.yaml"
    path.write_text(f"rate: {text}\n")
    assert load_config(path, _Rates).rate == 1e-6
