"""RoPE by depth: a token's angle depends on how many ancestors it has, not on where it stands in the row."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from slime_plugin.megatron.sequence import TreeSequence


class DepthRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]  # megatron-core is not typed
    """Megatron asks for a length and then for a table of that length; for a tree we answer with the positions.

    The table has one row per token of this rank, in order, which stock ``apply_rotary_pos_emb`` uses as it is because
    a :class:`TreeSequence` presents itself as one sequence.
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
