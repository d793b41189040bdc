"""Tree attention on CUDA: one flash-attn varlen call, in which each query block has its path from the root as keys.

The varlen kernels align causality to the end of the keys (bottom right), so queries of a block with more keys than
queries see all ancestors and their own block up to themselves: exactly the path. Where blocks have no ancestors
(packed plain sequences) nothing is gathered and the call is the stock one.

Only the ungathered query, key and value are kept for backward; keys are gathered again there, and their gradients are
summed in float32, because a trunk token gets a share from every branch below it.

FlashAttention 3 is used on compute capability 9, FlashAttention 2 elsewhere. Signatures: flash-attn 2.7 to 2.8
(``_flash_attn_varlen_forward``) and the ``flash_attn_interface`` of FlashAttention 3, both called by keyword.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_plugin.errors import ConfigError, LayoutError
from slime_plugin.train.tree_plan import TreePlan

_log = logging.getLogger(__name__)
MOST_BLOCKS = 65_535
"""Sequences of a call: its grid has a dimension of them, and CUDA's limit for that."""


@dataclass(frozen=True, slots=True)
class Varlen:
    """What a varlen kernel needs to know besides the tensors."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Under the names that both versions of FlashAttention give them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A varlen attention with bottom-right causality, below autograd."""

    forward: Callable[[Tensor, Tensor, Tensor, Varlen, float], tuple[Tensor, Tensor]]
    """(query, key, value, varlen, scale) -> (output, log-sum-exp in the kernel's own layout)"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Varlen, float], tuple[Tensor, Tensor, Tensor]]
    """(grad_output, query, key, value, output, log-sum-exp, varlen, scale) -> gradients of query, key, value"""
    version: int
    """Of FlashAttention, whose memory it takes."""


def attend_flash(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
    return attend_varlen(query, key, value, plan, scale, flash_kernel())


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float, kernel: VarlenKernel
) -> Tensor:
    """Tree attention with any varlen kernel."""
    out: Tensor = _GatheredAttention.apply(  # type: ignore[no-untyped-call]  # torch's
        query, key, value, *_on_device(plan, query.device), scale, kernel
    )
    return out


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        varlen: Varlen,
        index: Tensor | None,
        scale: float,
        kernel: VarlenKernel,
    ) -> Tensor:
        out, lse = kernel.forward(query, _gather(key, index), _gather(value, index), varlen, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.varlen, ctx.index, ctx.scale, ctx.kernel = varlen, index, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        gathered_key, gathered_value = _gather(key, ctx.index), _gather(value, ctx.index)
        grad_query, grad_key, grad_value = ctx.kernel.backward(
            grad_out, query, gathered_key, gathered_value, out, lse, ctx.varlen, ctx.scale
        )
        return (
            grad_query,
            _scatter_add(grad_key, ctx.index, key),
            _scatter_add(grad_value, ctx.index, value),
            *(None for _ in range(4)),
        )


def _gather(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _scatter_add(gathered: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    if index is None:
        return gathered
    exact = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    total = torch.zeros(like.shape, dtype=exact, device=like.device)
    return total.index_add_(0, index, gathered.to(exact)).to(like.dtype)


def _on_device(plan: TreePlan, device: torch.device) -> tuple[Varlen, Tensor | None]:
    """Return the kernel's arguments and the rows of the gathered keys, None if nothing is gathered; once per device."""
    if device not in plan.on_device:
        queries, keys = plan.query_bounds, plan.key_bounds
        if len(plan.blocks) > MOST_BLOCKS:
            raise LayoutError(
                f"{len(plan.blocks):,} query blocks in a micro-batch, FlashAttention takes {MOST_BLOCKS:,}; lower "
                "trainer.batch_tokens or raise trainer.cp"
            )
        varlen = Varlen(
            cu_seqlens_q=torch.from_numpy(queries).to(device),
            cu_seqlens_k=torch.from_numpy(keys).to(device),
            max_seqlen_q=int(np.diff(queries).max()),
            max_seqlen_k=int(np.diff(keys).max()),
        )
        plan.on_device[device] = varlen, torch.from_numpy(plan.key_index).to(device) if plan.gathers else None
    cached: tuple[Varlen, Tensor | None] = plan.on_device[device]
    return cached


@cache
def flash_kernel() -> VarlenKernel:
    """FlashAttention 3 where it is installed and the GPU has it, else 2."""
    if torch.cuda.get_device_capability()[0] == 9:
        try:
            library = importlib.import_module("flash_attn_interface")
            if _fits(library):
                return _flash_attention_3(library)
            _log.warning("this FlashAttention 3 takes other arguments than the one that is known here; using 2")
        except ImportError:
            pass  # FlashAttention 2 runs on Hopper too, at about half the speed
    try:
        return _flash_attention_2(importlib.import_module("flash_attn.flash_attn_interface"))
    except ImportError as error:
        raise ConfigError(
            "attention backend flash needs flash-attn 2.7 or newer; pip install 'memorywalker[cuda]'"
        ) from error


def _fits(library: Any) -> bool:
    """Whether a FlashAttention 3 takes what it is given below: its interface is not frozen yet."""
    common = {"q", "k", "v", "softmax_scale", *(field.name for field in fields(Varlen))}
    backward = common | {"dout", "out", "softmax_lse", "dq", "dk", "dv", "is_causal", "deterministic"}
    for name, wanted in (("_flash_attn_forward", common | {"causal"}), ("_flash_attn_backward", backward)):
        function = getattr(library, name)
        # torch.library.custom_op, which wraps it, takes anything and keeps the function that says what.
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue  # wrapped in another way: it does not say
        needed = {key for key, parameter in parameters.items() if parameter.default is parameter.empty}
        if not needed <= wanted <= parameters.keys():
            return False
    return True


def _flash_attention_2(library: Any) -> VarlenKernel:
    common = {"dropout_p": 0.0, "causal": True}
    backward = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    functions = library._flash_attn_varlen_forward, library._flash_attn_varlen_backward
    return _kernel(2, *functions, common, common | backward)


def _flash_attention_3(library: Any) -> VarlenKernel:
    return _kernel(3, library._flash_attn_forward, library._flash_attn_backward, {"causal": True}, {"is_causal": True})


def _kernel(
    version: int,
    library_forward: Callable[..., Any],
    library_backward: Callable[..., Any],
    forward_settings: dict[str, Any],
    backward_settings: dict[str, Any],
) -> VarlenKernel:
    def forward(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float) -> tuple[Tensor, Tensor]:
        settings = {**varlen.arguments, "softmax_scale": scale, **forward_settings}
        out, lse, *_ = library_forward(q=q, k=k, v=v, **settings)
        return out, lse

    def backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, varlen: Varlen, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = {"dout": grad_out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        settings = {**varlen.arguments, "softmax_scale": scale, **backward_settings}
        settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
        library_backward(**tensors, dq=dq, dk=dk, dv=dv, **settings)
        return dq, dk, dv

    return VarlenKernel(forward, backward, version)
