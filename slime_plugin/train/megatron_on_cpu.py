"""Lets megatron-core run where there is no CUDA: four substitutions, and none of them where there is.

Megatron asks for tensors on ``"cuda"``; for the current device, which it synchronises after pipeline messages; it
moves shared embeddings with ``Tensor.cuda()``; and it saves and forks a CUDA random state around initialisation and
recompute. On a machine without a GPU each of these means the CPU. Everything else - layers, schedules, gradient
buffers, collectives over gloo - runs as it is.

torch's own factory functions are left alone, because others rely on their identity (``with torch.device(...)``): the
Megatron modules that name ``"cuda"`` get a wrapper of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random

_NAMING_CUDA = (schedules, optimizer, clip_grads, grad_scaler, utils)


def patch_for_cpu() -> None:
    """Apply the substitutions; do nothing where CUDA exists, or the second time."""
    if torch.cuda.is_available() or isinstance(schedules.torch, _TorchOnCpu):
        return
    for module in _NAMING_CUDA:
        module.torch = _TorchOnCpu()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]  # a device will do
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]  # already on the CPU
    megatron_random.CudaRNGStatesTracker.fork = _no_fork
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


class _TorchOnCpu:
    """The torch module, except that tensors asked for on CUDA are created on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, **kwargs | {"device": "cpu"})

    @staticmethod
    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, **kwargs | {"device": "cpu"})


@contextlib.contextmanager
def _no_fork(self: Any, *_: Any) -> Iterator[None]:
    """Dropout is refused, so the only random numbers are those of initialisation: the CPU generator's."""
    yield
