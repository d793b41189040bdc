"""Hugging Face Qwen3 checkpoints into and out of the sharded model, for any tensor and pipeline parallelism.

Megatron fuses matrices that read the same input and splits them over the tensor-parallel group. Each entry below says
how one Megatron parameter is cut out of the full Hugging Face matrices, and how the cuts of all ranks are put together
again. Legend: tp ranks, h hidden size, V vocabulary, f feed-forward size, d head size.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime_plugin.architecture import Architecture
from slime_plugin.errors import ConfigError
from slime_plugin.train.tree_model import unwrapped

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Slot:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    parameter: torch.nn.Parameter
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the full tensors."""
    cut: Callable[[Sequence[Tensor], int, int], Tensor]
    """(full tensors, tensor-parallel rank, tp) -> this rank's parameter"""
    join: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    """The parameters of all tensor-parallel ranks -> full tensors"""


def slots_of(models: Sequence[torch.nn.Module], architecture: Architecture) -> Iterator[Slot]:
    """Yield every parameter of this rank. A tied output layer on another stage than the embedding is a copy of it."""
    for model in models:
        inner = unwrapped(model)
        for name, parameter in inner.named_parameters():
            yield _slot(inner, name, parameter, architecture)


def load_weights(
    models: Sequence[torch.nn.Module], architecture: Architecture, folder: Path, groups: ProcessGroupCollection
) -> None:
    """Fill the model from safetensors files. Each rank reads the tensors of its own layers and keeps its part."""
    files = _tensor_files(folder)
    _check_layers(files, architecture, folder)
    with torch.no_grad():
        for slot in slots_of(models, architecture):
            full = [_read(files, name, folder) for name in slot.names]
            for name, tensor, shape in zip(slot.names, full, slot.shapes, strict=True):
                if tensor.shape != shape:
                    raise ConfigError(
                        f"{folder}: {name} is {tuple(tensor.shape)}, by config.json it should be {shape}; "
                        "they belong to different models"
                    )
            slot.parameter.copy_(slot.cut(full, groups.tp.rank(), groups.tp.size()))


def save_weights(
    models: Sequence[torch.nn.Module], architecture: Architecture, folder: Path, groups: ProcessGroupCollection
) -> None:
    """Write the model as safetensors, one file per pipeline stage, with the index that ties them together.

    Collective over the tensor- and pipeline-parallel groups of the first replica; other replicas return at once. The
    index is written last and marks the folder as complete.
    """
    if groups.dp_cp.rank() != 0:
        return
    stage, stages = groups.pp.rank(), groups.pp.size()
    tensors = {
        name: tensor.contiguous().cpu()
        for name, tensor in gather_tensors(models, architecture, groups, lambda p: p.detach()).items()
        if stage == 0 or name != "model.embed_tokens.weight"  # the last stage has a copy of it if it is tied
    }
    file = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors" if stages > 1 else _SINGLE
    if groups.tp.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    held: list[dict[str, str]] = [{} for _ in range(stages)]
    dist.all_gather_object(held, dict.fromkeys(tensors, file), group=groups.pp)
    if groups.tp.rank() == 0 and stage == 0 and stages > 1:
        index = {"metadata": {}, "weight_map": {name: where for part in held for name, where in part.items()}}
        (folder / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def gather_tensors(
    models: Sequence[torch.nn.Module],
    architecture: Architecture,
    groups: ProcessGroupCollection,
    value: Callable[[torch.nn.Parameter], Tensor],
) -> dict[str, Tensor]:
    """Return this stage's full tensors by Hugging Face name, on every tensor-parallel rank.

    ``value`` selects what of a parameter is gathered: itself, its gradient, its moving average.
    """
    full: dict[str, Tensor] = {}
    for slot in slots_of(models, architecture):
        mine = value(slot.parameter).contiguous()
        parts = [torch.empty_like(mine) for _ in range(groups.tp.size())]
        dist.all_gather(parts, mine, group=groups.tp)
        full.update(zip(slot.names, slot.join(parts), strict=True))
    return full


def _slot(model: Any, name: str, parameter: torch.nn.Parameter, shape: Architecture) -> Slot:
    if name == "embedding.word_embeddings.weight":
        return _vocabulary_slot(parameter, "model.embed_tokens.weight", shape)
    if name == "output_layer.weight":
        return _vocabulary_slot(parameter, "model.embed_tokens.weight" if shape.tied else "lm_head.weight", shape)
    if name.startswith("decoder.final_layernorm."):
        return _copied_slot(parameter, "model.norm.weight", shape.hidden)
    _, _, index, rest = name.split(".", 3)  # decoder.layers.<index>.<rest>
    prefix = f"model.layers.{model.decoder.layers[int(index)].layer_number - 1}"  # counted over all stages, from 1
    width, inner = shape.heads * shape.head_size, shape.groups * shape.head_size
    if rest in _NORMS:
        return _copied_slot(parameter, f"{prefix}.{_NORMS[rest]}", shape.hidden)
    if rest in _HEAD_NORMS:
        return _copied_slot(parameter, f"{prefix}.{_HEAD_NORMS[rest]}", shape.head_size)
    if rest == "self_attention.linear_proj.weight":
        return _split_input_slot(parameter, f"{prefix}.self_attn.o_proj.weight", (shape.hidden, width))
    if rest == "mlp.linear_fc2.weight":
        return _split_input_slot(parameter, f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.feed_forward))
    if rest == "mlp.linear_fc1.weight":
        names = tuple(f"{prefix}.mlp.{x}_proj.weight" for x in ("gate", "up"))
        matrix = (shape.feed_forward, shape.hidden)
        return Slot(parameter, names, (matrix, matrix), _cut_side_by_side, _join_side_by_side)
    if rest == "self_attention.linear_qkv.weight":
        names = tuple(f"{prefix}.self_attn.{x}_proj.weight" for x in "qkv")
        shapes = tuple((rows, shape.hidden) for rows in (width, inner, inner))
        cut = functools.partial(_cut_qkv, shape)
        return Slot(parameter, names, shapes, cut, functools.partial(_join_qkv, shape))
    raise ConfigError(f"parameter {name} has no place in a Hugging Face Qwen3 checkpoint")


