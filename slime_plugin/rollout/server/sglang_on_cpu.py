"""Run SGLang without CUDA: python -m slime_plugin.rollout.server.sglang_on_cpu SGLANG_ARGUMENTS

SGLang imports kernels that exist only as CUDA builds, but does not call them for a plain transformer on a CPU. This
module installs stubs and then runs SGLang's own server, unchanged. SGLang's scheduler and detokenizer processes run
the main module first (as ``__mp_main__``), so they have the stubs too.

Does nothing where CUDA exists, or if it is only imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

ABSENT = ("sgl_kernel", "torchvision")
"""Packages that get stubs if they are missing. torchvision should be missing: PyPI has a CUDA build of it, with
which transformers cannot be imported on a machine without CUDA."""


class _Stub:
    """Any attribute of a missing package: it may be imported, but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> _Stub:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Stub(f"{self.__name__}.{attribute}")

    def __call__(self, *arguments: Any, **settings: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} needs CUDA; this model cannot be served on a CPU")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ``ABSENT`` if no other finder does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(attribute: str) -> _Stub:  # noqa: N807  # of a module
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return _Stub(f"{module.__name__}.{attribute}")

        module.__dict__["__getattr__"] = __getattr__


def install_stubs() -> None:
    """Install the stubs in this process."""
    import torch
    from transformers.utils.import_utils import is_torchvision_available

    if torch.cuda.is_available():
        return
    is_torchvision_available()  # cached by transformers, so the stub is not taken for the real package
    sys.meta_path.append(_Finder())
    _allow_seeds()


def _allow_seeds() -> None:
    """Enable seeds per request, which SGLang offers only with batch-invariant GPU kernels.

    In float32 on a CPU the batch changes log-probabilities by 1e-6, and so about one sampled token in a million.
    """
    import torch

    operators: Any = torch.library  # untyped
    library = operators.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _LIBRARIES.append(library)

    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    kernels = importlib.import_module("sglang.srt.batch_invariant_ops")
    kernels.enable_batch_invariant_mode = lambda: None  # type: ignore[attr-defined]  # it exists


_LIBRARIES: list[Any] = []
"""Keeps the operator definitions alive."""


def murmur_hash32(seed: Tensor, position: Tensor, column: Tensor) -> Tensor:
    """Return the sampling noise, uint32 [n, m]: MurmurHash3 (32 bits, seed 0) of ``(seed, position, column)``.

    The same as on a GPU, for seed int64 [n], position [n] and column [m].
    """
    import torch

    mask = 0xFFFFFFFF
    seed, position, column = (value.to(torch.int64) for value in (seed, position, column))
    state = torch.zeros_like(seed)
    for block in (seed & mask, seed >> 32 & mask, position & mask):
        state = _absorb(state, block)  # [n]
    state = _absorb(state[:, None], column[None, :] & mask) ^ 16  # [n, m]; the length in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return (state ^ state >> 16).to(torch.uint32)


def _absorb(state: Tensor, block: Tensor) -> Tensor:
    """One round. Products may overflow 64 bits; their low 32 bits are correct."""
    mask = 0xFFFFFFFF
    block = _rotate(block * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    return _rotate(state ^ block, 13) * 5 + 0xE6546B64 & mask


def _rotate(value: Tensor, bits: int) -> Tensor:
    return (value << bits | value >> 32 - bits) & 0xFFFFFFFF


if __name__ in ("__main__", "__mp_main__"):
    install_stubs()

if __name__ == "__main__":
    sglang = importlib.import_module("sglang.launch_server")
    settings = importlib.import_module("sglang.srt.server_args").prepare_server_args(sys.argv[1:])
    try:
        sglang.run_server(settings)
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)
