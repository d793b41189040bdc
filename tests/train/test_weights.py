"""Hugging Face checkpoints into a sharded model and out of it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_plugin.architecture import Architecture
from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import ConfigError
from slime_plugin.train.hf_weights import load_weights, save_weights
from slime_plugin.train.pipeline import wrap_for_training
from slime_plugin.train.process_groups import start_groups
from slime_plugin.train.ranks import OnProgress, run_ranks
from tests.train import oracle
from tests.train.conftest import Truth
from tests.train.jobs import Job, load_model


def pass_through(on_progress: OnProgress, job: Job, target: Path) -> None:
    """Through a model that is wrapped for training and was filled once more after that."""
    groups = start_groups(job.parallel)
    architecture = Architecture.read(job.folder)
    model = load_model(job.folder, groups, job.parallel)
    wrapped = wrap_for_training(model.config, [model], groups)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    load_weights(wrapped, architecture, job.folder, groups)
    assert not any((parameter == 7.0).all() for parameter in model.parameters())
    save_weights(wrapped, architecture, target, groups)


SPLITS = [Parallelism(), Parallelism(tp=2), Parallelism(pp=2), Parallelism(tp=2, pp=2)]


@pytest.mark.parametrize("parallel", SPLITS, ids=["one", "tp2", "pp2", "tp2 pp2"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_comes_back_bit_for_bit(
    parallel: Parallelism, tied: bool, truth: Truth, untied: Truth, tmp_path: Path
) -> None:
    source = (truth if tied else untied).folder
    run_ranks(parallel.ranks, pass_through, Job(source, parallel=parallel), tmp_path / "out")
    expected = load_file(source / "model.safetensors")
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert ("lm_head.weight" in found) is not tied
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    shutil.copy(source / "config.json", tmp_path / "out")
    oracle.load_model(tmp_path / "out", torch.float32)  # transformers reads it, index and all


def test_a_saved_model_can_be_loaded_under_another_split(truth: Truth, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(2, pass_through, Job(truth.folder, parallel=Parallelism(pp=2)), first)
    shutil.copy(truth.folder / "config.json", first)
    run_ranks(2, pass_through, Job(first, parallel=Parallelism(tp=2)), second)
    expected = load_file(truth.folder / "model.safetensors")
    found = load_file(second / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def copy(truth: Truth, tmp_path: Path) -> Path:
    return Path(shutil.copytree(truth.folder, tmp_path / "copy"))


def load(folder: Path) -> None:
    run_ranks(1, pass_through, Job(folder), folder / "out")


def test_a_missing_tensor_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight; config\.json asks for it"
    ):
        load(copy)


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \(7,\), by config\.json it should be \(32,\)"):
        load(copy)


def test_a_damaged_file_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read .*; copy it again"):
        load(copy)


def test_a_folder_without_weights_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights have to be in safetensors form"):
        load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; dense Qwen3 models are supported"),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"use_sliding_window": True}, "use_sliding_window is True; only False is supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'; only 'default'"),
        ({"head_dim": None}, "head_dim is None, not a positive whole number"),
        ({"vocab_size": "131"}, "vocab_size is '131', not a positive whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a positive number"),
    ],
)
def test_models_it_would_compute_wrongly_are_refused(copy: Path, change: dict[str, object], message: str) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ConfigError, match=message):
        Architecture.read(copy)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not found; --model takes the folder of a Hugging Face"):
        Architecture.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        Architecture.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        Architecture.read(tmp_path)


def test_older_configurations_keep_rope_at_the_top(copy: Path) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 123456.0}))
    assert Architecture.read(copy).rotary_base == 123456.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 200}, r"embed_tokens\.weight is \(131, 32\), by config\.json it should be \(200, 32\)"),
        ({"num_hidden_layers": 3}, r"the weights have 4 layers, config\.json says 3; they belong to different models"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight is \(16, 32\), by config\.json it should be \(8, 32\)"),
    ],
)
def test_weights_of_another_model_are_refused(copy: Path, change: dict[str, int], message: str) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load(copy)


def test_an_index_that_is_none_is_refused(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 3}}')
    with pytest.raises(ConfigError, match="not an index of safetensors files"):
        load(copy)
