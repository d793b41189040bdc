"""The model that a GPU gets, with Transformer Engine's layers: parameters, checkpoints, losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime_plugin.architecture import PUBLISHED
from slime_plugin.config.method import LogitTree, Mask4d
from slime_plugin.config.parallel import Parallelism
from tests.train import te_reference
from tests.train.conftest import Truth
from tests.train.jobs import distilling
from tests.train.test_exact import DISTIL, SPLITS, TOLERANCE, together, worst

WORLD = "tests.train.te_world"
METHODS = [LogitTree(), Mask4d(), distilling(DISTIL)]


def hugging_face(model: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, by transformers."""
    shape = PUBLISHED[model]
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        state = Qwen3ForCausalLM(config).state_dict()  # type: ignore[no-untyped-call]  # transformers'
    return {name: tuple(x.shape) for name, x in state.items() if not (shape.tied and name == "lm_head.weight")}


PUBLISHED_SPLITS = {
    "Qwen3-0.6B": Parallelism(),
    "Qwen3-4B": Parallelism(tp=2, sp=True),
    "Qwen3-8B": Parallelism(tp=2, pp=2),
    "Qwen3-14B": Parallelism(pp=2),
}


def test_every_parameter_of_published_models_has_its_place() -> None:
    calls = [("describe", parallel.ranks, (model, parallel)) for model, parallel in PUBLISHED_SPLITS.items()]
    results: list[list[list[te_reference.Described]]] = te_reference.run_calls(WORLD, *calls)
    for (model, parallel), ranks in zip(PUBLISHED_SPLITS.items(), results, strict=True):
        found: dict[str, tuple[int, ...]] = {}
        for parameter in (parameter for rank in ranks for parameter in rank):
            assert parameter.shape == parameter.cut, parameter
            found |= dict(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
            split = parameter.name.endswith(".weight") and "norm" not in parameter.name
            assert parameter.marks.get("tensor_model_parallel", False) is split, parameter
            dimension = 1 if parameter.name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
            assert not split or parameter.marks["partition_dim"] == dimension, parameter
            assert split or bool(parameter.marks["sequence_parallel"]) is parallel.sp, parameter
        assert found == hugging_face(model)
        layer = {parameter.name.split(".", 3)[3] for parameter in ranks[0] if ".layers.0." in parameter.name}
        assert layer == {
            "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "self_attention.q_layernorm.weight",
            "self_attention.k_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        }


def test_every_tensor_comes_back_bit_for_bit(truth: Truth, untied: Truth, tmp_path: Path) -> None:
    cases = [
        (source.folder, parallel, tmp_path / f"{source.folder.name}-{parallel.ranks}")
        for source in (truth, untied)
        for parallel in (Parallelism(), Parallelism(tp=2, pp=2))
    ]
    te_reference.run_calls(WORLD, *(("pass_through", case[1].ranks, case) for case in cases))
    for source, _, target in cases:
        expected = load_file(source / "model.safetensors")
        found = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


FAST = ("tp2 pp2 sp recompute", "cp2")


@pytest.mark.parametrize("splits", [FAST, pytest.param(tuple(set(SPLITS) - set(FAST)), marks=pytest.mark.slow)])
def test_losses_and_gradients(splits: tuple[str, ...], truth: Truth) -> None:
    """In float32, because fused RoPE reads no other table."""
    expected = [truth.exact(torch.float32)] * 2 + [truth.distilled(torch.float32, DISTIL)]
    calls = []
    for split in splits:
        settings, replicas = SPLITS[split]
        job = truth.job(dtype=torch.float32, transformer_engine=True, **settings)
        calls.append(("update", job.parallel.ranks * replicas, (job, METHODS)))
    results = te_reference.run_calls(WORLD, *calls)
    for split, ranks in zip(splits, results, strict=True):
        for i, (loss, gradients) in enumerate(expected):
            outcome = together([rank[i] for rank in ranks])
            assert outcome.sums["loss"] == pytest.approx(loss, rel=TOLERANCE[torch.float32]), split
            assert worst(outcome, gradients)[0] < TOLERANCE[torch.float32], (split, worst(outcome, gradients))
