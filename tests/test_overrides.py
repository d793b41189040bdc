"""Settings on the command line: what they come to, and whose fault a mistake is."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.custom import Custom
from slime_plugin.config.frozen import load_config
from slime_plugin.config.harness import AgentFold, SearchR1, TcRag
from slime_plugin.config.method import Mask4d, Sdcc
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.tools import Bm25, DashScope, Search, Visit
from slime_plugin.config.tracking import Tracking, Wandb
from slime_plugin.errors import ConfigError

FILE = """
model: models/small
harness: {type: agentfold, threshold: 120, summary_tokens: 16}
method: {type: mask4d, budget: 4096}
rollout: {samples: 8}
tools:
  - {type: search, top_k: 3, backend: &corpus {type: bm25, corpus: first.jsonl}}
  - {type: search, name: again, backend: *corpus}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cell.yaml"
    path.write_text(FILE)
    return path


def changed(path: Path, *overrides: str) -> dict[str, object]:
    """The top-level blocks that overrides made another."""
    before, after = load_config(path, Cell), load_cell(path, overrides)
    return {name: getattr(after, name) for name in Cell.model_fields if getattr(after, name) != getattr(before, name)}


def test_without_overrides_it_is_the_file(path: Path) -> None:
    assert load_cell(path) == load_config(path, Cell)


def test_values_are_yaml(path: Path) -> None:
    cell = load_cell(
        path,
        [
            "trainer.lr=1e-6",
            "trainer.betas=[0.9, 0.95]",
            "trainer.tp=2",
            "trainer.sp=true",
            "rollout.temperature=0.7",
            "rollout.seconds=null",
            "model=models/other",
            "engine.url=http://127.0.0.1:30000",
            "rollout.system=a = b",
            "rollout.sampled_tokens= 9 ",
        ],
    )
    assert cell.trainer.lr == 0.000001
    assert cell.trainer.betas == (0.9, 0.95)
    assert (cell.trainer.tp, cell.trainer.sp) == (2, True)
    assert cell.rollout.temperature == 0.7
    assert cell.rollout.seconds is None
    assert cell.model == Path("models/other")
    assert cell.engine.url == "http://127.0.0.1:30000"
    assert cell.rollout.system == "a = b"
    assert cell.rollout.sampled_tokens == 9
    assert cell.rollout.samples == 8


@pytest.mark.parametrize("override", ["method=sdcc", "method.type=sdcc", "method={type: sdcc}"])
def test_another_type_drops_the_settings_of_the_one_before(path: Path, override: str) -> None:
    assert changed(path, override) == {"method": Sdcc()}


@pytest.mark.parametrize("override", ["method=mask4d", "method.type=mask4d"])
def test_the_same_type_keeps_its_settings(path: Path, override: str) -> None:
    assert changed(path, override) == {}
    assert load_cell(path, [override]).method == Mask4d(budget=4096)


@pytest.mark.parametrize("switch", ["method=sdcc", "method.type=sdcc"])
def test_a_type_and_its_settings_may_come_in_any_order(path: Path, switch: str) -> None:
    wanted = {"method": Sdcc(weight=0.5)}
    assert changed(path, switch, "method.weight=0.5") == wanted
    assert changed(path, "method.weight=0.5", switch) == wanted


def test_the_later_of_two_counts(path: Path) -> None:
    assert load_cell(path, ["trainer.tp=2", "trainer.tp=4"]).trainer.tp == 4
    assert load_cell(path, ["harness=tc_rag", "harness=search_r1"]).harness == SearchR1()


def test_settings_inside_a_block_leave_the_others(path: Path) -> None:
    assert changed(path, "harness.threshold=60") == {"harness": AgentFold(threshold=60, summary_tokens=16)}


