"""Megatron's pipeline schedule around a model for trees: micro-batches in, what the last stage makes of them out.

Every stage gets every micro-batch, because each needs the parents; only the last one computes a loss. Losses are sums
whose weights already say what each token counts, so nothing is divided afterwards: not by micro-batches, not by data-
or context-parallel ranks. The gradients of all ranks simply add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from slime_plugin.errors import LayoutError
from slime_plugin.megatron.batch import MicroBatch
from slime_plugin.megatron.parallel import context_group
from slime_plugin.megatron.sequence import tree_sequence, window_of
from slime_plugin.record.arrays import IntArray

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Predictions:
    """What the last stage has of one micro-batch on this rank."""

    batch: MicroBatch
    rows: Tensor
    """[m, V/tp] logits, or [M, h] hidden states, in front of the predicted tokens."""
    share: slice
    """Which of the M predicted tokens these are: with logits, this context-parallel rank's part of them."""

    def targets(self) -> Tensor:
        """[m] the token ids to be predicted."""
        return torch.from_numpy(self.batch.targets[self.share].astype(np.int64)).to(self.rows.device)

    @property
    def own_leaves(self) -> slice:
        """Which of the D leaves of the micro-batch are in the share."""
        start, stop = np.searchsorted(self.batch.leaves, (self.share.start, self.share.stop)).tolist()
        return slice(start, stop)

    def leaf_rows(self) -> Tensor:
        """[d] their indices in ``rows``."""
        indices = self.batch.leaves[self.own_leaves] - self.share.start
        return torch.from_numpy(indices).to(self.rows.device)


Consume = Callable[[Predictions], tuple[Tensor, Result]]
"""Turns predictions into a scalar to minimise and whatever the caller wants back.

The scalar of an update depends on the predictions also where there are none of them, as an empty sum does: a rank
without tokens of its own still takes part in the backward pass of the others.
"""


def run(
    models: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    consume: Consume[Result],
    groups: ProcessGroupCollection,
    *,
    forward_only: bool,
    project: bool = True,
) -> list[Result]:
    """What ``consume`` returned for each micro-batch, on the last stage; nothing on the others.

    The head computes the rows in front of predicted tokens and no others, split evenly over the context-parallel ranks.
    Without ``project`` there is no head: every rank gets all those hidden states. Without ``forward_only`` gradients
    are in the models' ``main_grad`` afterwards, summed over all ranks.
    """
    step = _ForwardStep(get_model_config(models[0]), context_group(groups), consume, project)
    missing = -len(batches) % groups.pp.size() if len(models) > 1 else 0
    if missing and not forward_only:
        raise LayoutError(
            f"{len(batches)} micro-batches cannot be interleaved over {groups.pp.size()} stages; make it a multiple"
        )
    filled = [*batches, *[batches[-1]] * missing]  # what virtual stages take turns with has to be a multiple
    return run_schedule(models, filled, step, groups, forward_only=forward_only)[: len(batches)]


def run_schedule(
    models: Sequence[torch.nn.Module],
    batches: Sequence[Any],
    forward_step: Callable[..., Any],
    groups: ProcessGroupCollection,
    *,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule for these groups, with micro-batches of any kind and length.

    ``forward_step(iterator, model)`` takes the next one through a stage; what it returns beside the output is called
    with the output on the last stage, and gives a scalar, the number 1 and a result. The results come back, there.
    """
    config = get_model_config(models[0])
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models] if len(models) > 1 else iter(batches),
        model=list(models),
        num_microbatches=len(batches),
        seq_length=0,  # every micro-batch tells its own
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=P2PCommunicator(groups.pp, config),
        pg_collection=groups,
    )
    return results


def wrap_for_training(
    config: TransformerConfig, models: Sequence[torch.nn.Module], groups: ProcessGroupCollection
) -> list[torch.nn.Module]:
    """Megatron's data-parallel wrapper, with gradients that are summed over ranks and divided by nothing."""
    config.finalize_model_grads_func = _finalize
    settings = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return [
        DistributedDataParallel(config, settings, model, disable_bucketing=i > 0, pg_collection=groups)
        for i, model in enumerate(models)
    ]


def _finalize(models: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's, without its division by the number of tokens."""
    finalize_model_grads(models, None, **kwargs)


@dataclass(frozen=True, slots=True)
class _ForwardStep(Generic[Result]):
    """Megatron's ``forward_step_func``: the next micro-batch through one stage, and what to do with the output."""

    config: TransformerConfig
    cp_group: dist.ProcessGroup | None
    consume: Consume[Result]
    project: bool

    def __call__(
        self, batches: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Result]]]:
        batch = next(batches)
        device = next(model.parameters()).device
        low, high = window_of(len(batch), self.cp_group)
        share = _share(len(batch.predicted), self.cp_group if self.project else None)
        sequence = tree_sequence(
            batch.parent,
            device=device,
            cp_group=self.cp_group,
            predict=self._whole_rows(batch.predicted[share], batch),
            project=self.project,
            position=batch.position,
            visible=batch.visible,
        )
        output = model(
            input_ids=torch.from_numpy(batch.tokens[low:high].astype(np.int64))[None].to(device),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=sequence,
        )
        return output, partial(self._loss, batch, share)

    def _whole_rows(self, predicted: IntArray, batch: MicroBatch) -> IntArray:
        """At least one, and as many as the head can split; those that were added are dropped in ``_loss``."""
        multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        missing = -len(predicted) % multiple if len(predicted) else multiple
        spare = np.flatnonzero(batch.parent >= 0)[:1].astype(np.int32)
        return np.concatenate((predicted, spare.repeat(missing)))

    def _loss(self, batch: MicroBatch, share: slice, output: Tensor) -> tuple[Tensor, Tensor, Result]:
        rows = output[0] if self.project else output[:, 0]  # [1, rows, V/tp] from the head, else [rows, 1, h]
        loss, result = self.consume(Predictions(batch, rows[: share.stop - share.start], share))
        return loss, torch.ones((), dtype=torch.int, device=rows.device), result


def _share(rows: int, group: dist.ProcessGroup | None) -> slice:
    """This rank's part of the predicted rows."""
    if group is None:
        return slice(0, rows)
    return slice(rows * group.rank() // group.size(), rows * (group.rank() + 1) // group.size())
