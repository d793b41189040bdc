"""RMSNorm for the local layer spec: torch's, with the mark that sequence parallelism needs on its weight."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional


class RMSNorm(torch.nn.Module):
    """Megatron's own wrapper around torch's norm refuses sequence parallelism; its Apex and TE norms need CUDA.

    Under sequence parallelism each rank normalises its own tokens, so the gradient of the weight has to be summed over
    the tensor-parallel group; ``sequence_parallel`` on the parameter asks Megatron to do it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
