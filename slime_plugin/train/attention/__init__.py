"""Tree attention behind one interface: queries of a window, keys and values of the whole row, and a plan.

=======  ====================================================================  ==========================
backend  how                                                                   where
=======  ====================================================================  ==========================
sdpa     torch's CPU flash kernel on slices of the row, merged by log-sum-exp  CPU
flash    one flash-attn varlen call over gathered ancestors                    CUDA
dense    a full score matrix and a mask                                        anywhere; the reference
=======  ====================================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slime_plugin.errors import ConfigError, nearest
from slime_plugin.train.attention.dense import attend_dense, attend_masked
from slime_plugin.train.attention.flash import attend_flash
from slime_plugin.train.attention.sdpa import attend_sdpa
from slime_plugin.train.tree_plan import TreePlan

Attend = Callable[[Tensor, Tensor, Tensor, TreePlan, float], Tensor]
"""(query [window, heads, d], key [T, groups, d], value [T, groups, d], plan, scale) -> [window, heads, d].

Query head ``i`` uses key head ``i * groups // heads``, as in grouped-query attention everywhere.
"""

BACKENDS: dict[str, Attend] = {"sdpa": attend_sdpa, "flash": attend_flash, "dense": attend_dense}


def choose_backend(name: str | None = None) -> Attend:
    """Return the named backend; without a name the one for this machine."""
    if name is None:
        name = "flash" if torch.cuda.is_available() else "sdpa"
    if name not in BACKENDS:
        raise ConfigError(f"no attention backend {name!r:.40}; use {nearest(name, list(BACKENDS))}")
    if name == "flash" and not torch.cuda.is_available():
        raise ConfigError("attention backend flash needs CUDA, and this machine has none; use sdpa")
    if name == "sdpa" and torch.cuda.is_available():
        raise ConfigError("attention backend sdpa is torch's kernel for CPUs; use flash")
    return BACKENDS[name]


__all__ = ["BACKENDS", "Attend", "attend_masked", "choose_backend"]
