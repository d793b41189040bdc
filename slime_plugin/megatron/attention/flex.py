"""Tree attention on CUDA by FlexAttention: one compiled kernel, with the ancestor test as its mask.

In depth-first order a token is an ancestor of exactly the tokens in its subtree, ``key <= query < end[key]``, so the
mask needs one integer per token. Blocks of the score matrix in which nobody sees anybody are skipped. The subtree ends
of a window are cut at the window, which changes nothing for the queries in it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.megatron.plan import TreePlan
from slime_plugin.record.arrays import IntArray


def attend_flex(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, T, d]
    mask = _block_mask(plan, query.device)
    out: Tensor = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def subtree_ends(plan: TreePlan) -> IntArray:
    """[T] one past the last query of the window that sees the key; at most the key itself if none does."""
    end = np.zeros(plan.tokens, dtype=np.int32)
    for segment in plan.segments:
        for start, stop in segment.path:
            end[start:stop] = np.maximum(end[start:stop], segment.stop)
    return end


def _block_mask(plan: TreePlan, device: torch.device) -> Any:
    """Built once per micro-batch, and kept with the plan for all layers."""
    from torch.nn.attention.flex_attention import create_block_mask

    if ("flex", device) not in plan.on_device:
        start, stop = plan.window
        ends = subtree_ends(plan)
        pairs = int(np.maximum(ends - np.maximum(np.arange(plan.tokens), start), 0).sum())
        if pairs != plan.pairs:
            raise LayoutError(
                f"flex needs rows in depth-first order: by subtrees there are {pairs} query-key pairs, by parents "
                f"{plan.pairs}; use attention backend flash"
            )
        end = torch.from_numpy(ends).to(device)

        def is_ancestor(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv <= q + start) & (q + start < end[kv])

        plan.on_device["flex", device] = create_block_mask(
            is_ancestor, None, None, stop - start, plan.tokens, device=device
        )
    return plan.on_device["flex", device]


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
