"""Configuration files: every shipped one loads, and a wrong one says what is wrong."""

from __future__ import annotations

import re
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, Field, TypeAdapter

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import Frozen, load_config, parse_config, parse_yaml, to_yaml
from slime_plugin.config.harness import BLACK_BOXES, AgentFold
from slime_plugin.config.method import Mask4d, Sdcc
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.tools import DashScope, Search, Visit
from slime_plugin.errors import ConfigError
from slime_plugin.methods import METHODS
from slime_plugin.rollout.editors import EDITORS
from slime_plugin.slime.refusals import check_training
from tests.cli import run
from tests.conftest import ROOT

CONFIGS = ROOT / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
SMALL = [CONFIGS / "quickstart.yaml", *sorted((CONFIGS / "small_world").glob("*.yaml"))]
CELLS = [
    *(f"{editor}-{method}" for editor in EDITORS if editor not in ("search_r1", *BLACK_BOXES) for method in METHODS),
    *(f"{harness}-{method}" for harness in BLACK_BOXES for method in ("logittree", "sdcc")),
    "search_r1",
]
NODES = ("1", "2", "4", "32")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_configuration_loads(path: Path) -> None:
    load_config(path, Cell)


def test_files_are_named_after_their_switches() -> None:
    for path in (CONFIGS / "methods").iterdir():
        assert load_config(path, Cell).method.type == path.stem
    for path in (CONFIGS / "small_world").iterdir():
        assert load_config(path, Cell).harness.type == path.stem
    for name in CELLS:
        cell = load_config(CONFIGS / "cells" / f"{name}.yaml", Cell)
        editor, _, method = name.partition("-")
        assert (cell.harness.type, cell.method.type) == (editor, method or "mask4d")


def test_there_is_one_per_method_editor_and_cell() -> None:
    assert len(CELLS) == 20
    for folder, names in (("methods", METHODS), ("small_world", EDITORS), ("cells", CELLS), ("nodes", NODES)):
        assert sorted(path.name for path in (CONFIGS / folder).iterdir()) == sorted(f"{name}.yaml" for name in names)


