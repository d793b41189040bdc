"""A batch split over update steps, data-parallel replicas and micro-batches, as slime splits it.

Steps get whole rollouts, over which they average. Within a step rows are packed into micro-batches of at most
``batch_tokens`` tokens, and every replica gets the same number of micro-batches: pipeline stages run in lockstep. Where
there are too few rows, idle rows of two tokens without loss are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slime_plugin.errors import ConfigError
from slime_plugin.slime.batch import TrainData, idle_entry
from slime_plugin.train.pipeline import first_fit

_DTYPES = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}


def split_batch(
    data: TrainData, *, replicas: int, steps: int, batch_tokens: int, multiple: int = 1
) -> list[dict[str, Any]]:
    """Return the part of each replica, with slime's keys; ``partition`` has the row numbers. Each step of a part has a
    multiple of ``multiple`` micro-batches."""
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
        lengths = [len(data["tokens"][row]) for row in rows]
        batches = [[rows[i] for i in batch] for batch in first_fit(lengths, batch_tokens)]
        # Largest batches first: replicas take turns, so their shares are even.
        batches.sort(key=lambda batch: -sum(len(data["tokens"][row]) for row in batch))
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


def _make_divisible(batches: list[list[int]], multiple: int, data: TrainData) -> None:
    """Split the batches with most rows until their number divides; then add idle rows."""
    while len(batches) % multiple:
        largest = max(batches, key=len)
        if len(largest) > 1:
            half = len(largest) // 2
            batches.append(largest[half:])
            del largest[half:]
            continue
        for key, value in idle_entry({key: values[largest[0]] for key, values in data.items()}).items():
            data[key].append(value)
        batches.append([len(data["tokens"]) - 1])


def _tensorize(part: dict[str, Any]) -> None:
    for key, dtype in _DTYPES.items():
        part[key] = [torch.as_tensor(np.array(value), dtype=dtype) for value in part[key]]
    part["multimodal_train_inputs"] = [
        {key: torch.as_tensor(np.array(value)) for key, value in row.items()} for row in part["multimodal_train_inputs"]
    ]
    part["rollout_mask_sums"] = torch.as_tensor(part["rollout_mask_sums"], dtype=torch.float32)
    part["total_lengths"] = [len(tokens) for tokens in part["tokens"]]
