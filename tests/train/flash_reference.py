"""FlashAttention's varlen kernels for the CPU: the same signatures, refusals, layouts and rounding, versions 2 and 3.

Read off flash-attn 2.7.0 to 2.8.3 (``flash_api.cpp`` and its Python interface) and FlashAttention 3 (commit 002cce0).
What the kernels check is refused with their words. What they take unchecked and read past, such as bounds, alignment
and the layout of the log-sum-exp, is refused too. Everything that tree attention has no use for is not implemented.

Like the kernels it multiplies bfloat16 (or float16) and sums in float32: scores and log-sum-exp are float32, the
probabilities are rounded before they meet the values, and so are their gradients. Version 2 rounds the gradient of a
key per query head before it sums a group of them, version 3 after it.
Legend: n queries and m keys of a sequence, b sequences, d head size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_plugin.train.attention.flash import flash_kernel

INT32 = 2**31 - 1
MOST_BLOCKS = 65_535
"""Sequences of a call: CUDA's limit for the second and third dimension of a grid."""
VECTOR_BYTES = 16
"""The kernels load that much at a time, from addresses that are multiples of it."""


def flash_attention_2(device: str = "cpu") -> SimpleNamespace:
    """What is called of ``flash_attn.flash_attn_interface``, for tensors on ``device``."""
    kernel = _Kernel(version=2, device=device)

    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _refuse(dropout_p, window_size_left + 1, window_size_right + 1, softcap, alibi_slopes, return_softmax)
        _refuse(block_table, leftpad_k, seqused_k)
        call = _Call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        q, k, v = _last_contiguous(q, k, v)
        out, lse = kernel.forward(q, k, v, call)
        return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)

    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        _refuse(dropout_p, window_size_left + 1, window_size_right + 1, softcap, alibi_slopes, rng_state)
        call = _Call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        dout, q, k, v, out = _last_contiguous(dout, q, k, v, out)
        return kernel.backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), call)

    return SimpleNamespace(
        _flash_attn_varlen_forward=_flash_attn_varlen_forward, _flash_attn_varlen_backward=_flash_attn_varlen_backward
    )


def flash_attention_3(device: str = "cpu") -> SimpleNamespace:
    """What is called of ``flash_attn_interface``, without what no call here gives: caches, pages, FP8."""
    kernel = _Kernel(version=3, device=device)

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        num_splits: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _refuse(window_size_left + 1, window_size_right + 1, softcap, num_splits - 1)
        call = _Call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        q, k, v = _last_contiguous(q, k, v)
        out, lse = kernel.forward(q, k, v, call)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        sequed_q: Tensor | None = None,
        sequed_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> Tensor:
        _refuse(sequed_q, sequed_k, window_size_left + 1, window_size_right + 1, softcap, sm_margin)
        call = _Call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal)
        _check(not deterministic or q.shape[-1] <= 192, "Deterministic backward not supported for hdim 256.")
        dout, q, k, v, out = _last_contiguous(dout, q, k, v, out)
        return kernel.backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), call)

    return SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def use_flash(patch: pytest.MonkeyPatch, version: int, device: str = "cpu") -> None:
    """Install a version where the flash backend looks for it, as on a GPU that runs it."""
    library = (flash_attention_2 if version == 2 else flash_attention_3)(device)
    names = ("flash_attn", "flash_attn.flash_attn_interface") if version == 2 else ("flash_attn_interface",)
    for name in names:
        patch.setitem(sys.modules, name, library)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0) if version == 2 else (9, 0))
    flash_kernel.cache_clear()


def _refuse(*given: Any) -> None:
    if not all(x is None or (isinstance(x, int | float) and x == 0) for x in given):
        raise NotImplementedError(f"tree attention has no use for any of these: {given}")


