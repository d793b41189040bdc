"""Exact methods train every sampled token once, under exactly the context it was sampled in; the others do not."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.methods import Layout, Row, lay_out
from slime_plugin.methods.mask4d import Lifetimes
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory, branches_of, build_trie
from tests.histories import History, Rollout, histories, twin_at_a_fork, twin_rollout
from tests.oracle import ALL, EXACT, name, path, prefix_tokens, trained, view_tokens


@pytest.mark.parametrize("method", EXACT, ids=name)
@given(rollout=histories())
@example(rollout=twin_rollout())
@example(rollout=twin_at_a_fork())
def test_each_sampled_token_is_trained_once_under_its_live_prefix(method: MethodSettings, rollout: Rollout) -> None:
    record, history = rollout
    layout = lay_out(record, method)
    found: dict[int, tuple[int, ...]] = {}
    for row in layout.rows:
        for i in trained(row):
            assert int(row.tape[i]) not in found, "trained twice"
            found[int(row.tape[i])] = prefix_tokens(row, i)
            assert row.tokens[i] == record.tokens[row.tape[i]]
            assert row.rollout_logprobs[i] == record.logprobs[row.tape[i]]
    assert found == history.live
    assert (layout.lost, layout.off_context) == ({}, 0)


@pytest.mark.parametrize("method", ALL, ids=name)
@given(rollout=histories())
def test_rows_are_well_formed(method: MethodSettings, rollout: Rollout) -> None:
    record, _ = rollout
    layout = lay_out(record, method)
    for row in [*layout.rows, *(teacher.row for teacher in layout.teachers)]:
        assert len({len(column) for column in (row.tape, row.parent, row.position, row.loss_mask, row.tokens)}) == 1
        assert np.isnan(row.rollout_logprobs).tolist() == (~row.loss_mask).tolist()
        assert (row.tokens == record.tokens[row.tape]).all()
        assert (row.parent[row.loss_mask] >= 0).all(), "a root has no prediction to train"
        if row.visible is None:
            assert row.position.tolist() == [len(path(row, i)) for i in range(len(row))]
            assert (row.parent < np.arange(len(row))).all()


@pytest.mark.parametrize("method", ALL, ids=name)
@given(rollout=histories())
def test_every_sampled_token_is_trained_or_accounted_for(method: MethodSettings, rollout: Rollout) -> None:
    record, history = rollout
    layout = lay_out(record, method)
    if layout.off_context is not None:
        found = [(int(row.tape[i]), prefix_tokens(row, i)) for row in layout.rows for i in trained(row)]
        assert layout.off_context == sum(prefix != history.live[p] for p, prefix in found)
    assert layout.trained + sum(layout.lost.values()) == len(history.live)
    assert all(count > 0 for count in layout.lost.values())


@given(rollout=histories())
@example(rollout=twin_rollout())
@example(rollout=twin_at_a_fork())
def test_the_trie_computes_each_prefix_once(rollout: Rollout) -> None:
    record, history = rollout
    (row, *_) = lay_out(record, Mask4d(packing="trie")).rows or [None]
    assume(row is not None)
    assert row is not None
    paths = [(*prefix_tokens(row, i), int(row.tokens[i])) for i in range(len(row))]
    targets = Counter((*prefix, record.tokens[p]) for p, prefix in history.live.items())
    wanted = {target[: n + 1] for target in targets for n in range(len(target))}
    assert set(paths) == wanted, "a node that no trained token needs, or a missing one"
    for node, copies in Counter(paths).items():
        assert copies == max(1, targets[node]), "one node per prefix, one more only for each further sampled token"
    assert all(loss for i, loss in enumerate(row.loss_mask) if i not in set(row.parent.tolist())), "an idle leaf"


@given(rollout=histories())
@example(rollout=twin_rollout())
@example(rollout=twin_at_a_fork())
def test_the_trie_is_in_depth_first_order(rollout: Rollout) -> None:
    record, _ = rollout
    branches = branches_of(Trajectory.of(record))
    assume(branches)
    trie = build_trie(record.tokens, branches)
    ancestors: list[set[int]] = []
    for i, parent in enumerate(trie.parent.tolist()):
        assert i == 0 or parent < 0 or parent in ancestors[i - 1], "the subtree of the parent has ended already"
        ancestors.append({i} | (ancestors[parent] if parent >= 0 else set()))


def test_equal_tokens_under_equal_prefixes_stay_two_nodes() -> None:
    record, _ = twin_rollout()
    (row,) = lay_out(record, Mask4d()).rows
    assert sorted(row.tape[row.loss_mask].tolist()) == [1, 2, 3, 4, 5]
    assert len(row) == 1 + 2 + 2 + 1, "the prompt, the two tokens twice, and what follows once"
    first, again = (row.tape.tolist().index(p) for p in (1, 3))
    assert row.parent[first] == row.parent[again] == 0


@given(rollout=histories())
def test_sdcc_leaves_are_the_tokens_whose_prefix_changed(rollout: Rollout) -> None:
    record, history = rollout
    layout = lay_out(record, Sdcc())
    last = view_tokens(record, -1)
    diverging = {
        p
        for i, (p, _) in enumerate(last)
        if p in history.live and i > 0 and tuple(t for _, t in last[:i]) != history.live[p]
    }
    found = {}
    for teacher in layout.teachers:
        (student,) = layout.rows
        assert not teacher.row.loss_mask.any(), "a teacher has no loss"
        for s, t in zip(teacher.student.tolist(), teacher.teacher.tolist(), strict=True):
            p = int(student.tape[s])
            assert int(teacher.row.tape[t]) == p
            assert student.loss_mask[s]
            found[p] = prefix_tokens(teacher.row, t)
    assert found == {p: history.live[p] for p in diverging}
    assert bool(layout.teachers) == bool(diverging), "no leaf, no teacher"


@given(rollout=histories())
def test_naive_rows_are_the_last_view_and_the_tape(rollout: Rollout) -> None:
    record, history = rollout
    last = view_tokens(record, -1)
    surviving = [i for i, (p, _) in enumerate(last) if p in history.live and i > 0]
    expected = [t for _, t in last[: surviving[-1] + 1]] if surviving else None
    for method in (NaiveCompressed(), Sdcc()):
        assert _one_chain(lay_out(record, method)) == expected
    sampled = sorted(history.live)
    full = record.tokens[: sampled[-1] + 1].tolist() if sampled else None
    layout = lay_out(record, NaiveFull())
    assert _one_chain(layout) == full
    assert layout.trained == len(sampled)


@given(rollout=histories())
def test_naive_losses_name_the_edit_that_took_the_token(rollout: Rollout) -> None:
    record, history = rollout
    last = [p for p, _ in view_tokens(record, -1)]
    expected: Counter[str] = Counter()
    for p in history.live:
        if p not in last:
            holding = [k for k in range(len(record.views)) if p in dict(view_tokens(record, k))]
            expected[f"evicted by {record.edits[max(holding)].kind}"] += 1
        elif last[0] == p:
            expected["no prefix left"] += 1
    assert lay_out(record, NaiveCompressed()).lost == expected


def test_a_token_that_left_twice_is_lost_to_the_edit_that_took_it_last() -> None:
    history = History()
    history.append(0, sampled=False)
    history.append(1, sampled=True)
    history.evict(1, 1, kind="pop")
    history.append(1, sampled=True)
    history.restore(1, 1)
    history.append(1, sampled=True)
    history.evict(1, 1, kind="prune")
    history.append(0, sampled=True)
    assert lay_out(history.record(), NaiveCompressed()).lost == {"evicted by prune": 1}


@given(rollout=histories())
def test_without_edits_all_methods_give_the_same_row(rollout: Rollout) -> None:
    record, _ = rollout
    assume(len(record.views) == 1)
    rows = [lay_out(record, method).rows for method in ALL]
    for other in rows[1:]:
        assert len(other) == len(rows[0]) <= 1
        for a, b in zip(rows[0], other, strict=True):
            assert _columns(a) == _columns(b)


@given(rollout=histories())
def test_the_union_mask_shows_each_sampled_token_its_live_context(rollout: Rollout) -> None:
    record, history = rollout
    for row in lay_out(record, Mask4d(packing="union")).rows:
        assert isinstance(row.visible, Lifetimes)
        mask = row.visible.mask()
        for i in trained(row):
            p = int(row.tape[i])
            view = [q for q, _ in view_tokens(record, int(row.visible.layer[i]))]
            assert set(np.flatnonzero(mask[i]).tolist()) == set(view[: view.index(p) + 1])
            assert row.parent[i] == view[view.index(p) - 1]
            assert row.position[i] == len(history.live[p])


@given(rollout=histories())
def test_exact_packings_agree_on_what_they_need(rollout: Rollout) -> None:
    record, _ = rollout
    chains = lay_out(record, LogitTree())
    replicated = lay_out(record, Mask4d(packing="replicated"))
    trie = lay_out(record, Mask4d(packing="trie"))
    assert replicated.tokens == chains.tokens >= trie.tokens >= chains.trained


def test_arrays_that_share_memory_cannot_be_changed(running: Record) -> None:
    trajectory = Trajectory.of(running)
    for method in ALL:
        layout = lay_out(trajectory, method)
        for row in [*layout.rows, *(teacher.row for teacher in layout.teachers)]:
            for column in (row.tokens, row.tape, row.parent, row.position, row.loss_mask, row.rollout_logprobs):
                assert not column.flags.writeable
    assert not any(array.flags.writeable for array in (*trajectory.views, trajectory.born, trajectory.depth))


def test_the_tree_of_nothing_is_empty() -> None:
    assert len(build_trie(np.array([1], dtype=np.int32), [])) == 0


def _one_chain(layout: Layout) -> list[int] | None:
    if not layout.rows:
        return None
    (row,) = layout.rows
    assert row.parent.tolist() == list(range(-1, len(row) - 1))
    tokens: list[int] = row.tokens.tolist()
    return tokens


def _columns(row: Row) -> list[list[object]]:
    logprobs = [None if math.isnan(x) else x for x in row.rollout_logprobs.tolist()]
    columns = (row.tokens, row.tape, row.parent, row.position, row.loss_mask)
    return [*(column.tolist() for column in columns), logprobs]
