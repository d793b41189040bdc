"""Records become slime's train data: every sampled token once, with the credit of its rollout, in slime's shapes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import METHODS, LogitTree, Mask4d, MethodSettings, NaiveCompressed, Sdcc
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.hooks import rollout as hooks
from slime_plugin.local.sample import Sample, recorded_samples
from slime_plugin.methods import lay_out
from slime_plugin.record import Meta, Record, read_records
from slime_plugin.report.summary import summarise
from slime_plugin.rollout.runner import RunTotals
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.batch import Batch, batch_of
from slime_plugin.slime.samples import put_record, question_of, record_of
from tests.train.oracle import Rollout, diverging, simulate


def batch(rewards: tuple[float | None, ...], statuses: tuple[str, ...] = ()) -> list[Rollout]:
    """Simulated rollouts, two to a group, which know the context of every token they sampled."""
    made = []
    for i, reward in enumerate(rewards):
        rollout = simulate(i)
        rng = np.random.default_rng(i)
        logprobs = np.where(rollout.record.generated, -rng.uniform(0.1, 3, len(rollout.record)), np.nan)
        meta = Meta(
            id=f"r{i}", group=i // 2, reward=reward, status=statuses[i] if statuses else "completed", weight_version="7"
        )
        made.append(replace(rollout, record=replace(rollout.record, logprobs=logprobs.astype(np.float32), meta=meta)))
    return made


def samples_of(rollouts: Sequence[Rollout], first: int = 0) -> list[Sample]:
    """As slime has them once they are generated; groups as the records say."""
    return recorded_samples([rollout.record for rollout in rollouts], first)


def train_data(samples: Sequence[Sample], cell: Cell) -> dict[str, list[Any]]:
    """Through the hook."""
    return hooks.convert_samples(Namespace(memorywalker=cell.to_json()), samples)


def args_of(method: MethodSettings, **settings: Any) -> Namespace:
    return Namespace(memorywalker=Cell(method=method, **settings).to_json())


@pytest.mark.parametrize("method", [LogitTree(), Mask4d(), Mask4d(packing="replicated")], ids=lambda m: str(m)[:40])
def test_every_sampled_token_is_there_once_under_its_own_context(method: MethodSettings) -> None:
    rollouts = batch((1.0, 0.0, 0.2, 0.2))
    data = train_data(samples_of(rollouts, 10), Cell(method=method))
    assert len({len(values) for values in data.values()}) == 1, "an entry per row under every key"
    found: dict[int, list[tuple[tuple[int, ...], int, float]]] = {}
    for i, tokens in enumerate(data["tokens"]):
        first = len(tokens) - data["response_lengths"][i]
        parent = data["multimodal_train_inputs"][i].get("parent", np.arange(len(tokens)) - 1)
        for j in np.flatnonzero(data["loss_masks"][i]):
            context, at = [], int(parent[first + j])
            while at >= 0:
                context.append(int(tokens[at]))
                at = int(parent[at])
            entry = (tuple(reversed(context)), int(tokens[first + j]), round(float(data["rollout_log_probs"][i][j]), 5))
            found.setdefault(data["rollout_ids"][i], []).append(entry)
    for number, rollout in zip((10, 11, 12, 13), rollouts, strict=True):
        expected = [
            (live, int(rollout.record.tokens[p]), round(float(rollout.record.logprobs[p]), 5))
            for p, live in rollout.live.items()
        ]
        assert sorted(found[number]) == sorted(expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.type)
def test_rollouts_count_once_whatever_their_rows(method: MethodSettings) -> None:
    data = train_data(samples_of(batch((1.0, 0.0, 0.2, 0.2)), 5), Cell(method=method, std=False))
    for number, advantage in {5: 0.5, 6: -0.5, 7: 0.0, 8: 0.0}.items():
        rows = [i for i, rollout in enumerate(data["rollout_ids"]) if rollout == number]
        assert {data["rewards"][i] for i in rows} == {advantage}
        assert {data["rollout_mask_sums"][i] for i in rows} == {sum(int(data["loss_masks"][i].sum()) for i in rows)}


def test_a_rollout_that_is_left_out_stays_as_an_idle_row() -> None:
    rollouts = batch((1.0, None, 0.0, 0.5), ("completed", "aborted", "completed", "completed"))
    data = train_data(samples_of(rollouts), Cell(method=Mask4d(), std=False))
    row = data["rollout_ids"].index(1)
    assert data["rollout_ids"] == [0, 1, 2, 3], "steps are formed by counting rollouts"
    assert (len(data["tokens"][row]), data["loss_masks"][row].tolist(), data["rewards"][row]) == (2, [0], 0.0)
    assert data["rewards"][0] == 0.0, "alone in its group now"


@pytest.mark.parametrize("cause", ["aborted", "removed"])
def test_a_rollout_that_is_left_out_may_be_more_than_can_be_laid_out(cause: str) -> None:
    rewards = 2 * (1.0, 0.5, 0.0, 0.25)
    longest = [max(len(row) for row in lay_out(r.record, LogitTree()).rows) for r in batch(rewards)]
    worst = longest.index(max(longest))
    budget = sorted(longest)[-2]
    statuses = tuple("aborted" if cause == "aborted" and i == worst else "completed" for i in range(len(rewards)))
    samples = samples_of(batch(rewards, statuses))
    samples[worst].remove_sample = cause == "removed"
    made = Batch.of(samples, Cell(method=Mask4d(budget=budget)))
    sampled = record_of(samples[worst]).sampled
    assert made.metrics()["lost"] == {cause: sampled}
    assert made.metrics()["trained"] == made.metrics()["sampled"] - sampled
    data = made.train_data()
    (row,) = (i for i, rollout in enumerate(data["rollout_ids"]) if rollout == worst)
    assert (len(data["tokens"][row]), data["rollout_mask_sums"][row], data["rewards"][row]) == (2, 0, 0.0)


def test_a_batch_of_which_nothing_can_be_trained_is_an_error() -> None:
    samples = samples_of(batch((None, None), ("failed", "aborted")))
    with pytest.raises(MemoryWalkerError, match="all 2 rollouts were aborted or failed; the first is failed"):
        train_data(samples, Cell())


def test_a_rollout_that_a_filter_removed_stays_in_the_baseline() -> None:
    samples = samples_of(batch((1.0, 0.0, 0.0, 0.5)))
    samples[1].remove_sample = True
    data = train_data(samples, Cell(method=LogitTree(), std=False))
    of_removed = [i for i, rollout in enumerate(data["rollout_ids"]) if rollout == 1]
    assert [int(data["loss_masks"][i].sum()) for i in of_removed] == [0]
    assert data["rewards"][0] == 0.5, "its reward still counts"
    metrics = Batch.of(samples, Cell(method=LogitTree(), std=False)).metrics()
    assert metrics["lost"] == {"removed": int(record_of(samples[1]).generated.sum())}
    assert metrics["trained"] == sum(int(mask.sum()) for mask in data["loss_masks"]), "metrics count what is trained"


def test_an_excluded_rollout_counts_in_no_mean_of_rewards() -> None:
    """Also if somebody gave it one. All that print a mean print the same."""
    rollouts = batch((0.0, 0.5, 1.0, 0.25), ("completed", "truncated", "aborted", "completed"))
    samples = samples_of(rollouts)
    data = train_data(samples, Cell(method=Mask4d()))
    assert Batch.of(samples, Cell(method=Mask4d())).metrics()["reward"] == 0.25
    assert data["raw_reward"][data["rollout_ids"].index(2)] == 0.0
    assert summarise(rollout.record for rollout in rollouts)["total"]["reward"] == 0.25
    totals = RunTotals(4)
    for rollout in rollouts:
        totals.add(rollout.record, 1)
    assert totals.reward == 0.25


def test_a_job_records_what_it_trains(tmp_path: Path) -> None:
    """A filter and another judge are between sampling and training: a replay of the store has to be the same."""
    samples = samples_of(batch((1.0, 0.0, 0.0, 0.5)))
    samples[1].remove_sample = True
    samples[3].reward = 2.0
    args = args_of(LogitTree(), std=False)
    args.save, metrics = str(tmp_path / "checkpoints"), dict[str, Any]()
    hooks.rollout_log(0, args, samples, metrics, 1.0)
    stored = list(read_records([tmp_path / "rollout-00000.records"]))
    assert [record.meta.report.removed for record in stored] == [False, True, False, False]
    assert [record.meta.reward for record in stored] == [1.0, 0.0, 0.0, 2.0]
    again = recorded_samples(stored)
    replayed, trained = (train_data(found, cell_of(args)) for found in (again, samples))
    np.testing.assert_equal(replayed, trained)
    assert Batch.of(again, cell_of(args)).metrics() == batch_of(args, samples).metrics()
    counted = summarise(stored)["total"]["methods"]["logittree"]
    assert counted["lost"] == batch_of(args, samples).metrics()["lost"] == {"removed": stored[1].sampled}


def test_a_batch_is_laid_out_once_for_metrics_and_train_data() -> None:
    samples, args = samples_of(batch((1.0, 0.0))), args_of(LogitTree(), std=False)
    first = batch_of(args, samples)
    assert batch_of(args, list(samples)) is first
    samples[1].reward = 3.0  # judged again
    judged = batch_of(args, samples)
    assert judged is not first
    assert judged.metrics()["reward"] == 2.0
    assert hooks.convert_samples(args, samples)["rewards"][0] == judged.rollouts[0].advantage == -1.0
    samples[0].remove_sample = True
    assert batch_of(args, samples).metrics()["trained"] < judged.metrics()["trained"]


def test_a_batch_of_other_records_is_another_one() -> None:
    """Also if a record stands where one stood that is not needed any more."""
    samples, args = samples_of(batch((1.0, 0.0))), args_of(LogitTree(), std=False)
    for rewards in ((1.0, 0.0), (0.0, 1.0)) * 20:
        for sample, rollout in zip(samples, batch(rewards), strict=True):
            put_record(sample, rollout.record)
        assert [rollout.record.meta.reward for rollout in batch_of(args, samples).rollouts] == list(rewards)


def test_a_question_that_comes_up_twice_is_two_groups() -> None:
    samples = samples_of(batch((1.0, 0.0, 1.0, 0.5)))
    for i, sample in enumerate(samples):
        record = record_of(sample)
        put_record(sample, replace(record, meta=replace(record.meta, group="q1")))
        sample.group_index = i // 2
    args = args_of(LogitTree(), std=False)
    advantages = dict(
        zip(*(hooks.convert_samples(args, samples)[key] for key in ("rollout_ids", "rewards")), strict=True)
    )
    assert advantages == {0: 0.5, 1: -0.5, 2: 0.25, 3: -0.25}
    assert hooks.reward_post_process(args, samples) == ([1.0, 0.0, 1.0, 0.5], list(advantages.values()))


def test_sdcc_names_its_leaves_and_carries_their_teacher() -> None:
    rollouts = batch((1.0, 0.0, 0.2, 0.7))
    data = train_data(samples_of(rollouts), Cell(method=Sdcc()))
    for i, rollout in enumerate(rollouts):
        leaf, teacher = data["multimodal_train_inputs"][i]["leaf"], data["prompt"][i]
        assert set(data["multimodal_train_inputs"][i]["rollout"]) == {i}
        assert (leaf >= 0).sum() == len(diverging(rollout))
        if teacher is None:
            continue
        for number, position in enumerate(diverging(rollout)):
            student, target = int(np.flatnonzero(leaf == number)[0]), int(teacher["leaves"][number])
            assert data["tokens"][i][student] == teacher["tokens"][target] == rollout.record.tokens[position]
            context, at = [], int(teacher["parent"][target])
            while at >= 0:
                context.append(int(teacher["tokens"][at]))
                at = int(teacher["parent"][at])
            assert tuple(reversed(context)) == rollout.live[position]


def test_the_union_packing_is_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"union is a diagnostic.*packing trie"):
        train_data(samples_of(batch((1.0,))), Cell(method=Mask4d(packing="union")))


def test_a_batch_travels_on_samples() -> None:
    rollouts = batch((1.0, 0.0))
    samples = []
    for i, rollout in enumerate(rollouts):
        sample = Sample(index=20 + i, metadata={"id": "q"})
        put_record(sample, rollout.record)
        samples.append(sample)
    assert samples[0].status is Sample.Status.COMPLETED
    assert samples[0].weight_versions == ["7"]
    last = rollouts[0].record.view_positions(-1)
    assert samples[0].tokens == rollouts[0].record.tokens[last].tolist()
    mask = samples[0].loss_mask or []
    assert (len(mask), sum(mask)) == (samples[0].response_length, int(rollouts[0].record.generated[last].sum()))
    samples[1].reward = 3.0  # somebody judged again
    data = hooks.convert_samples(args_of(NaiveCompressed(), std=False), samples)
    assert (data["raw_reward"], data["rewards"], data["rollout_ids"]) == ([1.0, 3.0], [-1.0, 1.0], [20, 21])


def test_what_is_not_ours_is_named() -> None:
    with pytest.raises(MemoryWalkerError, match=r"sample 4: it has no record; set --custom-generate-function-path"):
        hooks.convert_samples(args_of(Mask4d()), [Sample(index=4)])
    with pytest.raises(MemoryWalkerError, match=r"its prompt is a list.*--apply-chat-template"):
        question_of(Sample(index=1, prompt=[{"role": "user"}], label="x"))
    with pytest.raises(MemoryWalkerError, match=r"its label is None.*--label-key"):
        question_of(Sample(index=1, prompt="Who?", label=None))
    with pytest.raises(ConfigError, match="no 'memorywalker'"):
        cell_of(Namespace())
    sample = Sample(index=1)
    put_record(sample, batch((1.0,))[0].record)
    sample.reward = {"score": 1.0}
    with pytest.raises(ConfigError, match="not a number; choose one with --reward-key"):
        hooks.convert_samples(args_of(Mask4d()), [sample])


def test_a_question_is_a_line_of_the_data_set() -> None:
    question = question_of(Sample(index=1, group_index=3, prompt="Who?", label="Ada", metadata={}))
    assert (question.id, question.text, question.answers) == ("3", "Who?", ("Ada",))
    assert question_of(Sample(prompt="Who?", label=["Ada", "Eve"], metadata={"id": "q7"})).id == "q7"


def test_cells_survive_the_way_through_slimes_arguments() -> None:
    cell = Cell(method=Sdcc(weight=1e-6), std=False)
    assert cell_of(Namespace(memorywalker=cell.to_json())) == cell


def test_records_are_judged_as_they_are_when_nobody_else_did() -> None:
    record = batch((0.2,))[0].record
    assert isinstance(record, Record)
    sample = Sample(index=1)
    put_record(sample, record)
    sample.reward = None
    data = hooks.convert_samples(args_of(Mask4d()), [sample])
    assert data["raw_reward"] == [0.2]
