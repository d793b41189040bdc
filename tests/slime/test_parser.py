"""Every command line goes through slime's own parser, which keeps every flag and finds nothing wrong with it."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from slime_plugin.cluster.arguments import plugin_yaml, slime_flags
from slime_plugin.cluster.flags import known_flags
from slime_plugin.config.overrides import load_cell
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.refusals import args_problems
from tests.conftest import ROOT
from tests.slime.record_flags import FILE, flags
from tests.slime.sources import needs_slime, slime_imports

pytestmark = needs_slime

CELLS = sorted((ROOT / "configs" / "cells").glob("*.yaml"))
NODES = sorted((ROOT / "configs" / "nodes").glob("*.yaml"))


def parse(
    published: Path, config: Path, *settings: str, nodes: Path | None = None, more: tuple[str, ...] = ()
) -> Namespace:
    """The arguments of a job, with the plugin's file written as a launch script writes it."""
    slime_imports()
    from slime_plugin.cluster.driver import parsed

    run = published / "runs" / config.stem
    run.mkdir(parents=True, exist_ok=True)
    cell = load_cell(config, settings, () if nodes is None else (nodes,))
    (run / "plugin.yaml").write_text(plugin_yaml(cell))
    words = [word for flag in slime_flags(cell, run) for word in flag.words]
    args = parsed([*words, *more])
    assert cell_of(args).method == cell.method
    return args


@pytest.mark.parametrize("nodes", NODES, ids=lambda path: f"{path.stem} nodes")
@pytest.mark.parametrize("config", CELLS, ids=lambda path: path.stem)
def test_every_cell_on_every_size(published: Path, monkeypatch: pytest.MonkeyPatch, config: Path, nodes: Path) -> None:
    monkeypatch.chdir(published)
    cell = load_cell(config, (), (nodes,))
    args = parse(published, config, nodes=nodes)
    assert list(args_problems(args)) == []
    trainer = cell.trainer
    assert args.world_size == cell.cluster.trainer_gpus
    assert args.data_parallel_size * trainer.tp * trainer.pp * trainer.cp == cell.cluster.trainer_gpus
    assert args.global_batch_size == trainer.prompts * cell.rollout.samples // trainer.steps
    assert (args.lr, args.eps_clip, args.eps_clip_high) == (1e-6, 0.2, 0.28)
    assert (args.kl_loss_coef, args.kl_loss_type, args.rollout_temperature) == (1e-3, "low_var_kl", 1.0)
    assert (args.attention_dropout, args.hidden_dropout, args.apply_rope_fusion) == (0.0, 0.0, True)
    assert args.padded_vocab_size == args.vocab_size == 151_936


def test_no_flag_is_dropped(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """slime ignores what it does not know; so what it made of each flag is compared with what was said."""
    monkeypatch.chdir(published)
    config = ROOT / "configs" / "cells" / "agentfold-sdcc.yaml"
    settings = ("trainer.pp=2", "trainer.tp=2", "tracking.wandb={}")
    checkpoints = published / "runs" / config.stem / "checkpoints"
    checkpoints.mkdir(parents=True)  # as a job leaves it; without it training begins from the reference
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("9")
    args = parse(published, config, *settings)
    assert args.add_bias_linear is False
    said = slime_flags(load_cell(config, settings), published / "runs" / config.stem)
    elsewhere = {"norm_epsilon": "layernorm_epsilon"}
    for flag in said:
        name = flag.name[2:].replace("-", "_")
        if name == "disable_bias_linear":
            continue  # stored the other way round, under another name
        name = elsewhere.get(name, name)
        value = getattr(args, name)
        if not flag.values:
            assert value is True, flag
        elif isinstance(value, list):
            assert [str(item) for item in value] == list(flag.values), flag
        elif isinstance(value, float):
            assert value == float(flag.values[0]), flag
        else:
            text = re.sub(r"^[A-Za-z]+\.", "", str(value))  # of an enumeration
            assert text == flag.values[0], flag


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--calculate-per-token-loss",), "--calculate-per-token-loss: .* loss weights count rollouts"),
        (("--hidden-dropout", "0.1"), "--hidden-dropout: hidden_dropout is 0.1"),
        (("--custom-convert-samples-to-train-data-path", "a.b"), "slime's own trains the last context alone"),
        (("--custom-reward-post-process-path", "a.b"), "treats all prompts as one group"),
        (("--loss-type", "policy_loss"), "--loss-type: is policy_loss"),
        (("--normalize-advantages",), "advantages are normalised per group"),
        (("--mtp-num-layers", "1"), "--mtp-num-layers"),
        (("--use-tis",), "--use-tis"),
        (("--recompute-loss-function",), "counted twice"),
        (("--make-vocab-size-divisible-by", "128"), "152064 columns for 151936 tokens"),
        (("--num-rollout", "7"), "--num-rollout: is 7, and the cell says trainer.iterations 200"),
        (("--eps-clip", "0.3"), "--eps-clip: is 0.3, and the cell says 0.2"),
        (("--rollout-top-p", "0.9"), "--rollout-top-p"),
        (("--apply-chat-template",), "--apply-chat-template"),
        (("--group-rm",), "--group-rm"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_slime_accepts_and_would_train_wrongly_is_refused(
    published: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(published)
    args = parse(published, ROOT / "configs" / "cells" / "tc_rag-mask4d.yaml", more=more)
    problems = list(args_problems(args))
    assert any(re.search(words, problem) for problem in problems), problems


def test_contiguous_context_parallelism_is_refused_by_slime_itself(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published)
    config = ROOT / "configs" / "cells" / "tc_rag-mask4d.yaml"
    assert list(args_problems(parse(published, config, "trainer.cp=2"))) == []
    with pytest.raises(ValueError, match="--allgather-cp"):
        parse(published, config, "trainer.cp=2", more=("--allgather-cp",))


def test_evaluation_and_replay(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(published)
    config = ROOT / "configs" / "cells" / "tc_rag-mask4d.yaml"
    replayed = parse(published, config, "cluster.replay=runs/other")
    assert (replayed.debug_train_only, replayed.rollout_function_path) == (True, "slime_plugin.hooks.rollout.replay")
    assert replayed.eval_interval is None
    evaluated = parse(published, config)
    assert [(dataset.name, dataset.path) for dataset in evaluated.eval_datasets] == [
        ("dev", f"{published / 'data' / 'dev.jsonl'}@[0:256]")
    ]
    assert (evaluated.eval_datasets[0].input_key, evaluated.eval_datasets[0].label_key) == ("question", "answers")


def test_slime_evaluates_the_first_questions_of_a_file(tmp_path: Path) -> None:
    from slime.utils.data import read_file

    path = tmp_path / "dev.jsonl"
    path.write_text("".join(f'{{"question": "{i}"}}\n' for i in range(300)))
    assert [line["question"] for line in read_file(f"{path}@[0:256]")] == [str(i) for i in range(256)]


def test_the_list_of_flags_is_that_of_the_parser() -> None:
    assert FILE.read_text() == flags()
    assert len(known_flags()) > 1500


def test_one_key_carries_the_whole_cell(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(published)
    cell = load_cell(ROOT / "configs" / "cells" / "memexrl-sdcc.yaml")
    assert list(yaml.safe_load(plugin_yaml(cell))) == ["memorywalker"]
