"""The model for trees, called as slime calls a model: a packed stream, with the parents of its tokens beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.methods.row import join_parents
from slime_plugin.record.arrays import BoolArray, IntArray
from slime_plugin.slime.packed_batch import ContextPart
from slime_plugin.train.tree_model import TreeGPTModel
from slime_plugin.train.tree_sequence import TreeSequence, tree_sequence, window_of


class PackedTreeModel(TreeGPTModel):
    """Row ``i - 1`` of its logits predicts token ``i`` of the stream, even where token ``i`` follows another token.

    Under context parallelism it takes and returns the chunks that slime cuts rows into
    (:mod:`.packed_batch`); in between each rank has one contiguous window of the stream. Only token ids are exchanged
    for that, and the rows in front of the head, which are gathered anyway.
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
        visible: Tensor | None = None,
        position: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """``parent`` has the parents of all rows, ``length`` [rows] how many each has; ``visible`` [N, N] and
        ``position`` [N] replace them for a micro-batch of one row with a mask of its own. ``others`` is not used:
        what slime passes to every model (labels, loss mask) and our numbers per token."""
        if not isinstance(packed_seq_params, TreeSequence):
            bounds = packed_seq_params.cu_seqlens_q.cpu().numpy()
            order = None
            if self.context is not None:
                orders = _held_by_each(bounds, self.context.size())
                order = orders[self.context.rank()]
                if self.pre_process:
                    input_ids = _own_window(input_ids, orders, self.context)
            packed_seq_params = tree_sequence(
                parents_of(bounds, parent, length),
                device=input_ids.device,
                cp_group=self.context,
                order=order,
                visible=None if visible is None else _padded_mask(visible.cpu().numpy(), int(bounds[-1])),
                position=None if position is None else _padded_positions(position.cpu().numpy(), int(bounds[-1])),
            )
        output: Tensor = super().forward(
            input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=packed_seq_params
        )
        return output


def parents_of(bounds: IntArray, parent: Tensor | None, length: Tensor | None) -> IntArray:
    """Return [T] parents in the stream, from those in each row; without any, and in the padding, rows are chains."""
    sizes = np.diff(bounds)
    rows = [np.arange(size, dtype=np.int32) - 1 for size in sizes]
    if parent is None:
        return join_parents(rows)
    within = parent.cpu().numpy()
    lengths = np.array([len(within)]) if length is None else length.cpu().numpy()
    if lengths.sum() != len(within) or len(rows) < len(lengths) or (lengths > sizes[: len(lengths)]).any():
        raise LayoutError(
            f"{len(within)} parents of rows of {lengths.tolist()!r:.80} tokens for a stream whose rows end at "
            f"{bounds[1:].tolist()!r:.80}; every row of a micro-batch needs its own"
        )
    for row, own in zip(rows, np.split(within, lengths.cumsum()[:-1]), strict=False):  # without the padding
        row[: len(own)] = own
    return join_parents(rows)


def _padded_mask(visible: BoolArray, tokens: int) -> BoolArray:
    """[T, T] with padding that sees itself."""
    mask = np.eye(tokens, dtype=np.bool_)
    mask[: len(visible), : len(visible)] = visible
    return mask


def _padded_positions(position: IntArray, tokens: int) -> IntArray:
    return np.pad(position, (0, tokens - len(position)))


def _held_by_each(bounds: IntArray, ranks: int) -> list[IntArray]:
    """Return the indices in the stream that each rank holds, in its order. Padding is split like a row."""
    rows = [*zip(bounds[:-1].tolist(), np.diff(bounds).tolist(), strict=True)]
    return [
        np.concatenate([start + ContextPart(rank, ranks).held(size) for start, size in rows]) for rank in range(ranks)
    ]


def _own_window(input_ids: Tensor, orders: list[IntArray], group: dist.ProcessGroup) -> Tensor:
    """Return [1, T/cp] ids of this rank's window of the stream, from those that each rank holds."""
    parts = [torch.empty_like(input_ids) for _ in orders]
    dist.all_gather(parts, input_ids.contiguous(), group=group)
    stream = torch.empty(sum(map(len, orders)), dtype=input_ids.dtype, device=input_ids.device)
    stream[torch.from_numpy(np.concatenate(orders)).long().to(stream.device)] = torch.cat(parts, dim=1)[0]
    low, high = window_of(len(stream), group)
    return stream[None, low:high]
