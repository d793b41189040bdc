"""Plans against a walk along parents, and backends against a plain masked softmax; values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_plugin.errors import ConfigError, LayoutError
from slime_plugin.record.arrays import IntArray
from slime_plugin.train.attention import BACKENDS, Attend, choose_backend, flash
from slime_plugin.train.attention.dense import attend_dense
from slime_plugin.train.attention.flash import Varlen, VarlenKernel, attend_varlen
from slime_plugin.train.attention.sdpa import attend_sdpa
from slime_plugin.train.tree_plan import TreePlan, plan_tree

PAPER = np.array([-1, 0, 1, 2, 3, 4, 5, 6, 4, 8, 9, 10, 11, 9, 13, 14, 15, 14, 17], dtype=np.int32)


def ancestors(parent: IntArray, token: int) -> set[int]:
    """The token and everything above it, one step at a time."""
    path = {token}
    while parent[token] >= 0:
        token = int(parent[token])
        path.add(token)
    return path


def windows(tokens: int) -> list[tuple[int, int]]:
    return [(0, tokens), (0, tokens // 2), (tokens // 2, tokens), (tokens // 3, 2 * tokens // 3)]


@st.composite
def forests(draw: st.DrawFn) -> IntArray:
    """Any parents that stand before their children, depth-first or not."""
    size = draw(st.integers(1, 24))
    return np.array([draw(st.integers(-1, i - 1)) for i in range(size)], dtype=np.int32)


@given(forests())
def test_a_plan_shows_every_token_its_ancestors_and_itself(parent: IntArray) -> None:
    for low, high in windows(len(parent)):
        plan = plan_tree(parent, (low, high))
        seen = [set(np.flatnonzero(row).tolist()) for row in plan.mask()]
        assert seen == [ancestors(parent, token) for token in range(low, high)]
        assert plan.depth.tolist() == [len(ancestors(parent, token)) - 1 for token in range(len(parent))]


@given(forests())
def test_the_gathered_keys_of_a_block_are_the_path_of_its_last_query_in_order(parent: IntArray) -> None:
    for window in windows(len(parent)):
        plan = plan_tree(parent, window)
        for i, block in enumerate(plan.blocks):
            keys = plan.key_index[plan.key_bounds[i] : plan.key_bounds[i + 1]].tolist()
            assert keys == sorted(ancestors(parent, block.stop - 1))
            assert plan.query_bounds[i + 1] - plan.query_bounds[i] == block.stop - block.start


def test_the_running_example_has_the_plan_its_docstring_tells() -> None:
    plan = plan_tree(PAPER)
    assert (plan.tokens, len(plan.blocks)) == (19, 4)
    assert (plan.blocks[-1].start, plan.blocks[-1].stop) == (17, 19)
    assert plan.blocks[-1].ancestors == ((0, 5), (8, 10), (13, 15))


def test_packed_plain_sequences_gather_nothing() -> None:
    plan = plan_tree(np.array([-1, 0, 1, -1, 3], dtype=np.int32))
    assert not plan.gathers
    assert plan.query_bounds.tolist() == plan.key_bounds.tolist() == [0, 3, 5]
    assert plan_tree(PAPER).gathers


def test_a_parent_behind_its_child_is_refused() -> None:
    with pytest.raises(LayoutError, match="token 1 has parent 1; a parent is -1 or precedes its child"):
        plan_tree(np.array([-1, 1], dtype=np.int32))


def lower_right_forward(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float) -> tuple[Tensor, Tensor]:
    """flash-attn's varlen convention in plain torch: causality aligned to the end of the keys."""
    outs, lses = [], []
    for rows, keys in _pieces(varlen):
        scores = _scores(q[rows], k[keys], scale)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeat(v[keys], q)))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def lower_right_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, varlen: Varlen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        again, _ = lower_right_forward(q, k, v, varlen, scale)
    assert torch.allclose(again, out)
    grad_q, grad_k, grad_v = torch.autograd.grad(again, (q, k, v), grad)
    return grad_q, grad_k, grad_v


