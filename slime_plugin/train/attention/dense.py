"""The reference: a full score matrix and a mask. Quadratic in memory, and the only backend for an explicit mask."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_plugin.train.tree_plan import TreePlan


def attend_dense(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
    visible = torch.from_numpy(plan.mask()).to(query.device)  # [window, T]
    return attend_masked(query, key, value, visible, scale)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention under any mask in which every query sees at least one key."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))  # [T, heads, d]
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if scores.dtype in (torch.float16, torch.bfloat16):
        weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
