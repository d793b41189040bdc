"""The layers of a GPT that follow trees: core attention, RoPE by depth, and an RMSNorm for machines without CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from slime_plugin.errors import LayoutError
from slime_plugin.train.attention import attend_masked, choose_backend
from slime_plugin.train.tree_sequence import TreeSequence


class TreeAttention(MegatronModule):  # type: ignore[misc]  # megatron-core is not typed
    """Core attention along the plan of a :class:`TreeSequence`. It has no parameters and no state.

    Queries stay where they are; under context parallelism keys and values are gathered over the group, and their
    gradients come back by reduce-scatter.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, backend: str | None = None, **stock: Any) -> None:
        super().__init__(config=config)
        self.attend = choose_backend(backend)
        self.scale = stock.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[window, heads, d] from query [window, heads, d], key and value [window, groups, d]."""
        if not isinstance(packed_seq_params, TreeSequence):
            raise LayoutError(
                f"tree attention got {type(packed_seq_params).__name__} instead of a TreeSequence; "
                "pass packed_seq_params=tree_sequence(parent, ...) to the model"
            )
        sequence = packed_seq_params
        if sequence.cp_group is not None:
            both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=sequence.cp_group)
            key, value = both.chunk(2, dim=-1)
        if sequence.visible is not None:
            return attend_masked(query, key, value, sequence.visible, self.scale)
        return self.attend(query, key, value, sequence.plan, self.scale)


class DepthRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]  # megatron-core is not typed
    """RoPE by depth: the angle of a token depends on its number of ancestors, not on its index in the row.

    Megatron asks for a length and then for a table of that length; for a tree both are answered with the positions. The
    table has one row per token of this rank, in order. Stock ``apply_rotary_pos_emb`` and Transformer Engine's fused
    kernel give token i of a sequence row i, and a :class:`TreeSequence` presents itself as one sequence.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("packed_seq_params", args[4] if len(args) > 4 else None)
        if isinstance(params, TreeSequence):
            return params.position
        return super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, length_or_positions: int | Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(length_or_positions, Tensor):
            table: Tensor = super().forward(length_or_positions, *args, **kwargs)
            return table
        frequencies: Tensor = self.inv_freq.to(length_or_positions.device)
        angles = torch.outer(length_or_positions.to(frequencies.dtype), frequencies)  # [window, d / 2]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RMSNorm(torch.nn.Module):
    """torch's norm for the local layer spec. Megatron's own wrapper around it refuses sequence parallelism, and its
    Apex and TE norms need CUDA.

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
