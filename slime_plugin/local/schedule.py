"""A batch of rollouts, split over update steps, data-parallel replicas and micro-batches, as slime splits it.

Rollouts are dealt out to steps whole, so that a step averages over rollouts. Within a step rows go into micro-batches
of at most so many tokens, and every replica gets the same number of micro-batches: pipeline stages run in lockstep.
Where rows are too few for that, an idle row of two tokens without loss fills in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slime_plugin.errors import ConfigError

TrainData = dict[str, list[Any]]
"""One entry per row under every key."""

_DTYPES = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}


def split_batch(
    data: TrainData, *, replicas: int, steps: int, batch_tokens: int, multiple: int = 1
) -> list[dict[str, Any]]:
    """What each replica trains on, with slime's keys. ``multiple`` is what its micro-batches per step come in."""
    data = {key: list(values) for key, values in data.items()}
    rollouts = list(dict.fromkeys(data["rollout_ids"]))
    if len(rollouts) % steps:
        raise ConfigError(f"{len(rollouts)} rollouts cannot be trained in {steps} equal steps; choose a divisor")
    per_step = len(rollouts) // steps
    step_of = {rollout: i // per_step for i, rollout in enumerate(rollouts)}
    parts: list[dict[str, Any]] = [
        {"partition": [], "micro_batch_indices": [], "num_microbatches": [], "global_batch_sizes": [per_step] * steps}
        for _ in range(replicas)
    ]
    for step in range(steps):
        rows = [row for row, rollout in enumerate(data["rollout_ids"]) if step_of[rollout] == step]
        batches = _pack(rows, [len(tokens) for tokens in data["tokens"]], batch_tokens)
        _make_divisible(batches, replicas * multiple, data)
        for number, part in enumerate(parts):
            mine = batches[number::replicas]
            part["num_microbatches"].append(len(mine))
            for batch in mine:
                at = len(part["partition"])
                part["micro_batch_indices"].append(list(range(at, at + len(batch))))
                part["partition"].extend(batch)
    for part in parts:
        part.update({key: [values[row] for row in part["partition"]] for key, values in data.items()})
        _tensorize(part)
    return parts


def _pack(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit; a row over the budget is alone. The largest first, so that replicas get even shares in turn."""
    batches: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        place = next((i for i, left in enumerate(room) if lengths[row] <= left), None)
        if place is None:
            batches.append([])
            room.append(budget)
            place = len(room) - 1
        batches[place].append(row)
        room[place] -= lengths[row]
    return sorted(batches, key=lambda batch: -sum(lengths[row] for row in batch))


def _make_divisible(batches: list[list[int]], multiple: int, data: TrainData) -> None:
    """Split the batches with most rows until every replica gets as many; then fill up with idle rows."""
    while len(batches) % multiple:
        largest = max(batches, key=len)
        if len(largest) > 1:
            half = len(largest) // 2
            batches.append(largest[half:])
            del largest[half:]
        else:
            batches.append([_add_idle_row(data, like=largest[0])])


def _add_idle_row(data: TrainData, like: int) -> int:
    """The first two tokens of a row, without loss."""
    row = {key: values[like] for key, values in data.items()}
    row |= {
        "tokens": row["tokens"][:2],
        "response_lengths": 1,
        "loss_masks": np.zeros(1, dtype=np.int32),
        "rollout_log_probs": np.zeros(1, dtype=np.float32),
        "multimodal_train_inputs": {key: value[:2] for key, value in row["multimodal_train_inputs"].items()},
    }
    if "prompt" in row:
        row["prompt"] = None
        row["multimodal_train_inputs"]["leaf"] = np.full(2, -1, dtype=np.int32)
    if "parent" in row["multimodal_train_inputs"]:
        row["multimodal_train_inputs"]["parent"] = np.array([-1, 0], dtype=np.int32)
        row["multimodal_train_inputs"]["length"] = np.array([2], dtype=np.int32)
    for key, value in row.items():
        data[key].append(value)
    return len(data["tokens"]) - 1


def _tensorize(part: dict[str, Any]) -> None:
    for key, dtype in _DTYPES.items():
        part[key] = [torch.as_tensor(np.array(value), dtype=dtype) for value in part[key]]
    part["multimodal_train_inputs"] = [
        {key: torch.as_tensor(np.array(value)) for key, value in row.items()} for row in part["multimodal_train_inputs"]
    ]
    part["rollout_mask_sums"] = torch.as_tensor(part["rollout_mask_sums"], dtype=torch.float32)
    part["total_lengths"] = [len(tokens) for tokens in part["tokens"]]
