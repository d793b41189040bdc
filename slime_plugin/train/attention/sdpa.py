"""Tree attention on the CPU: torch's own flash kernel on slices of the row, no mask and no copy of keys or values.

A query block is a causal square over itself and one unmasked rectangle per span of ancestors. Attention over a union of
key blocks is the average of the blocks' outputs with weights ``exp(lse_b - lse)``, where ``lse = logsumexp_b lse_b``.
The backward kernel only needs the *total* output and log-sum-exp: called once per block with those, it returns the
block's share of every gradient, and the shares add up.

The kernel is called below autograd, because above it torch neither returns the log-sum-exp nor takes it back.
Legend: n queries of a query block, m keys of a key block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_plugin.train.tree_plan import QueryBlock, TreePlan

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
    out: Tensor = _BlockAttention.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]  # torch's
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
        out = torch.empty_like(query)
        lses = []  # per query block [1, heads, n]
        offset = plan.window[0]
        for block in plan.blocks:
            rows = slice(block.start - offset, block.stop - offset)
            q = _heads_first(query[rows])
            parts = [
                _forward(q, _heads_first(key[span]), _heads_first(value[span]), 0.0, causal, scale=scale)
                for span, causal in _key_blocks(block)
            ]
            merged, lse = parts[0]
            if len(parts) > 1:
                lse = torch.logsumexp(torch.stack([part_lse for _, part_lse in parts]), dim=0)
                weighted = [part * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts]
                merged = torch.stack(weighted).sum(dim=0)
            out[rows] = merged[0].transpose(0, 1)
            lses.append(lse)
        ctx.save_for_backward(query, key, value, out, *lses)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *lses = ctx.saved_tensors
        offset = ctx.plan.window[0]
        exact = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
        grad_query = torch.empty_like(query)
        # A key is seen from many query blocks: their shares are summed in at least float32.
        grad_key, grad_value = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (key, value))
        for block, lse in zip(ctx.plan.blocks, lses, strict=True):
            rows = slice(block.start - offset, block.stop - offset)
            q, o, g = (_heads_first(x[rows]) for x in (query, out, grad_out))
            grad_rows = torch.zeros(q.shape[1:], dtype=exact, device=q.device)  # [heads, n, d]
            for span, causal in _key_blocks(block):
                k, v = _heads_first(key[span]), _heads_first(value[span])
                dq, dk, dv = _backward(g, q, k, v, o, lse, 0.0, causal, scale=ctx.scale)
                grad_rows += dq[0]
                grad_key[span] += dk[0].transpose(0, 1)
                grad_value[span] += dv[0].transpose(0, 1)
            grad_query[rows] = grad_rows.transpose(0, 1).to(query.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _key_blocks(block: QueryBlock) -> list[tuple[slice, bool]]:
    """Key blocks of a query block, and whether the causal diagonal runs through them."""
    return [(slice(block.start, block.stop), True), *((slice(a, b), False) for a, b in block.ancestors)]


def _heads_first(rows: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d], as the kernel wants it; a view."""
    return rows.transpose(0, 1).unsqueeze(0)
