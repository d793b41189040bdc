"""slime's packed micro-batch: which tokens a rank holds, and which of its logits predict which trained tokens.

A micro-batch is one stream of T tokens: rows one after the other, then padding. The last ``response_length`` tokens of
a row are its response, and everything that slime has per token of a response is a list with one tensor per row. The
logits of the token before (which the model has arranged to be those of the *parent*) predict a token.

Under context parallelism slime cuts every row into 2 x cp chunks of one length and gives each rank the chunk of its
number from the front and the one from the back; the last chunks are padded::

    a row of 7 tokens, cp 2:    rank 0  0 1  6 .      rank 1  2 3  4 5

A rank then has the logits of those tokens only, and of whatever slime has per token of a response only what these
logits predict, in their order. Legend: M trained tokens, R response tokens that this rank's logits predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.record.arrays import IntArray
from slime_plugin.train.vocabulary import statistics_dtype

PackedBatch = Mapping[str, Any]
"""What slime's ``get_batch`` returns: lists per row, and the packed stream."""


class ContextPart(NamedTuple):
    """The part of every row that a context-parallel rank holds."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ContextPart:
        return cls() if group is None else cls(group.rank(), group.size())

    def padded(self, length: int) -> int:
        """Return the tokens of a row on all ranks together, with padding."""
        return length if self.size == 1 else -(-length // (2 * self.size)) * 2 * self.size

    def held(self, length: int) -> IntArray:
        """Return the indices in a row that the rank holds, in its order; those from ``length`` on are padding.

        >>> ContextPart(0, 2).held(7).tolist(), ContextPart(1, 2).held(7).tolist()
        ([0, 1, 6, 7], [2, 3, 4, 5])
        """
        if self.size == 1:
            return np.arange(length, dtype=np.int32)
        chunk = self.padded(length) // (2 * self.size)
        front, back = self.rank * chunk, (2 * self.size - 1 - self.rank) * chunk
        step = np.arange(chunk, dtype=np.int32)
        return np.concatenate((front + step, back + step))

    def predicted(self, length: int, response: int) -> tuple[IntArray, IntArray]:
        """Return [R] which of the tokens held predict a response token, and [R] which response tokens those are."""
        follows = self.held(length) + 1 - (length - response)
        rows = np.flatnonzero((follows >= 0) & (follows < response)).astype(np.int32)
        return rows, follows[rows]


@dataclass(frozen=True, slots=True)
class TrainedIndices:
    """The trained tokens of a micro-batch that this rank's logits predict, each [M]."""

    logits: Tensor
    """Their rows in this rank's logits."""
    response: Tensor
    """Their indices in what this rank has per token of a response, the rows one after the other."""
    stream: Tensor
    """Their indices in the stream without padding."""
    tokens: Tensor
    """Their ids."""
    share: Tensor
    """One over the trained tokens of their rollout, in the dtype of the loss statistics."""


def trained_tokens(batch: PackedBatch, part: ContextPart, logits: Tensor) -> TrainedIndices:
    device = logits.device
    parts: list[tuple[IntArray, IntArray]] = []
    rows_before = stream_before = 0
    for length, response in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        held, tokens = part.predicted(int(length), int(response))
        parts.append((held + rows_before, tokens + stream_before + int(length) - int(response)))
        rows_before += part.padded(int(length)) // part.size
        stream_before += int(length)
    rows, stream = (torch.from_numpy(np.concatenate(part)).long().to(device) for part in zip(*parts, strict=True))
    row = torch.repeat_interleave(torch.tensor([len(held) for held, _ in parts])).to(device)  # [R] of which row
    masks = _at_the_end(batch["loss_masks"], batch["total_lengths"], device)[stream]
    response = masks.bool().nonzero()[:, 0]
    stream = stream[response]
    trained = torch.stack([torch.as_tensor(x, device=device) for x in batch["rollout_mask_sums"]])
    return TrainedIndices(
        logits=rows[response],
        response=response,
        stream=stream,
        tokens=joined(batch["unconcat_tokens"], device)[stream],
        share=1.0 / trained[row[response]].clamp_min(1).to(statistics_dtype(logits)),
    )


def joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate a list with one tensor per row."""
    return torch.cat([part.to(device) for part in parts])


def _at_the_end(parts: Sequence[Tensor], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return a number per token of the stream from one per token of a response; zero before it."""
    return torch.cat(
        [
            torch.nn.functional.pad(part.to(device), (int(length) - len(part), 0))
            for part, length in zip(parts, lengths, strict=True)
        ]
    )
