"""Transformer Engine's fused RoPE for packed sequences, for the CPU: the same arguments, checks and index arithmetic.

Its kernel runs a block per (token of a sequence, sequence). Which row of the table a block reads is worked out here for
each block, as the kernel does; only the rotation itself is vectorised. It reads tables of float32 only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fused_rope_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """[T, heads, d] rotated, with a table of angles [rows, 1, 1, d]."""
    assert t.dim() == 3, "expected 3D tensor"
    assert freqs.dim() == 4, "expected 4D tensor"
    assert freqs.shape[1:3] == (1, 1), "expected the second and third dims equal 1"
    assert cu_seqlens.dim() == 1, "expected 1D tensor"
    assert cu_seqlens.dtype == torch.int32, "read as int32, whatever it is"
    assert cu_seqlens.device == freqs.device == t.device, "read on the device"
    assert t.shape[2] >= freqs.shape[3], "expected the last dim of the input tensor equals or is greater"
    rows = torch.full((len(t),), -1)
    bounds = cu_seqlens.tolist()
    for b in range(len(bounds) - 1):
        start, end = bounds[b] // cp_size, bounds[b + 1] // cp_size
        for s in range(len(freqs)):
            if s + start >= end:
                continue
            row, size = s, end - start
            if cp_size > 1:
                assert size % 2 == 0
                half = size // 2
                row += cp_rank * half if s < half else size * cp_size - (cp_rank + 1) * half - half
            rows[s + start] = row
    assert (rows >= 0).all(), "tokens that no block writes are left as the memory was"
    angles = freqs.float()[rows, 0].to(t.dtype)  # [T, 1, d]
    one, other = t.chunk(2, dim=-1)
    return t * angles.cos() + torch.cat((-other, one), dim=-1) * angles.sin()