def _pieces(varlen: Varlen) -> list[tuple[slice, slice]]:
    q, k = varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_k.tolist()
    assert varlen.max_seqlen_q == max(b - a for a, b in pairwise(q))
    assert varlen.max_seqlen_k == max(b - a for a, b in pairwise(k))
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, _repeat(k, q)) * scale
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return scores.masked_fill(later, float("-inf"))


def _repeat(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)


def apply(attend: Attend, inputs: Sequence[Tensor], plan: TreePlan) -> Tensor:
    query, key, value = inputs
    return attend(query, key, value, plan, 0.3)


def attend_gathered(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
    """The flash backend around a kernel that runs here: its plan, gather and scatter are the ones used on CUDA."""
    return attend_varlen(query, key, value, plan, scale, VarlenKernel(lower_right_forward, lower_right_backward, 2))


@settings(max_examples=60)
@given(forests(), st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.sampled_from([attend_sdpa, attend_gathered]))
def test_backends_are_a_masked_softmax(parent: IntArray, heads: tuple[int, int], attend: Attend) -> None:
    for window in windows(len(parent)):
        plan = plan_tree(parent, window)
        if window[0] == window[1]:
            continue
        generator = torch.Generator().manual_seed(len(parent))
        shapes = [(window[1] - window[0], heads[0], 8), *[(len(parent), heads[1], 8)] * 2]
        inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
        expected, found = apply(attend_dense, inputs, plan), apply(attend, inputs, plan)
        assert torch.allclose(found, expected, atol=1e-12)
        upstream = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
        for ours, theirs in zip(*(torch.autograd.grad(x, inputs, upstream) for x in (found, expected)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)


def test_gradients_of_shared_keys_are_summed_in_float32() -> None:
    """A trunk with many branches: adding up in bfloat16 would lose most of them."""
    branches = 400
    parent = np.array([-1, 0, *[1] * branches], dtype=np.int32)
    plan = plan_tree(parent)
    inputs = [torch.ones(len(parent), 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    apply(attend_sdpa, inputs, plan).float().sum().backward()  # type: ignore[no-untyped-call]  # torch's
    apply(attend_dense, exact, plan).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(x.grad.float(), y.grad, rtol=2e-2, atol=1e-2)


def test_the_default_backend_fits_the_machine() -> None:
    default = "flash" if torch.cuda.is_available() else "sdpa"
    assert choose_backend() is BACKENDS[default]
    with pytest.raises(ConfigError, match="no attention backend 'sdap'; use 'sdpa'"):
        choose_backend("sdap")


def test_a_flash_attention_3_with_another_interface_is_not_called() -> None:
    bounds = "cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None"
    forward = f"def _flash_attn_forward(q, k, v, {bounds}, causal=False): pass"
    tensors = "dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None"
    for backward, fits in (
        (f"({tensors}, {bounds}, is_causal=False, deterministic=False)", True),
        (f"({tensors}, {bounds}, causal=False, deterministic=False)", False),
        (f"({tensors}, sequed_q, {bounds}, is_causal=False, deterministic=False)".replace("=None", ""), False),
        ("(*args, **kwargs)", True),
    ):
        library: dict[str, object] = {}
        exec(f"{forward}\ndef _flash_attn_backward{backward}: pass", library)
        assert flash._fits(SimpleNamespace(**library)) is fits, backward


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA")
def test_the_backend_for_cuda_says_so() -> None:
    with pytest.raises(ConfigError, match="attention backend flash needs CUDA, and this machine has none; use sdpa"):
        choose_backend("flash")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash-attn needs a GPU")
def test_the_backend_on_cuda() -> None:
    plan = plan_tree(PAPER)
    inputs = [
        torch.randn(len(PAPER), heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2)
    ]
    expected, found = apply(attend_dense, [x.float() for x in inputs], plan), apply(BACKENDS["flash"], inputs, plan)
    assert torch.allclose(found.float(), expected, atol=2e-2)
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(found, inputs, upstream.bfloat16())
    theirs = torch.autograd.grad(expected, inputs, upstream)
    for x, y in zip(ours, theirs, strict=True):
        assert torch.allclose(x.float(), y.float(), atol=5e-2, rtol=5e-2)
