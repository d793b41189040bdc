"""A batch, split over steps, replicas and micro-batches: everything is somewhere, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.errors import ConfigError
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.slime.batch import TrainData


@st.composite
def batches(draw: st.DrawFn) -> tuple[TrainData, int]:
    """Train data of some rollouts, each in one or more rows, and a number of steps that divides them."""
    steps, per_step = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["chain", "tree", "sdcc"]))
    data: TrainData = {}
    for rollout in draw(st.permutations(range(100, 100 + steps * per_step))):
        for _ in range(draw(st.integers(1, 4))):
            for key, value in _row(rollout, draw(st.integers(2, 30)), len(data.get("tokens", [])), kind).items():
                data.setdefault(key, []).append(value)
    return data, steps


def _row(rollout: int, length: int, number: int, kind: str) -> dict[str, Any]:
    """Every token is its own, so that it can be found again."""
    tokens = 1000 * (number + 1) + np.arange(length)
    extra: dict[str, Any] = {"place": np.zeros(length, dtype=np.int8)}
    if kind == "tree":
        extra["parent"] = np.arange(length, dtype=np.int32) - 1
        extra["length"] = np.array([length], dtype=np.int32)
    if kind == "sdcc":
        extra |= {"rollout": np.full(length, rollout), "leaf": np.arange(length, dtype=np.int32)}
    row: dict[str, Any] = {
        "tokens": tokens,
        "response_lengths": length - 1,
        "loss_masks": np.ones(length - 1, dtype=np.int32),
        "rollout_log_probs": -np.ones(length - 1, dtype=np.float32),
        "multimodal_train_inputs": extra,
        "rewards": 0.5,
        "rollout_ids": rollout,
        "rollout_mask_sums": 10 * rollout,
    }
    return row | ({"prompt": {"tokens": tokens}} if kind == "sdcc" else {})


@given(batches(), st.integers(1, 4), st.integers(2, 80))
def test_every_row_is_in_one_micro_batch_of_the_step_of_its_rollout(
    batch: tuple[TrainData, int], replicas: int, budget: int
) -> None:
    data, steps = batch
    before = [tokens.copy() for tokens in data["tokens"]]
    parts = split_batch(data, replicas=replicas, steps=steps, batch_tokens=budget)
    assert len(data["tokens"]) == len(before)  # what was given stays as it is
    order = list(dict.fromkeys(data["rollout_ids"]))
    per_step = len(order) // steps
    expected = sorted((order.index(rollout) // per_step, row) for row, rollout in enumerate(data["rollout_ids"]))
    found: list[tuple[int, int]] = []
    for part in parts:
        assert part["global_batch_sizes"] == [per_step] * steps
        assert part["num_microbatches"] == parts[0]["num_microbatches"]
        assert len(part["num_microbatches"]) == steps
        micro_batches = iter(part["micro_batch_indices"])
        places = [index for indices in part["micro_batch_indices"] for index in indices]
        assert places == list(range(len(part["tokens"])))
        for step, number in enumerate(part["num_microbatches"]):
            assert number > 0
            for _ in range(number):
                indices = next(micro_batches)
                assert indices
                assert sum(len(part["tokens"][i]) for i in indices) <= budget or len(indices) == 1
                found += [(step, row) for i in indices if (row := _which(part, i, before)) is not None]
        assert next(micro_batches, None) is None
    assert sorted(found) == expected


def _which(part: dict[str, Any], i: int, before: list[np.ndarray]) -> int | None:
    """The number of the row, unchanged; None for one that fills in, which must not count for anything."""
    tokens, mask = part["tokens"][i], part["loss_masks"][i]
    assert part["total_lengths"][i] == len(tokens)
    assert len(mask) == len(part["rollout_log_probs"][i]) == part["response_lengths"][i]
    for key, value in part["multimodal_train_inputs"][i].items():
        assert value.tolist() == [len(tokens)] if key == "length" else len(value) == len(tokens)
    if mask.any():
        row = int(tokens[0]) // 1000 - 1
        assert np.array_equal(tokens.numpy(), before[row])
        assert mask.all()
        assert int(part["rollout_mask_sums"][i]) == 10 * part["rollout_ids"][i]
        if "prompt" in part:
            assert part["prompt"][i]["tokens"][0] == tokens[0]
        return row
    assert len(tokens) == 2
    assert part["rollout_mask_sums"][i] > 0  # it is divided by
    if "prompt" in part:
        assert part["prompt"][i] is None
        assert (part["multimodal_train_inputs"][i]["leaf"] == -1).all()
    if "parent" in part["multimodal_train_inputs"][i]:
        assert part["multimodal_train_inputs"][i]["parent"].tolist() == [-1, 0]
    return None


@given(batches(), st.integers(1, 3))
def test_the_same_batch_is_split_the_same_way(batch: tuple[TrainData, int], replicas: int) -> None:
    data, steps = batch
    first, second = (split_batch(data, replicas=replicas, steps=steps, batch_tokens=40) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["micro_batch_indices"] == other["micro_batch_indices"]
        assert all(torch.equal(a, b) for a, b in zip(one["tokens"], other["tokens"], strict=True))


def test_rollouts_that_do_not_divide_are_refused_with_both_numbers() -> None:
    data: TrainData = {}
    for rollout in range(3):
        for key, value in _row(rollout, 4, rollout, "chain").items():
            data.setdefault(key, []).append(value)
    with pytest.raises(ConfigError, match="3 rollouts cannot be trained in 2 equal steps"):
        split_batch(data, replicas=1, steps=2, batch_tokens=100)
