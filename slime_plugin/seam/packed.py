"""slime's packed micro-batch: which logits predict which trained tokens.

A micro-batch is one stream of T tokens: rows one after the other, then padding. The last ``response_length`` tokens of
a row are its response, and everything that slime has per token of a response is a list with one tensor per row. The
logits of the token before (which the model has arranged to be those of the *parent*) predict a token. Under context
parallelism a rank has the logits of one contiguous window of the stream. Legend: M trained tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_plugin.record.arrays import Span

Batch = Mapping[str, Any]
"""What slime's ``get_batch`` gives: lists per row, and the packed stream."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The trained tokens of a micro-batch that this rank's logits predict, each [M]."""

    logits: Tensor
    """Their rows in this rank's logits."""
    response: Tensor
    """Their places in the responses, one after the other."""
    stream: Tensor
    """Their places in the stream."""
    tokens: Tensor
    """Their ids."""
    weight: Tensor
    """One over the trained tokens of their rollout."""


def trained_tokens(batch: Batch, window: Span, device: torch.device) -> Trained:
    lengths = torch.as_tensor(batch["total_lengths"], device=device)
    responses = torch.as_tensor(batch["response_lengths"], device=device)
    row = torch.repeat_interleave(responses)  # [R] which row
    # A row's response ends with the row: both are counted from the ends of the rows.
    from_end = responses.cumsum(0)[row] - torch.arange(len(row), device=device)
    stream = lengths.cumsum(0)[row] - from_end  # [R]
    low, high = window
    mine = joined(batch["loss_masks"], device).bool() & (stream > low) & (stream <= high)
    response = mine.nonzero()[:, 0]
    stream = stream[response]
    denominators = torch.stack([torch.as_tensor(x, device=device) for x in batch["rollout_mask_sums"]])
    return Trained(
        logits=stream - 1 - low,
        response=response,
        stream=stream,
        tokens=joined(batch["unconcat_tokens"], device)[stream],
        weight=1.0 / denominators[row[response]].clamp_min(1),
    )


def joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """One tensor of what is a list with one tensor per row."""
    return torch.cat([part.to(device) for part in parts])
