"""The model for trees, called as slime calls a model: a packed stream, with the parents of its tokens beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.megatron.model import TreeGPTModel
from slime_plugin.megatron.sequence import TreeSequence, tree_sequence
from slime_plugin.record.arrays import IntArray


class PackedTreeModel(TreeGPTModel):
    """Row ``i - 1`` of its logits predicts token ``i`` of the stream, also where token ``i`` follows another token."""

    context: dist.ProcessGroup | None = None
    """The context-parallel group, if it has several members; set once, when the model is built."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        parent: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """``others`` is what else slime hands to every model (labels, loss mask, our numbers per token): not needed."""
        if not isinstance(packed_seq_params, TreeSequence):
            packed_seq_params = tree_sequence(
                parents_of(packed_seq_params.cu_seqlens_q, parent),
                device=input_ids.device,
                cp_group=self.context,
            )
        output: Tensor = super().forward(
            input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=packed_seq_params
        )
        return output


def parents_of(bounds: Tensor, parent: Tensor | None) -> IntArray:
    """[T] parents within the stream, from those within each row; without any, and in the padding, rows are chains."""
    starts = bounds.cpu().numpy()
    begins = starts[:-1].repeat(np.diff(starts))  # [T] where the row of each token begins
    index = np.arange(starts[-1])
    chain = np.where(index == begins, -1, index - 1).astype(np.int32)
    if parent is None:
        return chain
    within = parent.cpu().numpy()
    size = len(within)
    if size not in starts:
        raise LayoutError(f"{size} parents for rows that end at {starts[1:].tolist()!r:.80}; some rows have none")
    chain[:size] = np.where(within < 0, -1, within + begins[:size])
    return chain
