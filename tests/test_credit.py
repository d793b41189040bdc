"""Rewards and weights count rollouts: splitting changes neither advantages nor the weight of any token."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed
from slime_plugin.errors import LayoutError
from slime_plugin.local.sample import recorded_samples
from slime_plugin.methods import lay_out
from slime_plugin.methods.credit import group_advantages
from slime_plugin.record import Meta, Record
from slime_plugin.slime.batch import Batch
from slime_plugin.tree import Trajectory, branches_of, build_trie, split_branches
from tests.histories import Rollout, histories, twin_rollout
from tests.oracle import EXACT, name, prefix_tokens, trained

Credit = tuple[float, float]
"""Advantage, and weight in the batch loss."""
Outcome = tuple[int, float, str]
outcomes = st.tuples(  # group, reward, status
    st.integers(0, 2),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0]),
    st.sampled_from(["completed", "truncated", "aborted", "failed"]),
)


@given(batch=st.lists(outcomes, min_size=1, max_size=12), std=st.booleans())
def test_advantages_are_relative_to_the_rollouts_of_the_group(batch: list[Outcome], std: bool) -> None:
    metas = [Meta(id=i, group=g, reward=r, status=s) for i, (g, r, s) in enumerate(batch)]
    found = group_advantages(metas, std=std)
    for meta, (_, reward, _), advantage in zip(metas, batch, found, strict=True):
        if meta.status in ("aborted", "failed"):
            assert math.isnan(advantage), "not a silent zero"
            continue
        group = [r for g, r, s in batch if g == meta.group and s in ("completed", "truncated")]
        if len(set(group)) == 1:
            assert advantage == 0.0, "exactly: no rounding of the mean may leak through"
            continue
        expected = reward - statistics.fmean(group)
        if std:
            expected /= statistics.stdev(group) + 1e-6
        assert advantage == pytest.approx(expected, rel=1e-12)


def test_an_excluded_rollout_may_lack_a_reward_and_does_not_move_the_baseline() -> None:
    kept = [Meta(id=0, group="g", reward=1.0), Meta(id=1, group="g", reward=0.0)]
    alone = group_advantages(kept, std=False)
    more = group_advantages([*kept, Meta(id=2, group="g", status="aborted"), Meta(id=3, status="failed")], std=False)
    assert more[:2].tolist() == alone.tolist() == [0.5, -0.5]


def test_what_cannot_be_credited_is_refused() -> None:
    with pytest.raises(LayoutError, match="record 7: status completed but no reward"):
        group_advantages([Meta(id=7, group=1)])
    with pytest.raises(LayoutError, match="record 7: no group"):
        group_advantages([Meta(id=7, reward=1.0)])
    with pytest.raises(LayoutError, match="record 7: status completed but reward nan"):
        group_advantages([Meta(id=7, group=1, reward=math.nan)])
    with pytest.raises(LayoutError, match="record 7: status 'abort' gets no credit; use 'aborted'"):
        group_advantages([Meta(id=7, status="abort")])
    with pytest.raises(LayoutError, match="record 7: in the batch twice"):
        group_advantages([Meta(id=7, group=1, reward=1.0)] * 2)


def token_credits(records: list[Record], method: MethodSettings, *, std: bool = True) -> dict[tuple[int, int], Credit]:
    """(rollout, tape position) -> advantage and weight in the batch loss, token by token, from the train data."""
    batch = Batch.of(recorded_samples(records), Cell(method=method, std=std))
    data, rows = batch.train_data(), [(rollout.number, row) for rollout in batch.rollouts for row in rollout.rows]
    assert [r for r, _ in rows] == data["rollout_ids"]
    found: dict[tuple[int, int], Credit] = {}
    for i, (r, row) in enumerate(rows):
        indices = np.flatnonzero(data["loss_masks"][i]) + len(data["tokens"][i]) - data["response_lengths"][i]
        for token in indices.tolist():
            assert (r, int(row.tape[token])) not in found
            weight = 1 / data["rollout_mask_sums"][i] / len(records)  # slime divides by all rollouts of a step
            found[r, int(row.tape[token])] = (data["rewards"][i], weight)
    return found


@given(batch=st.lists(st.tuples(histories(), st.sampled_from([0.0, 0.2, 1.0])), min_size=1, max_size=5), data=st.data())
def test_splitting_changes_neither_advantages_nor_weights(
    batch: list[tuple[Rollout, float]], data: st.DataObject
) -> None:
    records = [
        record.with_meta(Meta(id=i, group=i % 2, reward=reward)) for i, ((record, _), reward) in enumerate(batch)
    ]
    whole = token_credits(records, Mask4d())
    for method in EXACT:
        if method != Mask4d(packing="union"):
            assert token_credits(records, method) == whole
    longest = max((len(b) for record in records for b in branches_of(Trajectory.of(record))), default=1)
    budget = data.draw(st.integers(longest, 4 * longest))
    assert token_credits(records, Mask4d(budget=budget)) == whole
    by_rollout: dict[int, float] = defaultdict(float)
    for (r, _), (_, weight) in whole.items():
        by_rollout[r] += weight
    for total in by_rollout.values():
        assert total == pytest.approx(1 / len(batch)), "each rollout weighs the same, whatever its length"


def test_excluded_rollouts_have_no_tokens_and_count_in_the_mean(running: Record, weather: Record) -> None:
    metas = [Meta(id=0, group=0, reward=1.0), Meta(id=1, group=0, status="aborted"), Meta(id=2, group=0, reward=0.0)]
    records = [record.with_meta(meta) for record, meta in zip((running, weather, weather), metas, strict=True)]
    credits = token_credits(records, LogitTree(), std=False)
    by_rollout = {r: credit for (r, _), credit in credits.items()}
    assert by_rollout == {0: (0.5, 1 / 9 / 3), 2: (-0.5, 1 / 20 / 3)}


def test_naive_weights_average_over_what_is_trained(running: Record) -> None:
    credits = token_credits([running.with_meta(Meta(group=0, reward=1.0))], NaiveCompressed())
    assert {weight for _, weight in credits.values()} == {1 / 6}, "three of nine sampled tokens were evicted"


@given(rollout=histories(max_steps=20), data=st.data())
def test_split_trees_are_exact_and_within_budget(rollout: Rollout, data: st.DataObject) -> None:
    record, history = rollout
    branches = branches_of(Trajectory.of(record))
    assume(branches)
    longest = max(map(len, branches))
    budget = data.draw(st.integers(longest, 3 * longest))
    layout = lay_out(record, Mask4d(budget=budget))
    found = {int(row.tape[i]): prefix_tokens(row, i) for row in layout.rows for i in trained(row)}
    assert found == history.live
    assert layout.trained == len(history.live)
    assert all(len(row) <= budget for row in layout.rows)


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # few histories have so few branches and no twins
@given(rollout=histories(max_steps=20), data=st.data())
def test_the_split_is_the_best_cut_of_the_depth_first_order(rollout: Rollout, data: st.DataObject) -> None:
    """Against trying every way to cut the sorted branches into runs, with tries built for real."""
    record, _ = rollout
    branches = branches_of(Trajectory.of(record))
    assume(1 < len(branches) <= 7)
    assume(not any(build_trie(record.tokens, branches).twins))  # with twins the size of a group is an upper bound
    longest = max(map(len, branches))
    budget = data.draw(st.integers(longest, 2 * longest))
    order = sorted(branches, key=lambda b: record.tokens[b.tape].tolist())
    best = math.inf
    for cuts in range(2 ** (len(order) - 1)):
        groups, group = [], [order[0]]
        for i, branch in enumerate(order[1:]):
            if cuts >> i & 1:
                groups.append(group)
                group = []
            group.append(branch)
        sizes = [len(build_trie(record.tokens, g)) for g in [*groups, group]]
        if max(sizes) <= budget:
            best = min(best, sum(sizes))
    found = split_branches(record.tokens, branches, budget)
    assert sum(len(build_trie(record.tokens, group)) for group in found) == best


def test_a_branch_over_the_budget_is_refused_with_both_numbers(running: Record) -> None:
    message = r"record running-example \(tc_rag\): .* layer 2 has 11 tokens, the budget is 10"
    with pytest.raises(LayoutError, match=message):
        lay_out(running, Mask4d(budget=10))
    assert [len(row) for row in lay_out(running, Mask4d(budget=11)).rows] == [8, 10, 11, 11]
    assert [len(row) for row in lay_out(running, Mask4d(budget=19)).rows] == [19]


def test_twins_do_not_make_a_branch_too_large_for_its_budget() -> None:
    record, _ = twin_rollout()
    assert [len(row) for row in lay_out(record, Mask4d(budget=4)).rows] == [3, 4]


@pytest.mark.parametrize("method", EXACT, ids=name)
def test_nothing_sampled_gives_no_rows(method: MethodSettings) -> None:
    record = Record([1, 2], [0, 0], [None, None], [[(0, 2)]], meta=Meta(status="aborted"))
    assert lay_out(record, method).rows == ()
    assert split_branches(record.tokens, [], 5) == []
