"""``memorywalker score`` and ``probe``: what they print is what transformers computes, one context at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from examples import make_model
from slime_plugin.record import Record, dump_record
from tests.cli import INTERRUPTIBLE, Result, run
from tests.conftest import ROOT
from tests.train import oracle
from tests.train.conftest import Truth

EXACT = [["logittree"], ["mask4d"], ["mask4d", "--packing", "replicated"]]


@dataclass(frozen=True)
class Rolled:
    """Records whose logged log-probabilities are exactly those of the model, written to a file."""

    model: Path
    file: Path
    rollouts: dict[str, oracle.Rollout]

    def score(self, *options: str) -> dict[str, Any]:
        result = run("score", str(self.file), "--model", str(self.model), "--json", *options)
        assert result.exit_code == 0, result.stderr
        value: dict[str, Any] = json.loads(result.stdout)
        return value


@pytest.fixture(scope="session")
def rolled(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    model = oracle.load_model(truth.folder, torch.float64)
    file = tmp_path_factory.mktemp("rolled") / "rollouts.jsonl"
    rollouts = {}
    with torch.no_grad(), file.open("w") as lines:
        for rollout in truth.rollouts:
            logprobs = np.full(len(rollout.record), np.nan, dtype=np.float32)
            for position, (token, logits) in oracle.score_live(model, rollout).items():
                logprobs[position] = torch.log_softmax(logits, -1)[token]
            old = rollout.record
            record = Record(old.tokens, old.generated, logprobs, old.views, old.edits, old.meta)
            lines.write(dump_record(record) + "\n")
            rollouts[str(record.meta.id)] = oracle.Rollout(record, rollout.live)
    return Rolled(truth.folder, file, rollouts)


@pytest.mark.parametrize("method", EXACT, ids=" ".join)
@pytest.mark.parametrize("split", [[], ["--tp", "2", "--pp", "2", "--sp"], ["--cp", "2"]], ids=" ".join)
def test_exact_methods_sit_at_the_floor(rolled: Rolled, method: list[str], split: list[str]) -> None:
    value = rolled.score("--method", *method, *split)
    summary = value["summary"]
    assert summary["tokens"] == summary["sampled"] == len(value["tokens"])
    assert summary["lost"] == {}
    assert summary["logdiff"]["mean"] < 1e-6
    assert summary["logdiff"]["max"] < 5e-6
    for token in value["tokens"]:
        logged = rolled.rollouts[token["record"]].record.logprobs[token["tape"]]
        assert token["rollout_logprob"] == pytest.approx(float(logged))
        assert token["train_logprob"] == pytest.approx(float(logged), abs=1e-5)


def test_every_sampled_token_is_there_once(rolled: Rolled) -> None:
    found = [(token["record"], token["tape"]) for token in rolled.score("--method", "mask4d")["tokens"]]
    sampled = [
        (name, int(p)) for name, rollout in rolled.rollouts.items() for p in np.flatnonzero(rollout.record.generated)
    ]
    assert sorted(found) == sorted(sampled)


@pytest.mark.parametrize("method", ["naive_compressed", "sdcc"])
def test_the_compressed_walk_is_off_at_diverging_leaves_and_nowhere_else(rolled: Rolled, method: str) -> None:
    for token in rolled.score("--method", method)["tokens"]:
        logdiff = abs(token["train_logprob"] - token["rollout_logprob"])
        leaves = oracle.diverging(rolled.rollouts[token["record"]])
        assert (logdiff > 1e-4) == (token["tape"] in leaves), token


def test_naive_full_is_off_where_it_sees_what_was_evicted(rolled: Rolled) -> None:
    for token in rolled.score("--method", "naive_full")["tokens"]:
        rollout = rolled.rollouts[token["record"]]
        stale = rollout.live[token["tape"]] != tuple(rollout.record.tokens[: token["tape"]].tolist())
        logdiff = abs(token["train_logprob"] - token["rollout_logprob"])
        assert (logdiff > 1e-4) == stale, token


def test_the_summary_is_that_of_its_tokens(rolled: Rolled) -> None:
    value = rolled.score("--method", "sdcc")
    summary = value["summary"]
    gaps = [token["train_logprob"] - token["rollout_logprob"] for token in value["tokens"]]
    assert summary["logdiff"]["mean"] == pytest.approx(np.mean(np.abs(gaps)))
    assert summary["logdiff"]["max"] == pytest.approx(np.max(np.abs(gaps)))
    assert summary["k3"] == pytest.approx(np.mean([math.exp(-g) + g - 1 for g in gaps]))
    assert summary["tokens"] + sum(summary["lost"].values()) == summary["sampled"]
    assert sum(place["tokens"] for place in summary["places"].values()) == summary["tokens"]
    assert sum(junction["tokens"] for junction in summary["junctions"]) == summary["tokens"]
    assert summary["leaves"]["number"] == sum(len(oracle.diverging(r)) for r in rolled.rollouts.values())
    assert summary["leaves"]["kl_mean"] > 0


def test_leaf_kls_are_whole_however_ranks_share_them(rolled: Rolled) -> None:
    alone, shared = (rolled.score("--method", "sdcc", *split)["summary"]["leaves"] for split in ([], ["--cp", "2"]))
    assert shared == pytest.approx(alone, rel=1e-4)


def test_without_json_a_person_can_read_it(rolled: Rolled) -> None:
    result = run("score", str(rolled.file), "--model", str(rolled.model), "--method", "sdcc")
    assert result.exit_code == 0, result.stderr
    for expected in (
        "sdcc on ",
        "before any edit",
        "after pop, first 16",
        "diverging leaves: KL(live || compressed)",
        "not trained:",
    ):
        assert expected in result.stdout


def probe(rolled: Rolled, *options: str) -> Result:
    return run("probe", str(rolled.file), "--model", str(rolled.model), *options)


def test_the_probe_measures_both_pitfalls(rolled: Rolled, tmp_path: Path) -> None:
    result = probe(rolled, "--json", "--plot", str(tmp_path / "probe.svg"))
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout).values()
    model = oracle.load_model(rolled.model, torch.float64)
    comp, full = [], []
    with torch.no_grad():
        for rollout in rolled.rollouts.values():
            live, compressed = oracle.score_live(model, rollout), oracle.score_compressed(model, rollout)
            for position in oracle.diverging(rollout):
                comp.append(_logprob(compressed[position]) - _logprob(live[position]))
            for position, context in rollout.live.items():
                trace = tuple(rollout.record.tokens[:position].tolist())
                if context and trace != context:
                    token = int(rollout.record.tokens[position])
                    full.append(_logprob((token, _logits(model, trace))) - _logprob(live[position]))
    shares = {"comp": ("below 0", np.array(comp) < 0), "full": ("above 0", np.array(full) > 0)}
    for which, values in (("comp", comp), ("full", full)):
        share, right = shares[which]
        expected = {"n": len(values), "mean": np.mean(values), share: right.mean()}
        assert found[which] == pytest.approx(expected, abs=1e-5)
    drawing = ElementTree.fromstring((tmp_path / "probe.svg").read_text())
    texts = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert f"mean {np.mean(comp):+.3g}, n {len(comp)}" in texts


def test_the_probe_prints_the_table_and_a_plot(rolled: Rolled) -> None:
    result = probe(rolled)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"harness +n +mean delta_comp +below 0 +n +mean delta_full +above 0", result.stdout)
    assert "predicted" in result.stdout
    assert "█" in result.stdout


def _logprob(scored: tuple[int, torch.Tensor]) -> float:
    token, logits = scored
    return float(torch.log_softmax(logits, -1)[token])


def _logits(model: Qwen3ForCausalLM, context: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(context)])).logits[0, -1]
    return logits


def test_a_token_outside_the_vocabulary_is_named_before_any_work(rolled: Rolled) -> None:
    memex = str(ROOT / "examples/records/offload_and_restore.json")
    result = run("score", memex, "--model", str(rolled.model), "--method", "mask4d")
    assert result.exit_code == 1
    assert re.search(r"token \d+ has id \d+, the vocabulary of .* has 131; score it with the model", result.stderr)


def test_splits_that_do_not_divide_are_told_without_a_traceback(rolled: Rolled) -> None:
    result = run("score", str(rolled.file), "--model", str(rolled.model), "--method", "mask4d", "--pp", "5")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: num_hidden_layers is 4, too few for 5 pipeline stages; choose at most 4\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "Error: num_attention_heads is 4, which 3 tensor-parallel ranks do not divide"),
        (
            ["--sp"],
            "Error: sp: sequence parallelism splits activations over tensor-parallel ranks; with tp 1",
        ),
        (["--model", "nowhere"], "Directory 'nowhere' does not exist"),
    ],
)
def test_what_cannot_work_is_refused_without_loading_torch(rolled: Rolled, options: list[str], message: str) -> None:
    command = ["score", str(rolled.file), "--model", str(rolled.model), "--method", "mask4d", *options]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert message in done.stderr


def test_a_model_that_gives_no_numbers_is_named(rolled: Rolled, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(rolled.model, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    result = run("score", str(rolled.file), "--model", str(broken), "--method", "mask4d", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no finite log-probability; are the weights" in result.stderr


def test_top_k_of_the_configuration_coarsens_the_kl(rolled: Rolled, tmp_path: Path) -> None:
    config = tmp_path / "cell.yaml"
    config.write_text("method: {type: sdcc, top_k: 2}\n")
    coarse = rolled.score("--config", str(config))["summary"]["leaves"]
    whole = rolled.score("--method", "sdcc")["summary"]["leaves"]
    assert 0 < coarse["kl_mean"] < whole["kl_mean"]


@pytest.mark.parametrize("processes", [2, 5], ids=["while ranks are started", "while they compute"])
def test_an_interrupt_ends_every_process(rolled: Rolled, tmp_path: Path, processes: int) -> None:
    """There are the command, Python's resource tracker, the server that ranks are forked from, and two ranks."""
    many = tmp_path / "many.jsonl"
    many.write_text(rolled.file.read_text() * 400)
    command = ["score", str(many), "--model", str(rolled.model), "--method", "logittree", "--tp", "2"]
    process = subprocess.Popen(
        [*INTERRUPTIBLE, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while in_session(process.pid) < processes:
        assert process.poll() is None, "it has ended by itself: make it longer"
        time.sleep(0.05)
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr.strip()) == (130, "Interrupted")
    while in_session(process.pid):  # a process that stays makes this test hang, and so fail
        time.sleep(0.05)


def in_session(leader: int) -> int:
    """How many processes there are in a session, zombies aside."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            count += int(session) == leader and state != "Z"
    return count


def test_union_and_context_parallelism_do_not_go_together(rolled: Rolled) -> None:
    options = ("--method", "mask4d", "--packing", "union", "--cp", "2")
    result = run("score", str(rolled.file), "--model", str(rolled.model), *options)
    assert result.exit_code == 1
    assert "needs position ids and no context parallelism; set cp to 1" in result.stderr


def test_damaged_records_are_left_out_and_counted(rolled: Rolled, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(rolled.file.read_text() + "{broken\n")
    result = run("score", str(mixed), "--model", str(rolled.model), "--method", "mask4d", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["summary"]["records"] == len(rolled.rollouts)
    assert result.stderr.startswith("Error: ")


def test_the_example_model_scores_the_example_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model.main(tmp_path)
    assert Qwen3ForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 4
    records = [str(path) for path in sorted((ROOT / "examples/records").iterdir())]
    result = run("probe", *records, "--model", str(tmp_path), "--json")
    assert result.exit_code == 0, result.stderr
    assert list(json.loads(result.stdout)) == ["memexrl", "tc_rag"]


WITHOUT_TORCH = (
    "import sys; from slime_plugin.cli.main import main\n"
    "try: main(sys.argv[1:])\n"
    "finally: sys.exit(bool({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
)


def test_help_and_light_commands_import_no_torch() -> None:
    for command in (["--help"], ["score", "--help"], ["probe", "--help"], ["layout", "--help"]):
        done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, check=False)
        assert done.returncode == 0


@pytest.mark.parametrize("columns", ["60", "80"])
def test_the_plot_fits_the_terminal(rolled: Rolled, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = probe(rolled).stdout.splitlines()
    plot = [line for line in lines if "delta_comp " in line and "█" in line]
    assert len(plot) == 1
    assert max(map(len, lines)) <= int(columns)