@pytest.mark.parametrize("name", CELLS)
def test_the_cells_have_the_settings_of_the_paper(name: str) -> None:
    cell = load_config(CONFIGS / "cells" / f"{name}.yaml", Cell)
    assert cell.model == Path("models/Qwen3-4B")
    trainer, objective, rollout = cell.trainer, cell.objective, cell.rollout
    assert (trainer.iterations, trainer.prompts, rollout.samples, trainer.steps) == (200, 4, 16, 8)
    assert (trainer.lr, trainer.lr_warmup, trainer.betas) == (1e-6, 0, (0.9, 0.98))
    assert (trainer.weight_decay, trainer.clip_grad, cell.std) == (0.01, 1.0, True)
    assert (objective.clip_low, objective.clip_high, objective.kl, objective.entropy) == (0.2, 0.28, 0.001, 0.0)
    assert (rollout.turns, rollout.temperature, rollout.top_p, rollout.top_k) == (30, 1.0, 1.0, None)
    assert cell.evaluation.questions == Path("data/dev.jsonl")
    if cell.harness.type in BLACK_BOXES:
        assert cell.tools == (), "it brings its own"
    else:
        search, visit = cell.tools
        assert isinstance(search, Search)
        assert (search.top_k, search.backend) == (3, DashScope())
        assert visit == Visit()
    if isinstance(cell.harness, AgentFold):
        assert cell.harness.threshold == 3000
    if isinstance(cell.method, Sdcc):
        assert (cell.method.weight, cell.method.warmup) == (0.1, 0.2)
    for key in ("lr", "samples", "temperature", "clip", "kl"):  # what is the default is not repeated
        assert f"{key}:" not in (CONFIGS / "cells" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("nodes", NODES)
def test_a_number_of_nodes_changes_sizes_only(nodes: str) -> None:
    """With any cell: what is learnt from a rollout is as in the paper; only 32 nodes ask more questions at once."""
    for name in CELLS:
        path = CONFIGS / "cells" / f"{name}.yaml"
        cell, alone = load_cell(path, (), [CONFIGS / "nodes" / f"{nodes}.yaml"]), load_config(path, Cell)
        assert cell.cluster.nodes == int(nodes)
        assert cell.trainer.prompts == (64 if nodes == "32" else 4)
        same = {"trainer": alone.trainer, "cluster": alone.cluster, "rollout": alone.rollout}
        assert cell.model_copy(update=same) == alone
        sizes = {"prompts": alone.trainer.prompts, "tp": alone.trainer.tp}
        assert cell.trainer.model_copy(update=sizes) == alone.trainer
        assert cell.rollout.model_copy(update={"concurrency": alone.rollout.concurrency}) == alone.rollout


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_the_small_ones_can_be_trained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_training(load_config(path, Cell))


def test_the_quick_start_is_agentfold_and_mask4d() -> None:
    cell = load_config(CONFIGS / "quickstart.yaml", Cell)
    assert (cell.harness.type, cell.method) == ("agentfold", Mask4d())


def test_the_default_is_the_cheapest_exact_method(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert load_config(empty, Cell).method == Mask4d(packing="trie")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methd: {type: mask4d}", ["methd: unknown key; use 'method'"]),
        ("method: {type: mask4d, paking: trie}", ["method.paking: unknown key; use 'packing'"]),
        ("rollout: {sample: 2}", ["rollout.sample: unknown key; use 'samples'"]),
        ("engine: {time: 2}", ["engine.time: unknown key; use 'timeout'"]),
        ("lr: 1e-6", ["lr: unknown key; use 'trainer.lr'"]),
        ("harness: {type: search_r1, threshold: 9}", ["harness.threshold: unknown key; it belongs to type agentfold"]),
        ("tools: [{type: visit, top_k: 9}]", ["tools.0.top_k: unknown key; it belongs to type search"]),
        ("engine: {zzz: 2}", ["engine.zzz: unknown key; use one of url, timeout, retries, backoff"]),
        ("trainer: {betas: [0.9, 1.0]}", ["trainer.betas: the second is 1, and has to be at least 0 and less than 1"]),
        ("trainer: {betas: [-0.1, 0.9]}", ["trainer.betas: the first is -0.1"]),
        ("trainer: {sp: true}", ["trainer: sp: sequence parallelism", "with tp 1 leave it off"]),
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
    RENAMED: typing.ClassVar = {"speed": "rate"}
    rate: float = Field(ge=0)


class _Nested(Frozen):
    rates: _Rates | None = None


@pytest.mark.parametrize("text", ["rates: {speed: 0.5}", "rates: {rate: 0.5}"])
def test_a_renamed_key_is_accepted_with_a_warning(text: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parse_config(parse_yaml(text, ""), _Nested, "x") == _Nested(rates=_Rates(rate=0.5))
    expected = ["configuration key speed is now rate; rename it"] if "speed" in text else []
    assert [str(warning.message) for warning in caught] == expected


def test_a_renamed_key_is_refused_beside_its_new_name() -> None:
    with pytest.raises(ConfigError, match="x: rates: speed is the old name of rate, and both are given; use rate"):
        parse_config({"rates": {"speed": 1.0, "rate": 2.0}}, _Nested, "x")


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", ".000001", "1e-06"])
def test_scientific_notation_is_a_number(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rate.yaml"
    path.write_text(f"rate: {text}\n")
    assert load_config(path, _Rates).rate == 1e-6


@pytest.mark.parametrize(
    "text", ["1e-6", "1e5", "5", ".5", "true", "null", "2020-01-01", "a: b", "# a", " a ", "", "é\n"]
)
def test_what_is_written_is_read_back(text: str) -> None:
    value = {"text": text, "list": [text, 1, 1e-6, None], "blocks": [{"deep": {"x": text}}], "none": {}, "number": 1e-6}
    assert parse_yaml(to_yaml(value), "") == value


def test_a_resolved_configuration_is_one(tmp_path: Path) -> None:
    for path in SHIPPED:
        shown = run("config", "show", str(path), "trainer.tp=2", "method=sdcc", "method.top_k=9")
        assert shown.exit_code == 0, shown.stderr
        (tmp_path / "shown.yaml").write_text(shown.stdout)
        cell = load_config(tmp_path / "shown.yaml", Cell)
        assert cell == load_cell(path, ["trainer.tp=2", "method.top_k=9", "method=sdcc"])
        assert (cell.trainer.tp, cell.method) == (2, Sdcc(top_k=9))


def test_a_wrong_setting_is_one_line() -> None:
    result = run("config", "show", str(CONFIGS / "quickstart.yaml"), "trainer.tpp=2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: command line: trainer.tpp: unknown key; use 'tp'\n"


# The reference


REFERENCE = (CONFIGS / "reference.yaml").read_text(encoding="utf-8")


def test_the_reference_is_up_to_date() -> None:
    again = "memorywalker config reference >configs/reference.yaml writes it anew"
    assert run("config", "reference").stdout == REFERENCE, again


def test_the_reference_is_the_default_configuration() -> None:
    assert load_config(CONFIGS / "reference.yaml", Cell) == Cell()
    written = parse_yaml(REFERENCE, "")
    assert written == yaml.safe_load(to_yaml(Cell().model_dump(mode="json"))), "with every key, also under the defaults"
    assert max(map(len, REFERENCE.splitlines())) <= 120


def models_below(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_below(field.annotation)
    for part in typing.get_args(annotation):
        yield from models_below(part)


def commented_out(lines: list[str]) -> Iterator[list[str]]:
    """The blocks that are commented out, without their first #; also those inside others."""
    for i, line in enumerate(lines):
        if start := re.match(r"( *)#\w+:$", line):
            indent = len(start[1])
            more = lines[i + 1 :]
            length = next((j for j, other in enumerate(more) if not other[indent:].startswith("#  ")), len(more))
            block = [line[indent + 1 :], *(other[indent + 1 :] for other in more[:length])]
            yield block
            yield from commented_out(block)


def test_the_reference_documents_every_key() -> None:
    """Right above each key there is what its model says about it."""
    lines = REFERENCE.splitlines()
    above: dict[str, list[str]] = {}  # what stands above keys of that name
    for block in (lines, *commented_out(lines)):
        comment = ""
        for line in block:
            if text := re.match(r" *# (?! )(.*)", line):
                comment += f" {text[1]}"
            elif key := re.match(r" *(?:- )?(\w+):", line):
                above.setdefault(key[1], []).append(comment)
                comment = ""
    models = set(models_below(Cell))
    assert len(models) >= 27
    for model in models:
        for name, field in model.model_fields.items():
            text_of_it = model.__doc__ if name == "type" else field.description
            assert text_of_it, f"{model.__name__}.{name} has no documentation"
            wanted = " ".join(re.sub(r":\w+:(?=`)", "", text_of_it).replace("``", "`").split())
            assert any(wanted in found for found in above[name]), f"{model.__name__}.{name}"


def test_what_is_commented_out_in_the_reference_can_be_put_in_force() -> None:
    tags: set[str] = set()
    for block in commented_out(REFERENCE.splitlines()):
        ((name, value),) = parse_yaml("\n".join(block), "").items()
        if name == "backend":
            TypeAdapter(Search).validate_python({"type": "search", name: value})
        elif name == "wandb":
            Cell.model_validate({"tracking": {name: value}})
        else:
            Cell.model_validate({name: value})
        values = value if isinstance(value, list) else [value]
        tags |= {f"{name}: {item.get('type')}" for item in values}
    assert tags == {
        *(f"harness: {name}" for name in ("tc_rag", "agentfold", "memexrl", *BLACK_BOXES, "package.module:Name")),
        *(f"method: {name}" for name in ("naive_compressed", "naive_full", "logittree", "sdcc", "package.module:Name")),
        *(f"tools: {name}" for name in ("search", "visit", "package.module:Name")),
        *(f"backend: {name}" for name in ("bm25", "http")),
        "reward: package.module:Name",
        "wandb: None",
    }


# What cannot be trained


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=null"], "model: missing; name the folder of a Hugging Face checkpoint with its tokenizer"),
        (
            ["model=nowhere"],
            "model: there is no folder nowhere; paths count from the folder that the command is run in",
        ),
        (["rollout.questions=null"], "rollout.questions: missing; name a file of JSON lines with question and answers"),
        (["rollout.questions=nowhere.jsonl"], "rollout.questions: there is no file nowhere.jsonl"),
        (
            ["trainer.prompts=4", "rollout.samples=16", "trainer.steps=7"],
            "trainer.steps: 64 rollouts (trainer.prompts 4 x rollout.samples 16) cannot be divided evenly into 7 "
            "steps; use 4 or 8",
        ),
        (
            ["trainer.prompts=3", "rollout.samples=2", "trainer.steps=9"],
            "trainer.steps: 6 rollouts (trainer.prompts 3 x rollout.samples 2) cannot be divided evenly into 9 "
            "steps; use 6",
        ),
        (
            ["rollout.samples=1"],
            "rollout.samples: 1 rollout per question is its own baseline, so all advantages are 0; use at least 2",
        ),
        (
            ["method.packing=union"],
            "method.packing: union is a diagnostic for score and is not exact; use packing trie",
        ),
        (
            ["rollout.temperature=0.7"],
            "rollout.temperature: 0.7: the engine samples from, and logs, the distribution at that temperature, and "
            "the trainer computes the one at 1, so every ratio would be off; use temperature 1",
        ),
        (
            ["rollout.top_p=0.9"],
            "rollout.top_p: 0.9: tokens come from a part of the distribution while log-probabilities are those of all "
            "of it, so that training is off-policy; use top_p 1",
        ),
        (
            ["rollout.top_k=20"],
            "rollout.top_k: 20: tokens come from a part of the distribution while log-probabilities are those of all "
            "of it, so that training is off-policy; use top_k null",
        ),
        (
            ["trainer.tp=4"],
            "trainer: num_key_value_heads is 2, which 4 tensor-parallel ranks do not divide; choose a divisor of 2",
        ),
        (
            ["trainer.pp=4"],
            "trainer: num_hidden_layers is 3, too few for 4 pipeline stages; choose at most 3",
        ),
        (
            ["method=sdcc", "method.top_k=433"],
            "method.top_k: 433 of a vocabulary of 432; leave it out to compare the whole vocabulary",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cell = load_cell(CONFIGS / "quickstart.yaml", overrides)  # which loads: it may be sampled, and scored
    with pytest.raises(ConfigError) as caught:
        check_training(cell)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "overrides",
    [["trainer.cp=2"], ["trainer.tp=2", "trainer.sp=true"], ["trainer.pp=2"], ["method=sdcc", "method.top_k=432"]],
)
def test_what_can_be_trained_is_not(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_training(load_cell(CONFIGS / "quickstart.yaml", overrides))


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "cell.yaml").write_text(f"model: {tmp_path}\nrollout: {{temperature: 0.0, samples: 5}}\n")
    with pytest.raises(ConfigError) as caught:
        check_training(load_config(tmp_path / "cell.yaml", Cell))
    keys = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert keys == ["rollout.questions", "model", "trainer.steps", "rollout.temperature"]
