"""Megatron's pipeline schedule around slime's packed micro-batches: log-probabilities without gradient, and updates."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_plugin.hooks import train as hooks
from slime_plugin.slime.packed_batch import PackedBatch
from slime_plugin.slime.training import Training
from slime_plugin.train.pipeline import run_schedule
from slime_plugin.train.process_groups import is_last_stage

RolloutData = dict[str, Any]
"""A replica's part of a batch, with slime's keys."""
Result = TypeVar("Result")
_KEYS = (
    *("tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums"),
    *("rollout_log_probs", "advantages", "log_probs", "ref_log_probs"),
)


class Passes:
    """Forward and backward passes of a rank over its part of a batch."""

    def __init__(self, args: Namespace, training: Training, models: Sequence[torch.nn.Module]) -> None:
        self._args = args
        self._training = training
        self._models = models
        self._part = training.context_part
        parallel = training.cell.trainer.parallel
        self._multiple = (parallel.tp if parallel.sp else 1) * (2 if parallel.cp > 1 else 1)
        self._device = next(models[0].parameters()).device

    def logprobs(self, data: RolloutData) -> list[Tensor] | None:
        """Return this rank's part of [response] of each row, 0 where there is no loss; None on all stages but the
        last."""
        results = self.forward(data, self._keep_logprobs)
        if not is_last_stage(self._training.groups):
            return None
        return [logprobs for batch in results for logprobs in batch]  # micro-batches hold the rows in order

    def forward(self, data: RolloutData, consume: Callable[[PackedBatch, Tensor], Result]) -> list[Result]:
        """Return what ``consume(batch, logits)`` returns for each micro-batch, on the last stage, without gradient."""

        def keep(batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor, Result]:
            return logits.new_zeros(()), _one(logits), consume(batch, logits)

        with torch.no_grad():
            return self._run(data, data["micro_batch_indices"], keep, forward_only=True)

    def update(self, data: RolloutData, step: int) -> list[dict[str, Tensor]]:
        """Add the gradients of a step to the buffers of the models; return the sums of its micro-batches."""
        first = sum(data["num_microbatches"][:step])
        batches = data["micro_batch_indices"][first : first + data["num_microbatches"][step]]
        rollouts = data["global_batch_sizes"][step]
        return self._run(data, batches, partial(self._loss, rollouts), forward_only=False)

    def _run(
        self,
        data: RolloutData,
        batches: Sequence[Sequence[int]],
        consume: Callable[[dict[str, Any], Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        def forward_step(
            iterator: Iterator[dict[str, Any]], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
            batch = next(iterator)
            output = model(
                input_ids=batch["tokens"],
                position_ids=None,
                attention_mask=None,
                labels=None,
                packed_seq_params=batch["packed_seq_params"],
                loss_mask=None,
                **batch["multimodal_train_inputs"],
            )
            return output, partial(consume, batch)

        packed = [self._pack(data, indices) for indices in batches]
        return run_schedule(self._models, packed, forward_step, self._training.groups, forward_only=forward_only)

    def _pack(self, data: RolloutData, indices: Sequence[int]) -> dict[str, Any]:
        """Build a micro-batch in the shape of slime's ``get_batch``."""
        batch: dict[str, Any] = {
            key: None if data.get(key) is None else [data[key][i] for i in indices] for key in _KEYS
        }
        batch["unconcat_tokens"] = batch["tokens"]
        part, rows = self._part, []
        for tokens in batch["tokens"]:
            fill = part.padded(len(tokens)) - len(tokens)
            rows.append(torch.nn.functional.pad(tokens, (0, fill))[torch.from_numpy(part.held(len(tokens))).long()])
        lengths = [len(row) for row in rows]
        padding = -sum(lengths) % self._multiple
        if padding:
            rows.append(torch.zeros(padding, dtype=torch.long))
            lengths.append(padding)
        batch["tokens"] = torch.cat(rows).to(self._device)[None]
        bounds = [0, *(torch.tensor(lengths).cumsum(0) * part.size).tolist()]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=self._device)
        batch["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
        inputs = batch["multimodal_train_inputs"]
        batch["multimodal_train_inputs"] = {
            key: torch.cat([row[key] for row in inputs]).to(self._device) for key in inputs[0]
        }
        return batch

    def _loss(self, rollouts: int, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, sums = hooks.loss(self._args, batch, logits, _unused_mean)
        return loss / rollouts, _one(logits), sums

    def _keep_logprobs(self, batch: PackedBatch, logits: Tensor) -> list[Tensor]:
        logprobs, trained = self._training.logprobs(batch, logits)
        sizes = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
        lengths = [len(self._part.predicted(int(length), int(response))[0]) for length, response in sizes]
        every = logprobs.new_zeros(sum(lengths))
        every[trained.response] = logprobs
        return list(torch.split(every, lengths))


def _one(like: Tensor) -> Tensor:
    """The number of tokens that Megatron expects; nothing is divided by it."""
    return torch.ones((), dtype=torch.int, device=like.device)


def _unused_mean(values: Tensor) -> Tensor:
    raise AssertionError("the loss forms its own means")
