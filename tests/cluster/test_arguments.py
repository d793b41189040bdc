"""A cell as slime's command line: every flag is one of slime's, and none can be given in two places."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from slime_plugin.architecture import PUBLISHED, Architecture
from slime_plugin.cluster.arguments import plugin_yaml, slime_flags
from slime_plugin.cluster.flags import check_command_line, known_flags
from slime_plugin.cluster.job_problems import job_problems
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError
from slime_plugin.slime.args import KEY, cell_of
from tests.cli import run
from tests.cluster.parsed import parsed
from tests.conftest import ROOT

CELLS = sorted((ROOT / "configs" / "cells").glob("*.yaml"))
CELL = ROOT / "configs" / "cells" / "agentfold-sdcc.yaml"


def words(cell: Cell, folder: Path = Path("runs/x")) -> list[str]:
    return [word for flag in slime_flags(cell, folder) for word in flag.words]


def value_of(cell: Cell, name: str) -> str:
    (flag,) = [flag for flag in slime_flags(cell, Path("runs/x")) if flag.name == f"--{name}"]
    return " ".join(flag.values)


@pytest.mark.parametrize("path", CELLS, ids=lambda path: path.stem)
def test_every_flag_of_every_cell_is_one_of_slimes(path: Path) -> None:
    said = words(load_cell(path))
    check_command_line(said)
    names = [word for word in said if word.startswith("--")]
    assert len(names) == len(set(names))


def test_the_settings_of_the_paper_are_on_it() -> None:
    cell = load_cell(CELL)
    expected = {
        "num-rollout": "200",
        "rollout-batch-size": "4",
        "n-samples-per-prompt": "16",
        "num-steps-per-rollout": "8",
        "global-batch-size": "8",
        "lr": "1e-06",
        "weight-decay": "0.01",
        "adam-beta2": "0.98",
        "kl-loss-coef": "0.001",
        "kl-loss-type": "low_var_kl",
        "eps-clip": "0.2",
        "eps-clip-high": "0.28",
        "rollout-temperature": "1",
        "num-layers": "36",
        "hidden-size": "2560",
        "kv-channels": "128",
        "hidden-dropout": "0",
    }
    assert {name: value_of(cell, name) for name in expected} == expected
    said = words(cell)
    assert "--colocate" in said
    assert "--rollout-num-gpus" not in said
    (carried,) = yaml.safe_load(plugin_yaml(cell)).values()
    assert (carried["method"]["weight"], carried["method"]["warmup"], carried["rollout"]["turns"]) == (0.1, 0.2, 30)
    assert carried["tools"][0]["top_k"] == 3


def test_evaluations_are_bounded(tmp_path: Path) -> None:
    """slime takes a slice of a file behind an @."""
    cell = load_cell(CELL, (f"evaluation.questions={tmp_path / 'dev.jsonl'}",))
    assert value_of(cell, "eval-prompt-data") == f"dev {tmp_path / 'dev.jsonl'}@[0:256]"
    assert "--skip-eval-before-train" not in words(cell)
    whole = cell.model_copy(
        update={"evaluation": cell.evaluation.model_copy(update={"limit": None, "at_start": False})}
    )
    assert value_of(whole, "eval-prompt-data") == f"dev {tmp_path / 'dev.jsonl'}"
    assert "--skip-eval-before-train" in words(whole)
    evaluating = slime_flags(cell, Path("runs/x"), "evaluate")
    (questions,) = [flag.values for flag in evaluating if flag.name == "--eval-prompt-data"]
    assert [*questions] == ["dev", str(tmp_path / "dev.jsonl")]  # all of them
    assert "--skip-eval-before-train" not in [flag.name for flag in evaluating]


@pytest.mark.parametrize(
    ("offered", "policy"),
    [(None, "cache_aware"), (["random", "cache_aware"], "cache_aware"), (["consistent_hashing"], "consistent_hashing")],
)
def test_routing_is_what_the_router_can_do(
    offered: list[str] | None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_router"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "sglang_router"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is only read')\n")
    if offered is not None:
        (package / "router_args.py").write_text(f"choices={offered!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert value_of(load_cell(CELL), "router-policy") == policy


def test_the_log_probability_passes_of_slime_work_in_chunks() -> None:
    """Otherwise they hold a second copy of the logits of a whole row."""
    assert value_of(load_cell(CELL), "log-probs-chunk-size") == "4096"
    assert value_of(load_cell(CELL, ("cluster.flags={log-probs-chunk-size: 512}",)), "log-probs-chunk-size") == "512"


def test_engines_of_their_own() -> None:
    cell = load_cell(CELL, ("cluster.nodes=4", "cluster.rollout_nodes=3", "cluster.engine_gpus=2"))
    said = words(cell)
    assert "--colocate" not in said
    assert (value_of(cell, "rollout-num-gpus"), value_of(cell, "actor-num-nodes")) == ("24", "1")
    assert value_of(cell, "sglang-server-concurrency") == "6", "64 rollouts on 12 engines"


def test_paths_are_absolute_wherever_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cell = load_cell(
        CELL,
        ("tools=[{type: search, backend: {type: bm25, corpus: data/corpus.jsonl}}]", "evaluation.questions=dev.jsonl"),
    )
    carried = yaml.safe_load(plugin_yaml(cell))[KEY]
    assert carried["model"] == str(tmp_path / "models" / "Qwen3-4B")
    assert carried["tools"][0]["backend"]["corpus"] == str(tmp_path / "data" / "corpus.jsonl")
    assert carried["evaluation"]["questions"] == str(tmp_path / "dev.jsonl")
    assert value_of(cell, "prompt-data") == str(tmp_path / "data" / "train.jsonl")
    assert value_of(cell, "save") == str(tmp_path / "runs" / "x" / "checkpoints")


def test_further_flags_are_checked() -> None:
    cell = load_cell(CELL, ("cluster.flags={log-multi-turn: true, eval-function-path: a.b, use-wandb: false}",))
    said = words(cell)
    assert "--log-multi-turn" in said
    assert "--use-wandb" not in said
    assert said[said.index("--eval-function-path") + 1] == "a.b"
    for settings, message in (
        (
            "cluster.flags={log-pasrate: true}",
            r"cluster\.flags\.log-pasrate: slime has no flag --log-pasrate; use .*--log-passrate",
        ),
        ("cluster.flags={lr: 0.1}", r"cluster\.flags\.lr: --lr is set by the cell \(trainer\.lr\); leave it out"),
        ("cluster.flags={log-multi-turn: 3}", "--log-multi-turn takes 0 values and has 1"),
        ("cluster.flags={wandb-host: true}", "--wandb-host takes 1 value and has 0"),
        ("cluster.flags={wandb-key: secret}", "give it by an environment variable"),
        ("cluster.flags={sglang-api-key: secret}", "give it by an environment variable"),
    ):
        with pytest.raises(ConfigError, match=message):
            words(load_cell(CELL, (settings,)))


def test_a_misspelt_word_of_a_command_line_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no flag --num-rolout; use '--num-rollout'"):
        check_command_line(["--num-rolout", "3"])
    with pytest.raises(ConfigError, match="belongs to no flag"):
        check_command_line(["3"])
    check_command_line(["--eval-prompt-data", "dev", "dev.jsonl", "--seed=3"])
    assert known_flags()["--eval-prompt-data"] == "+"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("trainer.tp=3",), "num_attention_heads is 32, which 3 tensor-parallel ranks do not divide"),
        (("trainer.pp=3",), r"tp 4 x pp 3 x cp 1 = 12 ranks do not divide the 8 GPUs that train; use 8"),
        (("trainer.steps=7",), r"64 rollouts .* cannot be divided evenly into 7 steps; use 4 or 8"),
        (("trainer.steps=64",), r"1 rollouts per step .* for 2 replicas that need 2"),
        (("cluster.nodes=3",), "8 rollouts per step cannot be divided evenly among 6 replicas"),
        (("trainer.lr_warmup=1600",), "1600 of 1600 update steps; it has to end before the job does"),
        (("trainer.dp=3",), "trainer.dp: 3, but 8 GPUs of 4 ranks each are 2 replicas"),
        (("trainer.dtype=float32",), "slime trains in bfloat16"),
        (("engine.url=http://127.0.0.1:1",), "slime starts its engines itself"),
        (("method.ema=0.9",), "slime's checkpoints do not hold the moving average"),
        (("rollout.temperature=0.7",), "use temperature 1"),
        (("method={type: mask4d, packing: union}",), "union is a diagnostic"),
        (("method={type: 'examples.methods.last_branch:LastBranch', max_logdif: 2}",), "method: max_logdif: unknown"),
        (
            ("cluster.engine_gpus=8", "cluster.gpus=24", "trainer.tp=1", "trainer.sp=false", "cluster.engine_gpus=3"),
            "3 GPUs and 8 key-value heads",
        ),
    ],
)
def test_what_cannot_be_run_is_told_with_its_key(settings: tuple[str, ...], message: str) -> None:
    problems = "\n".join(job_problems(load_cell(CELL, settings)))
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(problems)


def test_the_cells_themselves_can_be_run() -> None:
    for path in CELLS:
        assert list(job_problems(load_cell(path))) == [], path


def test_published_models_have_the_parameters_they_are_named_after() -> None:
    assert PUBLISHED["Qwen3-4B"].parameters == 4_022_468_096
    for name, billions in (("0.6", 0.596), ("1.7", 1.721), ("8", 8.191), ("14", 14.768), ("32", 32.762)):
        assert PUBLISHED[f"Qwen3-{name}B"].parameters == pytest.approx(billions * 1e9, rel=1e-3)
    with pytest.raises(ConfigError, match="not found"):
        Architecture.of(Path("models/Nobody-9B"))


class TestCommand:
    def test_it_prints_one_line_for_a_shell(self) -> None:
        result = run("slime-args", str(CELL), "trainer.iterations=7")
        assert result.exit_code == 0
        (line,) = result.stdout.splitlines()
        assert shlex.split(line) == words(load_cell(CELL, ("trainer.iterations=7",)), Path("runs/agentfold-sdcc"))
        assert "Missing: model: there is no folder models/Qwen3-4B" in result.stderr

    def test_it_explains_every_flag(self) -> None:
        result = run("slime-args", str(CELL), "--explain")
        assert result.exit_code == 0
        for flag in slime_flags(load_cell(CELL), Path("runs/x")):
            assert flag.name in result.stdout
            assert flag.why in result.stdout

    def test_it_writes_what_the_plugin_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        megatron = tmp_path / "megatron"
        megatron.mkdir()
        out = tmp_path / "run"
        config = "configs/quickstart.yaml"
        sized = (f"cluster.megatron={megatron}", "trainer.steps=1")
        result = run("slime-args", config, *sized, "--out", str(out), "--write", "--lines")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines() == words(load_cell(config, sized), out)
        args = parsed(load_cell(config, sized), out)
        assert cell_of(args).harness.type == "agentfold"
        assert yaml.safe_load((out / "plugin.yaml").read_text()) == {KEY: getattr(args, KEY)}

    def test_it_writes_nothing_if_something_is_missing(self, tmp_path: Path) -> None:
        result = run("slime-args", str(CELL), "--out", str(tmp_path / "run"), "--write")
        assert result.exit_code == 1
        assert "there is no folder models/Qwen3-4B" in result.stderr
        assert not (tmp_path / "run").exists()

    def test_a_size_is_another_file(self) -> None:
        overlay = ROOT / "configs" / "nodes" / "4.yaml"
        result = run("slime-args", str(CELL), "--with", str(overlay), "--lines")
        said = result.stdout.splitlines()
        assert said[said.index("--actor-num-nodes") + 1] == "4"
        shown = run("config", "show", str(CELL), "--with", str(overlay))
        assert yaml.safe_load(shown.stdout)["cluster"]["nodes"] == 4

    def test_an_agent_that_is_not_installed_is_missing_here(self, tmp_path: Path) -> None:
        cell = str(ROOT / "configs" / "cells" / "claude_code-sdcc.yaml")
        result = run("slime-args", cell, "harness.program=nowhere")
        assert result.exit_code == 0
        assert "Missing: harness.program: nowhere is not an executable" in result.stderr
        assert run("slime-args", cell, "--write", "--out", str(tmp_path / "x")).exit_code == 1

    def test_wrong_settings_are_told_all_at_once(self) -> None:
        result = run("slime-args", str(CELL), "trainer.dtype=float32", "rollout.temperature=0.5")
        assert result.exit_code == 1
        assert result.stderr.count("Error: ") == 2
        assert json.dumps(str(CELL))[1:-1] in result.stderr
