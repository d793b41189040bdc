"""Attention as a layer of the model calls it: a random tree against dense float64, and a chain against the stock call.

With as many heads as a rank of the cell has.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slime_plugin.config.parallel import Parallelism
from slime_plugin.record.arrays import IntArray
from slime_plugin.train import layers
from slime_plugin.train.attention.flash import flash_kernel
from slime_plugin.train.transformer_config import torch_dtype, transformer_config
from slime_plugin.train.tree_sequence import tree_sequence
from slime_plugin.verify import oracles, world
from slime_plugin.verify.generated import random_tree
from slime_plugin.verify.measurement import Measurement, worst
from slime_plugin.verify.settings import Verification

SEGMENTS = 40
_TREE = (
    "the kernel sees other tokens than the path of each one: its causality has to be aligned to the end of the keys; "
    "install flash-attn 2.7 or newer, or train with method=logittree"
)
_CHAIN = "a chain is not what the stock kernel computes; compare flash-attn with docker/versions.env"


def check(verification: Verification) -> Iterator[Measurement]:
    (found,) = world.run_on_ranks(1, measure, verification)
    limits, tokens = verification.limits, verification.size(4096, 512)
    if verification.device == "cuda":
        yield Measurement("kernel", True, f"FlashAttention {found['version']:.0f}")
    tree = f"tree of {tokens:,} tokens"
    yield Measurement.at_most(f"{tree}: output", found["output"], limits.attention, _TREE)
    yield Measurement.at_most(f"{tree}: gradients", found["gradient"], limits.attention_gradient, _TREE)
    yield Measurement.at_most("chain: output", found["chain"], limits.attention, _CHAIN)


def measure(verification: Verification) -> dict[str, float]:
    """Return relative differences, on one rank."""
    generator = np.random.default_rng(verification.seed)
    architecture, tokens = verification.architecture, verification.size(4096, 512)
    dtype, tp = torch_dtype(verification.dtype), verification.parallel.tp
    attention = layers.TreeAttention(transformer_config(architecture, Parallelism(), dtype), 1)
    heads = [architecture.heads // tp, architecture.groups // tp, architecture.groups // tp, architecture.heads // tp]
    query, key, value, grad_out = (
        world.random_tensor(generator, tokens, n, architecture.head_size, dtype=dtype) for n in heads
    )
    parent = random_tree(tokens, SEGMENTS, generator)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = _attend(attention, inputs, parent)
    torch.autograd.backward(out, grad_out)
    visible = torch.from_numpy(oracles.path_sets(parent)).to(query.device)
    expected, *gradients = oracles.attention_gradients(query, key, value, visible, grad_out)
    found = [x.grad for x in inputs if x.grad is not None]
    with torch.no_grad():
        chain = _attend(attention, inputs, np.arange(tokens, dtype=np.int32) - 1)
        stock = stock_causal(query, key, value)
    return {
        "output": oracles.relative(out.detach(), expected),
        "gradient": worst(oracles.relative(mine, right) for mine, right in zip(found, gradients, strict=True)),
        "chain": oracles.relative(chain, stock),
        "version": flash_kernel().version if query.is_cuda else 0,
    }


def _attend(attention: Any, inputs: list[Tensor], parent: IntArray) -> Tensor:
    sequence = tree_sequence(parent, device=inputs[0].device)
    out: Tensor = attention(*inputs, None, packed_seq_params=sequence)
    return out


def stock_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, heads, d] of the library's own causal call: torch's on a CPU, FlashAttention's for packed rows on a GPU."""
    if not query.is_cuda:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    hopper = torch.cuda.get_device_capability()[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None
    library = importlib.import_module("flash_attn_interface" if hopper else "flash_attn")
    bounds = torch.tensor([0, len(query)], dtype=torch.int32, device=query.device)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": len(query), "max_seqlen_k": len(query)}
    out = library.flash_attn_varlen_func(q=query, k=key, v=value, causal=True, **lengths)
    first: Tensor = out[0] if isinstance(out, tuple) else out  # FlashAttention 3 may return its log-sum-exp beside it
    return first
