"""Sums of logdiff against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from slime_plugin.record import Record
from slime_plugin.train.logdiff import LEAF_KEYS, add_sums, leaf_sums, logdiff_sums, means
from slime_plugin.train.vocabulary import Divergence
from slime_plugin.tree import Trajectory
from slime_plugin.tree.places import PLACES, places_of
from tests.histories import Rollout, histories


@given(histories())
def test_a_place_tells_the_last_edit_and_how_long_ago_it_was(rollout: Rollout) -> None:
    record = rollout[0]
    places = places_of(Trajectory.of(record), near=2)
    seen: set[int] = set()
    for k, view in enumerate(record.views):
        fresh = [p for start, stop in view for p in range(start, stop) if p not in seen]
        seen.update(fresh)
        sampled = [p for p in fresh if record.generated[p]]
        for turn, position in enumerate(sampled):
            where = "near" if turn < 2 else "far"
            expected = "start" if k == 0 else f"{record.edits[k - 1].kind}/{where}"
            assert PLACES[places[position]] == expected


def test_logdiff_is_summed_over_all_tokens_and_by_place() -> None:
    trained, logged, places = [-1.0, -2.0, -0.5, -3.0], [-1.25, -2.0, -0.25, -1.0], [0, 0, 1, 2]
    sums = logdiff_sums(torch.tensor(trained), torch.tensor(logged), torch.tensor(places))
    gaps = [a - b for a, b in zip(trained, logged, strict=True)]
    assert float(sums["tokens"]) == 4
    assert float(sums["logdiff"]) == pytest.approx(sum(map(abs, gaps)))
    assert float(sums["signed_logdiff"]) == pytest.approx(sum(gaps))
    assert float(sums["k3"]) == pytest.approx(sum(math.exp(-g) + g - 1 for g in gaps))
    assert float(sums["multiplicative_error"]) == pytest.approx(sum(math.exp(abs(g)) for g in gaps))
    assert [float(sums[f"above/{t}"]) for t in ("0.0001", "0.1", "1")] == [3, 3, 1]
    by_place = {place: float(sums[f"{place}/logdiff"]) for place in PLACES[:3]}
    assert by_place == pytest.approx({"start": 0.25, PLACES[1]: 0.25, PLACES[2]: 2.0})


def test_keys_and_their_order_never_change() -> None:
    """slime adds metrics by position: an empty micro-batch has to have all of them."""
    some = logdiff_sums(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([3]))
    none = logdiff_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert list(some) == list(none)
    assert all(float(value) == 0 for value in none.values())
    leaves = leaf_sums(Divergence(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([3.0])), torch.device("cpu"))
    assert list(leaves) == list(leaf_sums(None, torch.device("cpu"))) == list(LEAF_KEYS)
    assert [float(leaves[key]) for key in LEAF_KEYS] == [1.0, 0.5, 0.5, 1.0, 3.0, 2.0]


def test_means_divide_by_what_they_were_summed_over() -> None:
    first = logdiff_sums(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -1.0]), torch.tensor([0, 1]))
    second = logdiff_sums(torch.tensor([-1.0]), torch.tensor([-4.0]), torch.tensor([1]))
    average = means(add_sums([first, second]) | {"leaves": 4.0, "leaf_kl": 2.0})
    assert average["logdiff"] == pytest.approx(4 / 3)
    assert (average["start/logdiff"], average[f"{PLACES[1]}/logdiff"]) == (1.0, 1.5)
    assert average[f"{PLACES[2]}/logdiff"] is None, "absent is not zero"
    assert (average["leaves"], average["leaf_kl"]) == (4.0, 0.5)
    assert (average["tokens"], average[f"{PLACES[1]}/tokens"]) == (3.0, 2.0)


def test_sampled_tokens_of_the_examples_have_places(running: Record, memex: Record) -> None:
    assert PLACES[places_of(Trajectory.of(running))[9]] == "pop/near"
    assert PLACES[places_of(Trajectory.of(memex))[len(memex) - 1]] == "restore/near"
