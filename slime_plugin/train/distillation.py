"""SDCC's teacher and schedule. The teacher is the policy itself, without gradient, on the contexts in which the
diverging leaves were sampled.

It is one forward-only pass over the teacher rows of a step, before the first micro-batch and so with exactly its
weights, on the same pipeline schedule. Only the last hidden state in front of each leaf is kept, [D, h], on the last
stage; the loss computes logits from these one chunk at a time. Where nothing diverges there is no pass. When it runs
is decided in :mod:`slime_plugin.slime.distiller`. Legend: D leaves, h hidden size, V vocabulary, T tokens of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from slime_plugin.config.method import Distillation
from slime_plugin.methods.row import join_parents
from slime_plugin.record.arrays import IntArray
from slime_plugin.train.pipeline import first_fit, run_schedule
from slime_plugin.train.process_groups import context_group, is_last_stage
from slime_plugin.train.tree_model import output_weight
from slime_plugin.train.tree_sequence import tree_sequence, window_of


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """The live contexts of one rollout that hold a diverging leaf, as a prefix tree of N tokens."""

    rollout: int
    tokens: IntArray
    """[N]"""
    parent: IntArray
    """[N]"""
    leaves: IntArray
    """[D] indices of the leaves, in the order of the student row."""

    @classmethod
    def of(cls, rollout: int, columns: Mapping[str, Any]) -> TeacherRow:
        """From the plain arrays beside the student's row in the train data."""
        tokens, parent, leaves = (np.asarray(columns[key], dtype=np.int32) for key in ("tokens", "parent", "leaves"))
        return cls(rollout, tokens, parent, leaves)


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """Last hidden states in front of the leaves of a step, on the last stage."""

    hidden: Tensor
    """[D, h] over all rollouts."""
    output_weight: Tensor
    """[V/tp, h] turns them into logits."""
    first: Mapping[int, int]
    """Index of the first leaf of each rollout."""

    def at(self, rollout: Tensor, leaf: Tensor) -> Tensor:
        """Return [d, h] for the leaves with these rollout numbers [d] and leaf numbers [d]."""
        numbers, which = torch.unique(rollout, return_inverse=True)
        starts = torch.tensor([self.first[number] for number in numbers.tolist()], device=leaf.device)
        return self.hidden[starts[which] + leaf] if len(leaf) else self.hidden[:0]


def run_teacher(
    models: Sequence[torch.nn.Module],
    rows: Sequence[TeacherRow],
    groups: ProcessGroupCollection,
    *,
    batch_tokens: int,
    multiple: int,
) -> TeacherStates | None:
    """Run the teacher; return None without rows, and on all stages but the last. T is padded to a ``multiple``."""
    if not rows:
        return None
    group = context_group(groups)

    def forward_step(
        batches: Iterator[_PackedRows], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
        batch = next(batches)
        device = next(model.parameters()).device
        low, high = window_of(len(batch.tokens), group)
        sequence = tree_sequence(batch.parent, device=device, cp_group=group, predict=batch.leaves, project=False)
        output = model(
            input_ids=torch.from_numpy(batch.tokens[low:high].astype(np.int64))[None].to(device),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=sequence,
        )
        return output, _keep_hidden

    groups_of_rows = [[rows[i] for i in batch] for batch in first_fit([len(row.tokens) for row in rows], batch_tokens)]
    batches = [_PackedRows.of(some, multiple) for some in groups_of_rows]
    turns = groups.pp.size() if len(models) > 1 else 1  # virtual stages need a multiple of so many micro-batches
    filled = [*batches, *[batches[-1]] * (-len(batches) % turns)]
    with torch.no_grad():
        parts = run_schedule(models, filled, forward_step, groups, forward_only=True)[: len(batches)]
    if not is_last_stage(groups):
        return None
    rows = [row for some in groups_of_rows for row in some]
    ends = np.cumsum([len(row.leaves) for row in rows]).tolist()
    first = {row.rollout: end - len(row.leaves) for row, end in zip(rows, ends, strict=True)}
    weight = output_weight(models[-1]).detach()
    # Megatron's bfloat16 wrapper returns float32, with no more precision in it.
    return TeacherStates(torch.cat(parts).to(weight.dtype), weight, first)


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """Teacher rows one after the other, and a chain as padding. [T], [T], [D of these rows]."""

    tokens: IntArray
    parent: IntArray
    leaves: IntArray

    @classmethod
    def of(cls, rows: Sequence[TeacherRow], multiple: int) -> _PackedRows:
        sizes = [len(row.tokens) for row in rows]
        starts = (np.cumsum(sizes) - sizes).tolist()
        padding = np.arange(-sum(sizes) % multiple, dtype=np.int32)
        return cls(
            np.concatenate([*(row.tokens for row in rows), np.zeros_like(padding)]),
            join_parents([*(row.parent for row in rows), padding - 1]),
            np.concatenate([row.leaves + start for row, start in zip(rows, starts, strict=True)]),
        )


def _keep_hidden(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From [rows, 1, h] of the model: a loss that is not used, the number 1, and the hidden states."""
    return output.new_zeros(()), torch.ones((), dtype=torch.int, device=output.device), output[:, 0].clone()


@dataclass(slots=True)
class SdccSchedule:
    """The coefficient of SDCC's KL at each update step: a linear ramp; guard rails switch it off permanently.

    A step diverges if its mean KL per leaf, or the mean distance between the entropies of teacher and student, is over
    its limit or not a number. After ``patience`` such steps in a row the KL stays off, and ``off_reason`` says why.
    """

    config: Distillation
    steps: int
    """Update steps of the whole run."""
    off_reason: str | None = field(default=None, init=False)
    diverged: int = field(default=0, init=False)
    """Consecutive diverged steps so far."""

    def coefficient(self, step: int) -> float:
        """Return the coefficient at update step ``step``, counted from 0. At 0 there is no teacher pass and no KL."""
        if self.off_reason is not None:
            return 0.0
        ramp = self.config.warmup * self.steps
        return self.config.weight * (min(1.0, step / ramp) if ramp else 1.0)

    def state(self) -> dict[str, str | int | None]:
        """Return the state for :meth:`restore`, with the keys of earlier versions."""
        return {"steps": self.steps, "why_off": self.off_reason, "diverged": self.diverged}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. The ramp continues as it began, even if the run has become longer since."""
        self.steps, self.off_reason, self.diverged = state["steps"], state["why_off"], state["diverged"]

    def observe(self, leaves: float, kl: float, entropy_gap: float) -> None:
        """Check a step, by sums over its leaves on all ranks: number, KL, |student entropy - teacher entropy|."""
        if not leaves:
            return
        found = {
            "mean KL per leaf": (kl / leaves, self.config.kl_limit),
            "mean entropy gap": (entropy_gap / leaves, self.config.entropy_gap_limit),
        }
        over = [
            f"{name} {value:.3g} where {limit:g} is the limit"
            for name, (value, limit) in found.items()
            if not value <= limit
        ]
        self.diverged = self.diverged + 1 if over else 0
        if self.diverged >= self.config.patience and self.off_reason is None:
            self.off_reason = f"{' and '.join(over)} in {self.diverged} steps in a row"
