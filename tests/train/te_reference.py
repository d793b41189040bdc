"""Transformer Engine's layers for the CPU: the names, shapes and marks of its parameters, and what they compute.

Read off version 2.16.1. Installed before Megatron is imported, it makes Megatron's own wrappers (``TELinear`` and so
on) and layer specs the ones that a GPU gets. Collectives are Megatron's instead of Transformer Engine's. What a GPT of
ours has no use for (FP8, experts, its attention) is there by name only, because Megatron imports it.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

VERSION = "2.16.1"
SETTINGS = {"fuse_wgrad_accumulation", "get_rng_state_tracker", "init_method", "rng_tracker_name"}
"""Arguments of its linear layers that Megatron gives and that change nothing here."""


def run_calls(module: str, *calls: tuple[str, int, tuple[Any, ...]]) -> list[list[Any]]:
    """``run_ranks`` for each (function, ranks, arguments), of a module that begins with :func:`install`.

    In a process of its own: one that has imported Megatron without Transformer Engine cannot have it any more.
    """
    with TemporaryDirectory() as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        given.write_bytes(pickle.dumps((module, calls)))
        code = "import sys; from tests.train.te_reference import main; main(*sys.argv[1:])"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(given), str(found)], check=True)
        results: list[list[Any]] = pickle.loads(found.read_bytes())
        return results


@dataclass(frozen=True)
class Described:
    """A parameter of a rank."""

    name: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    """Shape of what is cut out of the Hugging Face tensors for it."""
    marks: dict[str, Any]


def main(given: str, found: str) -> None:
    install()
    from slime_plugin.train.ranks import run_ranks

    name, calls = pickle.loads(Path(given).read_bytes())
    module = importlib.import_module(name)
    results = [run_ranks(ranks, getattr(module, function), *arguments) for function, ranks, arguments in calls]
    Path(found).write_bytes(pickle.dumps(results))


def install() -> None:
    """Make ``import transformer_engine`` work in this process."""
    if "transformer_engine" in sys.modules:
        return
    assert "megatron.core" not in sys.modules, "Megatron has looked for Transformer Engine already"
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": {},
        "pytorch": {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "RMSNorm": RMSNorm},
        "pytorch.attention": {"_SplitAlongDim": None},
        "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        **{f"pytorch.{name}": {} for name in ("distributed", "fp8", "module", "module.base", "ops", "router")},
        **{f"pytorch.{name}": {} for name in ("float8_tensor", "tensor", "tensor.utils", "cpp_extensions")},
    }
    for name, contents in modules.items():
        module = _Module("transformer_engine" + ("." + name if name else ""))
        vars(module).update({"__path__": [], **contents})
        sys.modules[module.__name__] = module
        parent, _, own = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    del sys.modules["transformer_engine.pytorch.attention"]._SplitAlongDim


class _Module(ModuleType):
    """What it does not have is a class of that name, to be imported and inherited from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (), {})


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        size = normalized_shape or hidden_size or 0
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=params_dtype, device=device))
        if sequence_parallel is not None:
            _mark(self.weight, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self.eps)


class Linear(torch.nn.Module):
    """[out, in] split by rows ("column") or columns ("row"), whatever is split over ranks then."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: torch.distributed.ProcessGroup | None = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        **settings: Any,
    ) -> None:
        super().__init__()
        assert settings.keys() <= SETTINGS, settings.keys() - SETTINGS
        assert (bias, return_bias) == (False, False)
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.use_bias = False
        shape = (self.out_features, self.in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        if device != "meta":
            dimension = 1 if parallel_mode == "row" else 0
            _mark(self.weight, tensor_model_parallel=True, partition_dim=dimension, partition_stride=1)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return self._multiplied(x)

    def _multiplied(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column":
            enter = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
            return functional.linear(enter(x, group=self.tp_group), self.weight)
        leave = (
            mappings.reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region
        )
        result: Tensor = leave(functional.linear(x, self.weight), group=self.tp_group)
        return result


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(in_features, out_features, **settings)
        assert (normalization, return_layernorm_output, zero_centered_gamma) == ("RMSNorm", False, False)
        self.eps = eps
        weight = torch.ones(in_features, dtype=self.weight.dtype, device=self.weight.device)
        self.layer_norm_weight = torch.nn.Parameter(weight)
        if settings.get("device") != "meta":
            _mark(self.layer_norm_weight, sequence_parallel=self.sequence_parallel)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return self._multiplied(_rms_norm(x, self.layer_norm_weight, self.eps))


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    *,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    from tests.train.fused_rope import fused_rope_thd

    assert (tensor_format, fused) == ("thd", True)
    assert cu_seqlens is not None
    return fused_rope_thd(t, cu_seqlens, freqs, cp_size, cp_rank)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 at least, and rounded once."""
    exact = x if x.dtype == torch.float64 else x.float()
    scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(scaled.dtype)).to(x.dtype)


def _mark(parameter: torch.nn.Parameter, **marks: Any) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)
