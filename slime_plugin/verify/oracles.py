"""What is right, in float64 and written differently from the code that trains: no plan, no kernel, no shard.

Legend: T tokens of a row, d head size, M rows of logits, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from slime_plugin.record.arrays import BoolArray, IntArray


def path_sets(parent: IntArray) -> BoolArray:
    """[T, T] whether a token is on the path of another one: the path of its parent, and itself."""
    visible = np.zeros((len(parent), len(parent)), dtype=np.bool_)
    for token, above in enumerate(parent.tolist()):  # token by token, which is the definition
        if above >= 0:
            visible[token] = visible[above]
        visible[token, token] = True
    return visible


def attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output [T, heads, d] and the gradients of query, key and value, all float64, head by head."""
    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    query, key, value = (x.detach().double().requires_grad_() for x in (query, key, value))
    outputs = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // shared].T / query.shape[2] ** 0.5
        out = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ value[:, head // shared]
        torch.autograd.backward(out, grad_out[:, head].double())
        outputs.append(out.detach())
    gradients = [x.grad for x in (query, key, value) if x.grad is not None]
    return torch.stack(outputs, dim=1), gradients[0], gradients[1], gradients[2]


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """[T, heads, d] turned by the angle of its position: the two halves of a head are a complex number each."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    turns = torch.polar(torch.ones_like(frequencies), positions.double()[:, None] * frequencies)  # [T, d / 2]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def token_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[M] log-probability of each target and [M] entropy, from all logits [M, V]."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return logprobs[torch.arange(len(targets), device=logits.device), targets], -(logprobs.exp() * logprobs).sum(-1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """[M] KL(teacher || student), from all logits [M, V] of both."""
    target, predicted = (torch.log_softmax(logits.double(), dim=-1) for logits in (teacher, student))
    return (target.exp() * (target - predicted)).sum(dim=-1)


def output_matrix(model: Path, *, tied: bool) -> Tensor:
    """[V, h] of a Hugging Face checkpoint, read from its file."""
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    with safe_open(file_of(model, name), framework="pt") as tensors:
        matrix: Tensor = tensors.get_tensor(name)
    return matrix


def file_of(model: Path, name: str) -> Path:
    """Return the file of a Hugging Face checkpoint that holds a tensor."""
    index = model / "model.safetensors.index.json"
    if not index.exists():
        return model / "model.safetensors"
    return model / str(json.loads(index.read_text(encoding="utf-8"))["weight_map"][name])


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the difference over that of what is expected; their difference if nothing is."""
    size = expected.double().norm()
    difference = (found.double() - expected.double()).norm()
    return float(difference / size if size else difference)
