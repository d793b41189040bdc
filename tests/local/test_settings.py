"""What a run may change when it goes on, and what it may not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.run import settings
from slime_plugin.run.folder import RunFolder
from tests.conftest import ROOT


def cell(*overrides: str) -> Cell:
    return load_cell(ROOT / "configs" / "quickstart.yaml", overrides)


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    with settings.opened(folder, cell(), resume=False):
        assert folder.read_settings()["trainer"]["prompts"] == 8
        assert folder.logs.is_dir()
    return folder


def test_a_run_goes_on_as_it_was_begun(begun: RunFolder) -> None:
    with settings.opened(begun, cell(), resume=True):
        pass


@pytest.mark.parametrize(
    "change",
    [
        "trainer.iterations=50",
        "trainer.keep=3",
        "trainer.batch_tokens=500",
        "rollout.concurrency=2",
        "tracking.tensorboard=false",
    ],
)
def test_what_changes_nothing_that_is_learnt_may_change(begun: RunFolder, change: str) -> None:
    with settings.opened(begun, cell(change), resume=True):
        pass
    with settings.opened(begun, cell(change), resume=True):  # and is what counts from then on
        key, value = change.split("=")
        group, name = key.split(".")
        assert json.dumps(begun.read_settings()[group][name]) == value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("trainer.tp=2", "trainer.tp = 1, not 2"),
        ("trainer.dp=2", "trainer.dp = 1, not 2"),
        ("trainer.lr=1e-6", "trainer.lr = 0.0003, not 1e-06"),
        ("method=sdcc", "method.type = 'mask4d', not 'sdcc'"),
        ("rollout.samples=4", "rollout.samples = 8, not 4"),
        ("harness.threshold=99", "harness.threshold = 120, not 99"),
    ],
)
def test_what_would_be_another_run_is_refused_with_both_values(begun: RunFolder, change: str, told: str) -> None:
    before = begun.settings.read_bytes()
    with pytest.raises(ConfigError) as caught, settings.opened(begun, cell(change), resume=True):
        pass
    (line,) = str(caught.value).splitlines()
    if "sdcc" not in change:
        assert line == (f"{begun.path}: was started with {told}; keep that, or choose another folder for a new run")
    assert begun.settings.read_bytes() == before


def test_a_replayed_run_goes_on_with_the_same_rollouts(tmp_path: Path) -> None:
    folder, one, two = (RunFolder(tmp_path / name) for name in ("run", "one", "two"))
    with settings.opened(folder, cell(), resume=False, recorded=one):
        pass
    with settings.opened(folder, cell(), resume=True, recorded=one):
        pass
    for other, told in ((two, f"the rollouts of --replay {two.path}"), (None, "rollouts of its own")):
        with pytest.raises(ConfigError) as caught, settings.opened(folder, cell(), resume=True, recorded=other):
            pass
        assert str(caught.value) == (
            f"{folder.path}: was started on the rollouts of --replay {one.path}, not on {told}; keep that, or "
            "choose another folder for a new run"
        )


def test_a_folder_is_begun_once(begun: RunFolder) -> None:
    with (
        pytest.raises(ConfigError, match=r"holds a run already; continue it with --resume"),
        settings.opened(begun, cell(), resume=False),
    ):
        pass


def test_there_is_nothing_to_go_on_with_in_an_empty_folder(tmp_path: Path) -> None:
    for folder in (RunFolder(tmp_path), RunFolder(tmp_path / "none")):
        with pytest.raises(MemoryWalkerError, match="not a training run"), settings.opened(folder, cell(), resume=True):
            pass
    assert not list(tmp_path.iterdir())


def test_a_folder_has_one_run_at_a_time(begun: RunFolder) -> None:
    with settings.opened(begun, cell(), resume=True):
        for resume in (True, False):
            with (
                pytest.raises(MemoryWalkerError, match=rf"another run is using it \(process {os.getpid()}\)"),
                settings.opened(begun, cell(), resume=resume),
            ):
                pass
    with settings.opened(begun, cell(), resume=True):
        pass
