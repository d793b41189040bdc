"""The model for trees, called as slime calls a model: a packed stream, with the parents of its tokens beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.megatron.model import TreeGPTModel
from slime_plugin.megatron.sequence import TreeSequence, tree_sequence, window_of
from slime_plugin.record.arrays import IntArray
from slime_plugin.seam.packed import Share


class PackedTreeModel(TreeGPTModel):
    """Row ``i - 1`` of its logits predicts token ``i`` of the stream, also where token ``i`` follows another token.

    Under context parallelism it is given, and gives back, what slime cuts rows into (:mod:`slime_plugin.seam.packed`);
    in between each rank has one contiguous window of the stream. Only token ids change hands for that, and the rows in
    front of the head, which are gathered anyway.
    """

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
        length: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """``parent`` has the parents of all rows, ``length`` [rows] how many each has. ``others`` is what else slime
        hands to every model (labels, loss mask, our numbers per token): not needed."""
        if not isinstance(packed_seq_params, TreeSequence):
            bounds = packed_seq_params.cu_seqlens_q.cpu().numpy()
            order = None
            if self.context is not None:
                orders = _held_by_each(bounds, self.context.size())
                order = orders[self.context.rank()]
                if self.pre_process:
                    input_ids = _own_window(input_ids, orders, self.context)
            packed_seq_params = tree_sequence(
                parents_of(bounds, parent, length), device=input_ids.device, cp_group=self.context, order=order
            )
        output: Tensor = super().forward(
            input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=packed_seq_params
        )
        return output


def parents_of(bounds: IntArray, parent: Tensor | None, length: Tensor | None) -> IntArray:
    """[T] parents within the stream, from those within each row; without any, and in the padding, rows are chains."""
    begins = bounds[:-1].repeat(np.diff(bounds))  # [T] where the row of each token begins
    index = np.arange(bounds[-1])
    chain = np.where(index == begins, -1, index - 1).astype(np.int32)
    if parent is None:
        return chain
    within = parent.cpu().numpy()
    lengths = np.array([len(within)]) if length is None else length.cpu().numpy()
    rooms = np.diff(bounds)[: len(lengths)]
    if lengths.sum() != len(within) or len(rooms) < len(lengths) or (lengths > rooms).any():
        raise LayoutError(
            f"{len(within)} parents of rows of {lengths.tolist()!r:.80} tokens for a stream whose rows end at "
            f"{bounds[1:].tolist()!r:.80}; every row of a micro-batch needs its own"
        )
    place = np.arange(len(within)) + (bounds[: len(lengths)] - (lengths.cumsum() - lengths)).repeat(lengths)
    chain[place] = np.where(within < 0, -1, within + begins[place])
    return chain


def _held_by_each(bounds: IntArray, ranks: int) -> list[IntArray]:
    """Places of the stream that each rank has, in its order. What fills the stream up is dealt out like a row."""
    rows = [*zip(bounds[:-1].tolist(), np.diff(bounds).tolist(), strict=True)]
    return [np.concatenate([start + Share(rank, ranks).held(size) for start, size in rows]) for rank in range(ranks)]


def _own_window(input_ids: Tensor, orders: list[IntArray], group: dist.ProcessGroup) -> Tensor:
    """[1, T/cp] ids of this rank's window of the stream, from what every rank was given."""
    parts = [torch.empty_like(input_ids) for _ in orders]
    dist.all_gather(parts, input_ids.contiguous(), group=group)
    stream = torch.empty(sum(map(len, orders)), dtype=input_ids.dtype, device=input_ids.device)
    stream[torch.from_numpy(np.concatenate(orders)).long().to(stream.device)] = torch.cat(parts, dim=1)[0]
    low, high = window_of(len(stream), group)
    return stream[None, low:high]