def test_a_block_that_is_not_there_is_made(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("harness: {type: tc_rag}\n")
    assert changed(empty, "tracking.wandb.project=mine") == {"tracking": Tracking(wandb=Wandb(project="mine"))}
    assert changed(empty, "method.budget=64") == {"method": Mask4d(budget=64)}, "of the type that it has by default"
    assert load_cell(empty, ["trainer.betas.1=0.95"]).trainer.betas == (0.9, 0.95)
    assert load_cell(empty, ["harness.evict=newest"]).harness == TcRag(evict="newest")


def test_a_block_that_is_null_is_made(tmp_path: Path) -> None:
    path = tmp_path / "null.yaml"
    path.write_text("tracking: {wandb: null}\nmethod: null\n")
    cell = load_cell(path, ["tracking.wandb.mode=offline", "method=sdcc"])
    assert (cell.tracking.wandb, cell.method) == (Wandb(mode="offline"), Sdcc())


def test_lists_are_indexed(path: Path) -> None:
    first, second = load_cell(path, ["tools.0.top_k=5", "tools.1=visit"]).tools
    assert first == Search(top_k=5, backend=Bm25(corpus=Path("first.jsonl")))
    assert second == Visit()
    first, second = load_cell(path, ["tools.0.backend=dashscope", "tools.0.backend.timeout=3.0"]).tools
    assert isinstance(first, Search)
    assert first.backend == DashScope(timeout=3.0)


def test_an_alias_is_two_blocks(path: Path) -> None:
    first, second = load_cell(path, ["tools.1.backend.corpus=second.jsonl"]).tools
    assert isinstance(first, Search)
    assert isinstance(second, Search)
    assert first.backend == Bm25(corpus=Path("first.jsonl"))
    assert second.backend == Bm25(corpus=Path("second.jsonl"))


def test_an_import_path_is_a_type(path: Path) -> None:
    cell = load_cell(path, ["harness=examples.editors.keep_last:KeepLast", "harness.keep=1"])
    assert isinstance(cell.harness, Custom)
    assert (cell.harness.type, cell.harness.settings) == ("examples.editors.keep_last:KeepLast", {"keep": 1})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.tpp=2", "command line: trainer.tpp: unknown key; use 'tp'"),
        ("tp=2", "command line: tp: unknown key; use 'trainer.tp'"),
        ("trianer.tp=2", "command line: trianer.tp=2: trianer: unknown key; use 'trainer'"),
        (
            "trainer.temperature=1",
            "command line: trainer.temperature: unknown key; "
            "use one of 'rollout.temperature', 'evaluation.temperature'",
        ),
        ("trainer.warmup=3", "command line: trainer.warmup: unknown key; use 'lr_warmup'"),
        ("harness.empty=x", "command line: harness.empty: unknown key; it belongs to type tc_rag"),
        ("harness=tc_rg", "command line: harness.type: there is no 'tc_rg'; use 'tc_rag'"),
        ("harness.type=tc_rg", "command line: harness.type: there is no 'tc_rg'; use 'tc_rag'"),
        ("tools.1.topk=3", "command line: tools.1.topk: unknown key; use 'top_k'"),
        ("tools.0.backend.k=2", "command line: tools.0.backend.k: unknown key; use 'k1'"),
        (
            "tools.2.top_k=3",
            "command line: tools.2.top_k=3: tools has 2 entries, and none is '2'; use a number from 0 to 1",
        ),
        (
            "tools.search.top_k=3",
            "command line: tools.search.top_k=3: tools has 2 entries, and none is 'search'; use a number from 0 to 1",
        ),
        (
            "tools.-1=visit",
            "command line: tools.-1=visit: tools has 2 entries, and none is '-1'; use a number from 0 to 1",
        ),
        ("rollout.samples.x=1", "command line: rollout.samples.x=1: rollout.samples is 8, which has no 'x' in it"),
        ("sdcc", "command line: 'sdcc' has no '='; settings are key=value, such as trainer.tp=2"),
        ("=2", "command line: '=2' has an empty key; settings are key=value, such as trainer.tp=2"),
        (
            "trainer..tp=2",
            "command line: 'trainer..tp=2' has an empty key; settings are key=value, such as trainer.tp=2",
        ),
        (
            "harness.request=",
            "command line: harness.request= has no value; harness.request=null sets none, harness.request='\"\"' an "
            "empty text, with both quotes",
        ),
        ("trainer.tp=two", "command line: trainer.tp: Input should be a valid integer, but it is 'two'"),
        ("trainer={tp: 0}", "command line: trainer.tp: Input should be greater than or equal to 1, but it is 0"),
        (
            "method.packing=union",
            "command line: method.packing=union: method: a budget splits a prefix tree; packing union has none - use "
            "packing trie",
        ),
        ("tools.1.backend=http", "command line: tools.1.backend.url: missing; it has no default"),
        (
            "trainer.betas.1=1.0",
            "command line: trainer.betas.1=1.0: trainer.betas: the second is 1, and has to be at least 0 and less "
            "than 1",
        ),
        (
            "trainer.sp=true",
            "command line: trainer.sp=true: trainer: sp: sequence parallelism splits activations over tensor-parallel "
            "ranks; with tp 1 leave it off",
        ),
    ],
)
def test_mistakes_on_the_command_line_say_so(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cell(path, ["rollout.turns=3", override])
    assert str(caught.value) == message


def test_a_value_that_is_not_yaml(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: trainer.betas=\[0.9: not YAML: "):
        load_cell(path, ["trainer.betas=[0.9"])


def test_mistakes_of_the_file_stay_its_own(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("harness: {type: agentfold, treshold: 5}\nrollout: {samples: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_cell(path, ["harness=agentfold", "trainer.tpp=2"])
    assert str(caught.value).splitlines() == [
        f"{path}: harness.treshold: unknown key; use 'threshold'",
        f"{path}: rollout.samples: Input should be greater than or equal to 1, but it is 0",
        "command line: trainer.tpp: unknown key; use 'tp'",
    ]
    with pytest.raises(ConfigError) as caught:
        load_cell(path, ["harness=tc_rag", "rollout.samples=4", "rollout.turns=0"])
    assert str(caught.value) == ("command line: rollout.turns: Input should be greater than or equal to 1, but it is 0")


def test_a_file_that_no_setting_can_be_put_into(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"list.yaml: the whole file: .* \[1\]"):
        load_cell(path, ["trainer.tp=2"])
    path.write_text("rollout: &a {x: *a}\n")
    with pytest.raises(ConfigError, match=r"list.yaml: a block is inside itself"):
        load_cell(path, ["trainer.tp=2"])
