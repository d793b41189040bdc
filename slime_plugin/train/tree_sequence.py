"""A packed row of trees in the shape in which Megatron carries packed sequences through a model.

Megatron hands ``packed_seq_params`` to every layer, and activation recompute captures it; so a subclass of it reaches
tree attention, the rotary table and the head without a patch. To stock code it looks like one sequence, which is what
its per-sequence loops should do with a tree: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.record.arrays import BoolArray, IntArray, Span
from slime_plugin.train.tree_plan import TreePlan, plan_tree


@dataclass
class TreeSequence(PackedSeqParams):  # type: ignore[misc]  # megatron-core is not typed
    """The tokens of a stream for the model. ``cp_group`` is the context-parallel group, or None."""

    plan: TreePlan = None  # type: ignore[assignment]  # always given; a default only because its base has them
    """Who attends to whom."""
    position: Tensor = None  # type: ignore[assignment]  # likewise
    """[window] position ids of this rank's tokens."""
    visible: Tensor | None = None
    """[T, T] an explicit attention mask that replaces the plan."""
    head_rows: Tensor | None = None
    """Which rows of the hidden states, over the whole row, the head gets, in this order; None: as they are."""
    project: bool = True
    """False returns the hidden rows themselves: what the SDCC teacher keeps."""


def tree_sequence(
    parent: IntArray,
    *,
    device: torch.device | str = "cpu",
    cp_group: dist.ProcessGroup | None = None,
    predict: IntArray | None = None,
    order: IntArray | None = None,
    project: bool = True,
    position: IntArray | None = None,
    visible: BoolArray | None = None,
) -> TreeSequence:
    """Return the sequence of a row, for this rank's window of it.

    By default the head gets a row per token, arranged so that row ``i - 1`` predicts token ``i``: the hidden state of
    token ``i``'s *parent* is put there. Any next-token loss then works on a tree unchanged. With ``order``, the head
    of this rank gets these indices of the row instead of its window; with ``predict``, only the rows that predict these
    tokens.
    """
    tokens = len(parent)
    window = window_of(tokens, cp_group)
    plan = plan_tree(parent, window)
    if visible is None:
        position = plan.depth
    elif position is None or cp_group is not None:
        raise LayoutError("an explicit attention mask needs position ids and no context parallelism; set cp to 1")
    low, high = window
    size = high - low
    bounds = torch.tensor([0, size], dtype=torch.int32, device=device)  # for fused RoPE, whose kernel reads it
    rows = _rows_by_token(parent, predict) if predict is not None else _rows_by_successor(parent, window, order)
    return TreeSequence(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=size,
        max_seqlen_kv=size,
        cp_group=cp_group,
        plan=plan,
        position=torch.from_numpy(position[low:high].copy()).to(device),
        visible=None if visible is None else torch.from_numpy(visible).to(device),
        head_rows=None if rows is None else torch.from_numpy(rows).to(device),
        project=project,
    )


def window_of(tokens: int, group: dist.ProcessGroup | None) -> Span:
    """Return this rank's contiguous part of a row."""
    if group is None:
        return (0, tokens)
    share, rest = divmod(tokens, group.size())
    if rest:
        raise LayoutError(f"a row of {tokens} tokens does not divide over {group.size()} context ranks; pad it")
    return (group.rank() * share, (group.rank() + 1) * share)


def _rows_by_successor(parent: IntArray, window: Span, order: IntArray | None) -> IntArray | None:
    """[window] the parent of the next token, or the row itself where the next token is a root or there is none.

    None if that is everywhere the row itself, on every rank: packed plain sequences need no gather.
    """
    rows = np.arange(len(parent), dtype=np.int32)
    follows = np.flatnonzero(parent[1:] >= 0)
    rows[follows] = parent[1:][follows]
    if order is not None:
        return rows[order]
    if np.array_equal(rows, np.arange(len(parent))):
        return None
    return rows[window[0] : window[1]]


def _rows_by_token(parent: IntArray, predict: IntArray) -> IntArray:
    roots = predict[parent[predict] < 0]
    if roots.size:
        raise LayoutError(f"token {int(roots[0])} is a root: nothing precedes it, so nothing predicts it")
    rows: IntArray = parent[predict]
    return rows
