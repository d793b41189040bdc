"""The ranks that checks compute on: those of one replica of the cell, with its model as training loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from slime_plugin.local.rank import Rank
from slime_plugin.record.arrays import IntArray
from slime_plugin.slime.args import args_of
from slime_plugin.train.pipeline import run_schedule
from slime_plugin.train.process_groups import is_last_stage
from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.train.tree_sequence import TreeSequence, window_of
from slime_plugin.verify.measurement import SkippedError
from slime_plugin.verify.settings import Verification

Result = TypeVar("Result")


def run_on_ranks(ranks: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Return what ``function(...)`` returns on each rank, in a world of its own. Skip what needs several machines."""
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise SkippedError(f"a replica has {ranks} ranks, and this machine {torch.cuda.device_count()} GPUs")
    return run_ranks(ranks, call, function, *arguments)


def call(on_progress: OnProgress, function: Callable[..., Result], *arguments: Any) -> Result:
    """Leave the progress out. All checks start from this module, so that ranks on a CPU are forked from one server."""
    return function(*arguments)


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def random_tensor(generator: np.random.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return normal numbers, the same on all ranks, rounded to ``dtype``."""
    numbers = generator.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(numbers).to(dtype).to(device())


def open_rank(verification: Verification) -> Rank:
    """Load the model of the cell, split as the cell says, for passes without updates. Collective."""
    return Rank(args_of(verification.one_replica()), updates=False)


def run_model(rank: Rank, tokens: IntArray, sequence: TreeSequence) -> Tensor | None:
    """Return what the model makes of a sequence, on the last stage, without gradient. Collective.

    Logits [1, M, V/tp], or hidden states [M, 1, h] if the sequence asks for them.
    """
    groups = rank.groups

    def forward_step(
        batches: Iterator[IntArray], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
        low, high = window_of(len(tokens), sequence.cp_group)
        ids = torch.from_numpy(next(batches)[low:high].astype(np.int64))[None].to(device())
        output = model(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=sequence)
        return output, _keep

    with torch.no_grad():
        results = run_schedule(rank.models, [tokens], forward_step, groups, forward_only=True)
    return results[0] if is_last_stage(groups) else None


def _keep(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return output.new_zeros(()), torch.ones((), dtype=torch.int, device=output.device), output.clone()
