"""Tree attention behind one interface: queries of a window, keys and values of the whole row, and a plan.

=======  ==================================================================  ===================
backend  how                                                                 where
=======  ==================================================================  ===================
sdpa     torch's CPU flash kernel on slices of the row, merged by log-sum-exp  CPU, its default
flash    one flash-attn varlen call over gathered ancestors                  CUDA, its default
flex     FlexAttention with the ancestor test as its mask                    CUDA, optional
dense    a full score matrix and a mask: the reference                       anywhere, small rows
=======  ==================================================================  ===================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slime_plugin.errors import ConfigError, nearest
from slime_plugin.megatron.attention.dense import attend_dense, attend_masked
from slime_plugin.megatron.attention.flash import attend_flash
from slime_plugin.megatron.attention.flex import attend_flex
from slime_plugin.megatron.attention.sdpa import attend_sdpa
from slime_plugin.megatron.plan import TreePlan

Attend = Callable[[Tensor, Tensor, Tensor, TreePlan, float], Tensor]
"""(query [window, heads, d], key [T, groups, d], value [T, groups, d], plan, scale) -> [window, heads, d].

Query head ``i`` uses key head ``i * groups // heads``, as in grouped-query attention everywhere.
"""

BACKENDS: dict[str, Attend] = {
    "sdpa": attend_sdpa,
    "flash": attend_flash,
    "flex": attend_flex,
    "dense": attend_dense,
}


def choose_backend(name: str | None = None) -> Attend:
    """The named backend; without a name the default of this machine."""
    if name is None:
        name = "flash" if torch.cuda.is_available() else "sdpa"
    if name not in BACKENDS:
        raise ConfigError(f"no attention backend {name!r:.40}; use {nearest(name, list(BACKENDS))}")
    if name in ("flash", "flex") and not torch.cuda.is_available():
        raise ConfigError(f"attention backend {name} needs CUDA, and this machine has none; use sdpa")
    if name == "sdpa" and torch.cuda.is_available():
        raise ConfigError("attention backend sdpa is torch's kernel for CPUs; use flash")
    return BACKENDS[name]


__all__ = ["BACKENDS", "Attend", "attend_masked", "choose_backend"]
