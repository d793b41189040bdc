"""Factors of tokens travel beside them in slime's train data; tests/train/test_token_weights.py has what they do."""

from __future__ import annotations

import numpy as np
import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import METHODS, LogitTree, MethodSettings, NaiveCompressed
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.methods import lay_out
from tests.local.test_train_data import batch, samples_of, train_data
from tests.train import oracle


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.type)
def test_weights_ride_on_all_rows_or_on_none(method: MethodSettings) -> None:
    """slime concatenates what rides on the rows of a micro-batch."""
    rollouts = batch((1.0, None, 0.2, 0.7), ("completed", "aborted", "completed", "completed"))
    plain = train_data(samples_of(rollouts), Cell(method=method))
    last = oracle.final_context(rollouts[2])[-1]  # sampled, and in the rows of every method
    weighted = [*rollouts[:2], oracle.with_weights(rollouts[2], [[last, last + 1, 0.5]]), rollouts[3]]
    data = train_data(samples_of(weighted), Cell(method=method))
    assert not any("weight" in inputs for inputs in plain["multimodal_train_inputs"])
    assert all(inputs["weight"].dtype == np.float32 for inputs in data["multimodal_train_inputs"])
    assert [len(inputs["weight"]) for inputs in data["multimodal_train_inputs"]] == [len(t) for t in data["tokens"]]
    assert data["rollout_mask_sums"] == plain["rollout_mask_sums"], "what rollouts are averaged over stays"
    halved = []
    for i, inputs in enumerate(data["multimodal_train_inputs"]):
        halved += [(data["rollout_ids"][i], int(data["tokens"][i][j])) for j in np.flatnonzero(inputs["weight"] != 1)]
        assert inputs["weight"].min() >= 0.5
    assert halved == [(2, int(rollouts[2].record.tokens[last]))]
    for part in split_batch(data, replicas=3, steps=1, batch_tokens=10_000):  # with idle rows of its own
        sizes = [len(tokens) for tokens in part["tokens"]]
        assert [len(inputs["weight"]) for inputs in part["multimodal_train_inputs"]] == sizes


def test_weights_of_what_is_not_trained_do_not_ride() -> None:
    rollouts = batch((1.0, 0.0))
    record = rollouts[0].record
    evicted = sorted(set(np.flatnonzero(record.generated).tolist()) - set(oracle.final_context(rollouts[0])))
    assert evicted
    untrained = sorted({*evicted, *np.flatnonzero(~record.generated).tolist()})
    rollouts[0] = oracle.with_weights(rollouts[0], [[p, p + 1, 0.5] for p in untrained])
    for method, rides in ((NaiveCompressed(), False), (LogitTree(), True)):
        data = train_data(samples_of(rollouts), Cell(method=method))
        assert [("weight" in inputs) for inputs in data["multimodal_train_inputs"]] == [rides] * len(data["tokens"])


def test_a_rollout_that_is_left_out_sends_no_weights() -> None:
    rollouts = batch((1.0, None), ("completed", "aborted"))
    rollouts[1] = oracle.with_weights(rollouts[1], [[0, len(rollouts[1].record), 0.5]])
    assert (lay_out(rollouts[1].record, LogitTree()).rows[0].weight == 0.5).any()
    data = train_data(samples_of(rollouts), Cell(method=LogitTree()))
    assert not any("weight" in inputs for inputs in data["multimodal_train_inputs"])
