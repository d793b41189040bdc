"""Runs SGLang on a machine without CUDA: python -m slime_plugin.bridge.server.cpu SGLANG_ARGUMENTS

SGLang imports kernels by name that exist only as CUDA builds, and never calls them for a plain transformer on a CPU.
This puts stand-ins in their place and then runs SGLang's own server, unchanged. SGLang starts its scheduler and
detokenizer as processes that run the main module first (as ``__mp_main__``), so the stand-ins are there too.

Where CUDA exists, and where this module is only imported, it does nothing.
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
"""Packages that are stood in for if they are missing. torchvision is better missing: PyPI has a CUDA build of it, and
where that is installed without CUDA, transformers can no longer be imported."""


class Absent:
    """Any function, class or constant of a package that is not there. It may be named, but not used."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.__name__}.{attribute}")

    def __call__(self, *arguments: Any, **settings: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} needs CUDA; this model cannot be served on a CPU")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else finds, among the packages of ``ABSENT``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(attribute: str) -> Absent:  # noqa: N807  # of a module
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Absent(f"{module.__name__}.{attribute}")

        module.__dict__["__getattr__"] = __getattr__


def stand_in() -> None:
    """Put the stand-ins in their places, for this process."""
    import torch
    from transformers.utils.import_utils import is_torchvision_available

    if torch.cuda.is_available():
        return
    is_torchvision_available()  # transformers remembers the answer, so it will not take the stand-in for the real one
    sys.meta_path.append(_Finder())
    _allow_seeds()


def _allow_seeds() -> None:
    """Let requests have seeds. SGLang offers that together with kernels that do not depend on the batch, on GPUs.

    In float32 on a CPU the batch moves log-probabilities by 1e-6, so a sampled token changes with it once in about a
    million; that will do without such kernels.
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
    kernels.enable_batch_invariant_mode = lambda: None  # type: ignore[attr-defined]  # it is there


_LIBRARIES: list[Any] = []
"""Definitions of operators last as long as these objects."""


def murmur_hash32(seed: Tensor, position: Tensor, column: Tensor) -> Tensor:
    """The noise of a token, uint32 [n, m]: MurmurHash3 (32 bits, seed 0) of the 16 bytes ``(seed, position, column)``.

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
    """One round. Products may overflow 64 bits; their low 32 are right all the same."""
    mask = 0xFFFFFFFF
    block = _rotate(block * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    return _rotate(state ^ block, 13) * 5 + 0xE6546B64 & mask


def _rotate(value: Tensor, bits: int) -> Tensor:
    return (value << bits | value >> 32 - bits) & 0xFFFFFFFF


if __name__ == "__main__":
    from slime_plugin.bridge.server.process import end_with_parent

    end_with_parent()

if __name__ in ("__main__", "__mp_main__"):
    stand_in()

if __name__ == "__main__":
    sglang = importlib.import_module("sglang.launch_server")
    settings = importlib.import_module("sglang.srt.server_args").prepare_server_args(sys.argv[1:])
    try:
        sglang.run_server(settings)
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)
