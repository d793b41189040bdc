"""What a job of slime's leaves in the folder of its run, and finds there again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.cluster import Cluster
from slime_plugin.config.method import LogitTree, Sdcc
from slime_plugin.errors import ConfigError
from slime_plugin.hooks import rollout as hooks
from slime_plugin.local.sample import Sample
from slime_plugin.record import Record, scan_store
from slime_plugin.slime.distiller import ScheduleFile
from slime_plugin.slime.recording import PREFIX
from slime_plugin.slime.retention import TRACKER, outdated, remove_outdated
from slime_plugin.slime.samples import record_of
from slime_plugin.train.distillation import SdccSchedule
from tests.local.test_train_data import batch, samples_of


def args_of(run: Path, **settings: Any) -> Namespace:
    return Namespace(
        memorywalker=Cell(method=LogitTree(), **settings).to_json(),
        save=str(run / "checkpoints"),
        num_rollout=200,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
    )


def stored(path: Path) -> list[Record]:
    return [found for found in scan_store(path) if isinstance(found, Record)]


class Source:
    """slime's data source, as far as a replay asks it."""

    def get_samples(self, groups: int) -> list[list[Sample]]:
        return [[Sample(index=2 * g + k, group_index=g) for k in range(2)] for g in range(groups)]


def test_rollouts_are_written_down_and_told(tmp_path: Path) -> None:
    samples = samples_of(batch((1.0, 0.0, 0.2, None), ("completed", "completed", "truncated", "aborted")))
    metrics: dict[str, Any] = {"slime": 1}
    assert hooks.rollout_log(3, args_of(tmp_path), samples, metrics, 1.0) is False, "slime logs its own too"
    records = stored(tmp_path / "rollout-00003.records")
    assert records == [record_of(sample) for sample in samples]
    sampled = sum(int(record.generated.sum()) for record in records)
    aborted = int(records[3].generated.sum())
    assert metrics[f"{PREFIX}sampled"] == sampled
    assert metrics[f"{PREFIX}trained"] == sampled - aborted
    assert metrics[f"{PREFIX}lost/aborted"] == aborted
    assert metrics[f"{PREFIX}reward"] == pytest.approx(0.4)
    assert all(isinstance(value, float) for key, value in metrics.items() if key.startswith(PREFIX))


def test_an_iteration_that_is_done_again_keeps_what_was_there(tmp_path: Path) -> None:
    first, second = samples_of(batch((1.0, 0.0, 0.5, 0.5))), samples_of(batch((0.0, 1.0, 0.5, 0.5)))
    for samples in (first, second, first):
        hooks.rollout_log(0, args_of(tmp_path), samples, None, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rollout-00000.attempt-1.records",
        "rollout-00000.attempt-2.records",
        "rollout-00000.records",
    ]
    assert stored(tmp_path / "rollout-00000.attempt-2.records")[0].meta.reward == 0.0


def test_a_job_that_saves_nothing_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = args_of(tmp_path)
    args.save = None
    samples = samples_of(batch((1.0, 0.0)))
    hooks.rollout_log(0, args, samples, None, 1.0)
    hooks.evaluation_log(0, args, {"dev": {"samples": samples}}, None)
    assert list(tmp_path.iterdir()) == []


def test_evaluations_have_stores_of_their_own(tmp_path: Path) -> None:
    samples = samples_of(batch((1.0, 0.0)))
    assert hooks.evaluation_log(20, args_of(tmp_path), {"dev": {"samples": samples}}, None) is False
    assert stored(tmp_path / "evaluation-dev-00021.records") == [record_of(sample) for sample in samples]


def test_recorded_rollouts_give_the_same_train_data(tmp_path: Path) -> None:
    samples = samples_of(batch((1.0, 0.0, 0.2, 0.7)))
    hooks.rollout_log(0, args_of(tmp_path), samples, None, 1.0)
    again = args_of(tmp_path / "again", cluster=Cluster(replay=tmp_path))
    groups = hooks.replay(again, 0, Source())
    assert [len(group) for group in groups] == [2, 2]
    replayed = [sample for group in groups for sample in group]
    data, expected = (hooks.convert_samples(args, s) for args, s in ((again, replayed), (args_of(tmp_path), samples)))
    assert data.keys() == expected.keys()
    for key in ("tokens", "loss_masks", "rollout_log_probs", "rewards", "rollout_mask_sums"):
        for one, two in zip(data[key], expected[key], strict=True):
            assert np.array_equal(one, two), key
    hooks.rollout_log(0, again, replayed, None, 1.0)
    assert not (tmp_path / "again").exists(), "what was recorded elsewhere is not recorded again"


def test_groups_that_failed_are_replayed_with_a_number_for_slimes_statistics(tmp_path: Path) -> None:
    samples = samples_of(batch((None, None, 0.2, 0.7), ("failed", "aborted", "completed", "completed")))
    hooks.rollout_log(0, args_of(tmp_path), samples, None, 1.0)
    groups = hooks.replay(args_of(tmp_path / "again", cluster=Cluster(replay=tmp_path)), 0, Source())
    assert [sample.reward for group in groups for sample in group] == [0.0, 0.0, 0.2, 0.7]