# The names of the norms depend on whether Transformer Engine fuses them into the linear layer that follows.
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_HEAD_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


def _copied_slot(parameter: torch.nn.Parameter, name: str, size: int) -> Slot:
    return Slot(parameter, (name,), ((size,),), lambda full, rank, tp: full[0], lambda parts: (parts[0],))


def _split_input_slot(parameter: torch.nn.Parameter, name: str, shape: tuple[int, int]) -> Slot:
    def cut(full: Sequence[Tensor], rank: int, tp: int) -> Tensor:
        return full[0].chunk(tp, dim=1)[rank]

    return Slot(parameter, (name,), (shape,), cut, lambda parts: (torch.cat(list(parts), dim=1),))


def _vocabulary_slot(parameter: torch.nn.Parameter, name: str, shape: Architecture) -> Slot:
    """[V, h] padded with zero rows and split by rows."""

    def cut(full: Sequence[Tensor], rank: int, tp: int) -> Tensor:
        rows = len(parameter)
        part = full[0][rank * rows : (rank + 1) * rows]
        return torch.cat((part, part.new_zeros(rows - len(part), part.shape[1])))

    def join(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(parts))[: shape.vocabulary],)

    return Slot(parameter, (name,), ((shape.vocabulary, shape.hidden),), cut, join)


def _cut_side_by_side(full: Sequence[Tensor], rank: int, tp: int) -> Tensor:
    """Gate [f, h] and up [f, h]: each rank has its rows of both, gate first."""
    return torch.cat([matrix.chunk(tp)[rank] for matrix in full])


def _join_side_by_side(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    halves = [part.chunk(2) for part in parts]
    return tuple(torch.cat([half[i] for half in halves]) for i in range(2))


def _cut_qkv(shape: Architecture, full: Sequence[Tensor], rank: int, tp: int) -> Tensor:
    """Megatron keeps, for each key-value head in turn, its query heads, the key head and the value head together."""
    by_group = [matrix.view(shape.groups, -1, shape.hidden) for matrix in full]  # [groups, rows, h]
    return torch.cat(by_group, dim=1).chunk(tp)[rank].reshape(-1, shape.hidden)


def _join_qkv(shape: Architecture, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [shape.heads // shape.groups * shape.head_size, shape.head_size, shape.head_size]
    by_group = torch.cat([part.view(-1, sum(sizes), shape.hidden) for part in parts])
    return tuple(matrix.reshape(-1, shape.hidden) for matrix in torch.split(by_group, sizes, dim=1))


def _check_layers(files: Mapping[str, Path], architecture: Architecture, folder: Path) -> None:
    """A deeper checkpoint would load without its last layers, and compute something else."""
    numbers = [int(name.split(".")[2]) for name in files if name.startswith("model.layers.")]
    if numbers and max(numbers) + 1 > architecture.layers:
        raise ConfigError(
            f"{folder}: the weights have {max(numbers) + 1} layers, config.json says {architecture.layers}; "
            "they belong to different models"
        )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index = folder / _INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index}: not an index of safetensors files ({error})") from error
    single = folder / _SINGLE
    if not single.exists():
        raise ConfigError(f"{folder}: neither {_SINGLE} nor {_INDEX}; weights have to be in safetensors form")
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


def _read(files: Mapping[str, Path], name: str, folder: Path) -> Tensor:
    if name not in files:
        raise ConfigError(f"{folder}: no tensor {name}; config.json asks for it")
    with _opened(files[name]) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); copy it again") from error
