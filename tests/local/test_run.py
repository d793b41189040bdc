"""A whole run on the real parts, as a user types it: train, compare, report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from slime_plugin.diagnosis import diagnose
from slime_plugin.record import Record, read_records
from slime_plugin.run.evidence import read_starts
from slime_plugin.run.folder import RunFolder
from tests.cli import run
from tests.local.runs import ROLLOUTS, Runs

ITERATIONS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """With an engine, and a checkpoint for every iteration."""
    real_runs: Runs = Runs(tmp_path_factory.mktemp("trained"), None)
    try:
        started = real_runs.start("run", f"trainer.iterations={ITERATIONS}", "trainer.lr=1e-3")
        started.finish()
    finally:
        real_runs.clear()
    return started.folder


def test_an_exact_method_is_at_the_floor_in_every_iteration(trained: RunFolder) -> None:
    lines = [line for line in trained.read_metrics() if line["kind"] == "iteration"]
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    for line in lines:
        assert line["logdiff"]["mean"] < 2e-6
        assert line["logdiff"]["max"] < 2e-4
        assert line["trained"] == line["sampled"] > 0
        assert line["off_context"] == 0
        assert sum(line["statuses"].values()) == ROLLOUTS


def test_every_iteration_is_sampled_by_its_own_weights(trained: RunFolder) -> None:
    """Scored by transformers, the tokens of an iteration fit the weights of that iteration and no others."""
    for iteration in range(ITERATIONS):
        records = list(read_records([trained.rollouts(iteration)]))
        assert {record.meta.weight_version for record in records} == {str(iteration)}
        assert _distance(records, trained.weights(iteration)) < 1e-4
        assert _distance(records, trained.weights((iteration + 1) % ITERATIONS)) > 1e-3


def test_the_exported_weights_are_the_checkpointed_ones(trained: RunFolder) -> None:
    exported = Qwen3ForCausalLM.from_pretrained(trained.weights(ITERATIONS), dtype=torch.float32).state_dict()
    shard = load_file(trained.checkpoints / f"{ITERATIONS:05d}" / "rank-00000.safetensors")
    for name, ours in (("embedding.word_embeddings", "embed_tokens"), ("decoder.final_layernorm", "norm")):
        (saved,) = (value for key, value in shard.items() if ".model." in key and key.endswith(f"{name}.weight"))
        assert torch.equal(saved, exported[f"model.{ours}.weight"])
    begun = Qwen3ForCausalLM.from_pretrained(trained.weights(0), dtype=torch.float32).state_dict()
    moved = float((exported["model.norm.weight"] - begun["model.norm.weight"]).abs().max())
    assert 0 < moved < 0.05, "a few updates of Adam at 1e-3"
    assert (trained.weights(ITERATIONS) / "tokenizer.json").exists(), "whole: it can be served"


def test_it_leaves_evidence_and_nothing_alarming(trained: RunFolder) -> None:
    (start,) = read_starts(trained.path)
    assert start["command"][1:4] == ["train", "configs/quickstart.yaml", "--out"]
    assert start["end"]["how"] == "finished"
    health = json.loads((trained.path / "health.json").read_text())
    assert [line["iteration"] for line in health["iterations"]] == list(range(ITERATIONS))
    first = health["iterations"][0]
    assert (first["reference_kl"], first["ratio"]) == (0, pytest.approx(1, abs=1e-5))
    assert health["memory"]["run_bytes"] > 2**28, "the engine and the rank are counted"
    found = diagnose(trained.path)
    assert found.ok, found.symptoms
    assert found.run.computes_in_bfloat16 == bool(start["gpus"]), "logdiff is measured against the right precision"
    assert found.health["iterations"] == health["iterations"]


def test_compare_and_report(trained: RunFolder) -> None:
    compared = run("compare", str(trained.path), "--repeats", "1")
    assert compared.exit_code == 0, compared.stderr
    methods = json.loads(trained.comparison.read_text())["methods"]
    assert list(methods) == ["naive_compressed", "naive_full", "logittree", "mask4d", "sdcc"]
    for name, method in methods.items():
        assert (method["logdiff"]["mean"] < 2e-6) == (name in ("logittree", "mask4d"))
        assert method["cost"] > 0
    reported = run("report", str(trained.path))
    assert reported.exit_code == 0, reported.stderr
    page = (trained.path / "report.html").read_text()
    assert "mask4d" in page
    elements = re.sub(r"(<script[^>]*>).*?(?=</script>)", r"\1", page, flags=re.DOTALL)
    assert "plotly" in page
    assert "http" not in elements.replace("http-equiv", ""), "nothing is loaded from elsewhere"


def _distance(records: Sequence[Record], weights: Path) -> float:
    """The largest |transformers - logged| over the tokens of the first contexts."""
    model = Qwen3ForCausalLM.from_pretrained(weights, dtype=torch.float32)
    worst = 0.0
    for record in records:
        view = record.view_positions(0)
        tokens = torch.tensor(record.tokens[view])[None].long()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens).logits[0], -1)
        for i, position in enumerate(view.tolist()):
            if record.generated[position]:
                logged = float(record.logprobs[position])
                worst = max(worst, abs(float(logprobs[i - 1, tokens[0, i]]) - logged))
    return worst