def _last_contiguous(*tensors: Tensor) -> list[Tensor]:
    """The Python interfaces copy what is not contiguous in its last dimension."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _check(right: bool, message: str) -> None:
    if not right:
        raise RuntimeError(message)


@dataclass(frozen=True)
class _Call:
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    given_scale: Any
    causal: Any

    @property
    def scale(self) -> float:
        if not isinstance(self.given_scale, float):
            raise RuntimeError(f"softmax_scale must be a float, not {self.given_scale}")  # noqa: TRY004  # as torch does
        return self.given_scale


@dataclass(frozen=True)
class _Kernel:
    version: int
    device: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        sequences = self._checked(q, k, v, call)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        _check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        for rows, keys in sequences:
            scores = _scores(q[rows], k[keys], call)
            peak = scores.amax(dim=-1, keepdim=True)
            weights = (scores - peak).exp()  # [heads, n, m]
            total = weights.sum(dim=-1, keepdim=True)
            value = _by_query_head(v[keys], q)
            unscaled = torch.einsum("hqk,khd->hqd", weights.to(q.dtype).float(), value)
            out[rows] = (unscaled / total).transpose(0, 1).to(q.dtype)
            lse[:, rows] = (peak + total.log())[..., 0]
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
        call: _Call,
    ) -> Tensor:
        sequences = self._checked(q, k, v, call)
        self._check_like("out", out, q)
        self._check_like("dout", dout, q)
        dq, dk, dv = (x for x in gradients if x is not None)  # tree attention always gives them
        for name, gradient, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
            self._check_like(name, gradient, like)
        _check(lse.shape == (q.shape[1], len(q)), f"softmax_lse is {tuple(lse.shape)}, read as (heads, queries)")
        _check(lse.dtype == torch.float32 and lse.is_contiguous(), "softmax_lse is read as contiguous float32")
        _check(lse.device.type == self.device, f"softmax_lse must be on {self.device}")
        for rows, keys in sequences:
            scores = _scores(q[rows], k[keys], call)
            _check(
                torch.allclose(scores.logsumexp(-1), lse[:, rows], rtol=1e-4, atol=1e-4),
                "softmax_lse is not that of the forward call",
            )
            weights = (scores - lse[:, rows, None]).exp()
            upstream = dout[rows].float()
            shift = (upstream * out[rows].float()).sum(dim=-1).T[..., None]  # [heads, n, 1]
            slope = torch.einsum("qhd,khd->hqk", upstream, _by_query_head(v[keys], q)) - shift
            slope = (weights * slope).to(q.dtype).float()
            key = _by_query_head(k[keys], q)
            dq[rows] = (torch.einsum("hqk,khd->qhd", slope, key) * call.scale).to(q.dtype)
            dk[keys] = self._sum_of_group(torch.einsum("hqk,qhd->khd", slope, q[rows].float()) * call.scale, k)
            dv[keys] = self._sum_of_group(torch.einsum("hqk,qhd->khd", weights.to(q.dtype).float(), upstream), v)
        b = (len(call.cu_seqlens_q) if call.cu_seqlens_q is not None else 1) - 1
        return torch.empty(q.shape[1], len(q) + 128 * b, device=q.device)

    def _sum_of_group(self, per_head: Tensor, like: Tensor) -> Tensor:
        """[m, groups, d] of [m, heads, d]."""
        if self.version == 2:
            per_head = per_head.to(like.dtype).float()
        return per_head.view(len(per_head), like.shape[1], -1, like.shape[2]).sum(dim=2).to(like.dtype)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> list[tuple[slice, slice]]:
        """The rows of queries and keys of each sequence; none on a device that holds no numbers."""
        _check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
        _check(k.dtype == q.dtype, "query and key must have the same dtype")
        _check(v.dtype == q.dtype, "query and value must have the same dtype")
        for name, x in (("q", q), ("k", k), ("v", v)):
            self._check_tensor(name, x)
        heads, size = q.shape[1:]
        groups = k.shape[1]
        _check(size <= 256, "FlashAttention forward only supports head dimension at most 256")
        _check(size % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
        _check(heads % groups == 0, "Number of heads in key/value must divide number of heads in query")
        _check(
            k.shape == v.shape == (len(k), groups, size), "k and v must have shape (total_k, num_heads_k, head_size)"
        )
        _check(call.causal is True, "tree attention is causal")
        bounds = [
            self._checked_bounds(name, cumulative, longest, total)
            for name, cumulative, longest, total in (
                ("q", call.cu_seqlens_q, call.max_seqlen_q, len(q)),
                ("k", call.cu_seqlens_k, call.max_seqlen_k, len(k)),
            )
        ]
        b = len(bounds[0]) - 1
        _check(b > 0, "batch size must be positive")
        _check(len(bounds[1]) == b + 1, "cu_seqlens_k must have shape (batch_size + 1)")
        _check(b <= MOST_BLOCKS, "CUDA error: invalid configuration argument")
        rows, keys = (len(x) + 128 * (b + 1) for x in (q, k))
        if self.version == 3:  # allocates a sum of the gradient of queries, by a product of two ints
            rows *= next(rounded for rounded in (64, 96, 128, 192, 256) if rounded >= size)
        _check(max(rows, keys) <= INT32, f"{max(rows, keys):,} does not fit into 32 bits")
        if self.device == "meta":
            return []
        sequences = [tuple(slice(*pair) for pair in pairs) for pairs in zip(*map(pairwise, bounds), strict=True)]
        return list(_with_enough_keys(sequences))

    def _checked_bounds(self, name: str, cumulative: Tensor | None, longest: int | None, total: int) -> Sequence[int]:
        name = f"cu_seqlens_{name}"
        if cumulative is None or type(longest) is not int:
            raise RuntimeError(f"{name} and its longest sequence, an int, must be provided")
        _check(cumulative.dtype == torch.int32, f"{name} must have dtype int32")
        _check(cumulative.device.type == self.device, f"{name} must be on {self.device}")
        _check(cumulative.dim() == 1 and cumulative.is_contiguous(), f"{name} must be contiguous")
        if self.device == "meta":
            return range(len(cumulative))
        bounds: list[int] = cumulative.tolist()
        lengths = [stop - start for start, stop in pairwise(bounds)]
        _check(
            bounds[0] == 0 and bounds[-1] == total, f"{name} goes from {bounds[0]} to {bounds[-1]}, not 0 to {total}"
        )
        _check(min(lengths, default=0) >= 0, f"{name} decreases")
        _check(
            longest >= max(lengths, default=0), f"{name} has a sequence of {max(lengths, default=0)}, over {longest}"
        )
        return bounds

    def _check_tensor(self, name: str, x: Tensor) -> None:
        _check(x.device.type == self.device, f"{name} must be on {self.device}")
        _check(x.dim() == 3, f"{name} must have 3 dimensions")
        _check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        address = 0 if self.device == "meta" else x.data_ptr()
        steps = [x.stride(i) * x.element_size() for i in range(2) if x.shape[i] > 1]
        _check(not any(at % VECTOR_BYTES for at in (address, *steps)), f"{name} is not aligned to {VECTOR_BYTES} bytes")

    def _check_like(self, name: str, x: Tensor, like: Tensor) -> None:
        _check(x.dtype == like.dtype, f"{name} must have the same dtype as q")
        _check(x.shape == like.shape, f"{name} must have shape {tuple(like.shape)}")
        self._check_tensor(name, x)


def _with_enough_keys(sequences: Sequence[tuple[slice, ...]]) -> Iterator[tuple[slice, slice]]:
    """Sequences with something in them. With fewer keys than queries the first queries would see nothing, and be 0."""
    for rows, keys in sequences:
        n, m = rows.stop - rows.start, keys.stop - keys.start
        _check(m >= n, f"a sequence has {n} queries and {m} keys: its first queries would see nothing")
        if m:
            yield rows, keys


def _scores(q: Tensor, k: Tensor, call: _Call) -> Tensor:
    """[heads, n, m] in float32, causal from the end of the keys."""
    n, m = len(q), len(k)
    scores = torch.einsum("qhd,khd->hqk", q.float(), _by_query_head(k, q)) * call.scale
    later = torch.arange(m) > torch.arange(n)[:, None] + (m - n)
    return scores.masked_fill(later, -math.inf)


def _by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[m, heads, d] in float32 of [m, groups, d]."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)