def test_evaluations_are_named_after_the_iterations_before_them(tmp_path: Path) -> None:
    args, data = args_of(tmp_path), {"dev": {"samples": samples_of(batch((1.0, 0.0)))}}
    hooks.evaluation_log(0, args, data, None)  # before the first iteration
    hooks.rollout_log(0, args, samples_of(batch((1.0, 0.0, 0.5, 0.5))), None, 1.0)
    hooks.evaluation_log(0, args, data, None)  # behind it
    hooks.evaluation_log(19, args, data, None)
    (tmp_path / "checkpoints").mkdir()
    args.num_rollout = 0  # a job that only evaluates
    (tmp_path / "checkpoints" / TRACKER).write_text("39\n")
    hooks.evaluation_log(0, args, data, None)
    names = sorted(path.name for path in tmp_path.glob("evaluation-*"))
    assert names == [f"evaluation-dev-{trained:05d}.records" for trained in (0, 1, 20, 40)]


def test_all_but_the_newest_whole_checkpoints_go(tmp_path: Path) -> None:
    assert outdated(tmp_path, 2) == []
    for number in (9, 19, 29, 39, 49):
        (tmp_path / f"iter_{number:07d}" / "shard").mkdir(parents=True)
    for other in ("rollout", "iter_final"):
        (tmp_path / other).mkdir()
    (tmp_path / TRACKER).write_text("39")  # 49 is being written
    thread = remove_outdated(tmp_path, 2)
    assert thread is not None
    thread.join()
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["iter_0000029", "iter_0000039", "iter_0000049", "iter_final", "rollout"]
    assert remove_outdated(tmp_path, 2) is None


def test_a_replay_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    hooks.rollout_log(0, args_of(tmp_path), samples_of(batch((1.0, 0.0))), None, 1.0)
    args = args_of(tmp_path, cluster=Cluster(replay=tmp_path))
    with pytest.raises(ConfigError, match=r"holds 2 rollouts, but trainer.prompts x rollout.samples is 4"):
        hooks.replay(args, 0, Source())
    with pytest.raises(ConfigError, match="no such store"):
        hooks.replay(args, 1, Source())
    with pytest.raises(ConfigError, match=r"cluster.replay: missing"):
        hooks.replay(args_of(tmp_path), 0, Source())

    class Short(Source):
        def get_samples(self, groups: int) -> list[list[Sample]]:
            return super().get_samples(1)

    hooks.rollout_log(2, args_of(tmp_path), samples_of(batch((1.0, 0.0, 0.5, 0.5))), None, 1.0)
    with pytest.raises(ConfigError, match="slime provides 2 samples, but 4 are replayed"):
        hooks.replay(args, 2, Short())


class TestWhatSdccRemembers:
    """From one job of slime's to the next."""

    @staticmethod
    def schedule() -> SdccSchedule:
        return SdccSchedule(Sdcc(patience=1), 100)

    def test_guard_rails_stay_as_they_were(self, tmp_path: Path) -> None:
        path, schedule = tmp_path / "run" / "sdcc.jsonl", self.schedule()
        memory = ScheduleFile(path, writes=True)
        for iteration in range(4):
            memory.begin(iteration, schedule)
            if iteration == 1:
                schedule.observe(1.0, 99.0, 0.0)
        assert schedule.off_reason is not None
        for iteration, off in ((1, False), (2, True), (3, True), (7, True)):  # 7: it ended between two iterations
            resumed = self.schedule()
            ScheduleFile(path, writes=False).begin(iteration, resumed)
            assert (resumed.off_reason is not None) == off, iteration

    def test_the_last_attempt_at_an_iteration_counts_and_half_a_line_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "sdcc.jsonl"
        healthy, switched = self.schedule(), self.schedule()
        switched.observe(1.0, 99.0, 0.0)
        ScheduleFile(path, writes=True).begin(5, switched)
        path.write_text("")
        memory = ScheduleFile(path, writes=True)
        memory.begin(5, switched)
        memory.begin(5, healthy)
        with path.open("a") as file:
            file.write('{"iteration": 5, "st')
        for _ in range(2):  # and what is written behind it is on a line of its own
            resumed = self.schedule()
            ScheduleFile(path, writes=True).begin(5, resumed)
            assert resumed.off_reason is None

    def test_only_one_rank_writes_and_only_the_first_time_is_read(self, tmp_path: Path) -> None:
        path, schedule = tmp_path / "sdcc.jsonl", self.schedule()
        reader = ScheduleFile(path, writes=False)
        reader.begin(0, schedule)
        assert not path.exists()
        switched = self.schedule()
        switched.observe(1.0, 99.0, 0.0)
        ScheduleFile(path, writes=True).begin(1, switched)
        reader.begin(1, schedule)
        assert schedule.off_reason is None, "it has been here all along"
