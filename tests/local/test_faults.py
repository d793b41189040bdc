"""Runs that are killed, interrupted, or out of space, from outside and on the real Ray, and what they are afterwards.

Rollouts are recorded ones, so a run that was stopped and went on comes to exactly the numbers of one that was not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_plugin.local.checkpoint import checkpoints
from slime_plugin.run.folder import RunFolder
from tests.cli import run
from tests.conftest import ROOT
from tests.local.runs import AGENTS, CONFIG, Run, Runs, files, places, small_disk, trajectory

METHODS = {
    "mask4d": ("trainer.iterations=4",),
    "sdcc": (
        *("trainer.iterations=4", "trainer.save_every=2", "method=sdcc", "method.ema=0.9"),
        *("method.warmup=0.75", "method.weight=0.5"),
    ),
}
WHOLE = [place for i in range(4) for place in (("step", 2 * i), ("step", 2 * i + 1), ("iteration", i))]
VICTIMS = {"rank": "RankActor", "rollout": "RolloutActor", "driver": None}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, recorded: Path) -> Iterator[Callable[[str], RunFolder]]:
    """The run of a method that nothing happened to."""
    runs = Runs(tmp_path_factory.mktemp("undisturbed"), recorded)
    done: dict[str, RunFolder] = {}

    def get(method: str) -> RunFolder:
        if method not in done:
            whole = runs.start(method, *METHODS[method])
            whole.finish()
            assert places(whole.folder) == WHOLE
            done[method] = whole.folder
        return done[method]

    yield get
    runs.clear()


def kill(run: Run, victim: str) -> None:
    """As the kernel does when memory is short. Then everything ends, and the driver, if it lives, says so in a line."""
    title = VICTIMS[victim]
    if title is None:
        run.signal(signal.SIGKILL)
        assert run.end(but_for=AGENTS) == -signal.SIGKILL
        return
    pid = run.actor(title)
    os.kill(pid, signal.SIGKILL)
    assert run.end() == 1
    name = "rank-0" if victim == "rank" else victim
    assert error_line(run.stderr) == (
        f"{name} (process {pid}) has exited; see {run.folder.logs / name}.log, and continue with --resume"
    )


def error_line(stderr: str) -> str:
    """What was told; nothing but that."""
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("Error: ")]
    assert stderr.splitlines()[-1] == line
    return line.removeprefix("Error: ")


def check_saved(folder: RunFolder, truth: RunFolder) -> None:
    """The last checkpoint is that of the run that nothing happened to, and its weights stand beside it, whole."""
    for iteration in checkpoints(folder)[-1:]:
        name, weights = f"{iteration:05d}", folder.weights(iteration)
        assert files(folder.checkpoints / name) == files(truth.checkpoints / name)
        assert files(weights) == files(truth.weights(iteration))
        state = load_file(folder.checkpoints / name / "rank-00000.safetensors")
        model = [tensor for key, tensor in state.items() if key.startswith(".model.0.")]
        exported = list(load_file(weights / "model.safetensors").values())
        assert np.array_equal(values(model), values(exported))


def values(tensors: list[np.ndarray]) -> np.ndarray:
    """All numbers but the zeros that fill up a vocabulary, in order of size: Megatron arranges them otherwise."""
    flat: np.ndarray = np.sort(np.concatenate([tensor[tensor != 0] for tensor in tensors]))
    return flat


def check_same(folder: RunFolder, truth: RunFolder) -> None:
    assert places(folder) == WHOLE
    assert trajectory(folder) == trajectory(truth)
    check_saved(folder, truth)
    assert not folder.processes.exists()
    assert not list(folder.path.rglob("*.part"))


KILLS = {
    # While a checkpoint is written, while weights are, and at the moment a checkpoint has become one.
    "mask4d": [("rank", "checkpoints/00001.part"), ("rollout", "weights/v00002/*"), ("driver", "checkpoints/00003")],
    # In the middle between two checkpoints, and while one is written.
    "sdcc": [("driver", "weights/v00003/config.json"), ("driver", "checkpoints/00004.part/*.safetensors")],
}


@pytest.mark.parametrize("method", ["mask4d", pytest.param("sdcc", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_comes_to_the_same(
    method: str, runs: Runs, undisturbed: Callable[[str], RunFolder]
) -> None:
    truth = undisturbed(method)
    killed: list[Run] = []
    for victim, moment in KILLS[method]:
        killed.append(runs.start("run", *METHODS[method], resume=bool(killed)))
        killed[-1].until_there(moment)
        kill(killed[-1], victim)
        check_saved(killed[-1].folder, truth)
    last = runs.start("run", *METHODS[method], resume=True)
    last.finish()
    assert [run.left for run in killed] == [[]] * len(killed)
    check_same(last.folder, truth)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", METHODS)
def test_whatever_is_killed_and_whenever(
    method: str, seed: int, runs: Runs, undisturbed: Callable[[str], RunFolder]
) -> None:
    truth, chance = undisturbed(method), random.Random(f"{method} {seed}")
    killed: list[Run] = []
    for _ in range(3):
        run = runs.start("run", *METHODS[method], resume=bool(killed))
        killed.append(run)
        victim, delay = chance.choice(list(VICTIMS)), chance.uniform(0, 4)
        title = VICTIMS[victim]
        if title is None:
            run.until(run.folder.settings.exists)  # before that there is nothing to go on with
            delay *= 4
        pid = run.pid if title is None else run.actor(title)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):  # it may be done by now
            os.kill(pid, signal.SIGKILL)
        if run.end(but_for=AGENTS) > 0:
            assert error_line(run.stderr).endswith("and continue with --resume")
        check_saved(run.folder, truth)
        if checkpoints(run.folder)[-1:] == [4]:
            break
    last = runs.start("run", *METHODS[method], resume=True)
    last.finish()
    assert [run.left for run in killed] == [[]] * len(killed)
    check_same(last.folder, truth)


def test_an_interrupted_run_ends_what_it_started_and_nothing_else(
    runs: Runs, undisturbed: Callable[[str], RunFolder]
) -> None:
    truth = undisturbed("mask4d")
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        other = runs.start("other", *METHODS["mask4d"])
        other.until(other.folder.settings.exists)
        check_refused(runs.start("other", *METHODS["mask4d"], resume=True), other)
        # While Ray starts; a request to terminate.
        first = runs.start("run", *METHODS["mask4d"])
        first.until(lambda: "starting Ray" in first.stderr)
        first.until(lambda: "raylet" in first.names)
        first.signal(signal.SIGTERM)
        check_interrupted(first)
        # While the actors load; an interrupt as a terminal sends it.
        second = runs.start("run", *METHODS["mask4d"], resume=True)
        second.actor("RankActor")
        second.signal(signal.SIGINT, group=True)
        check_interrupted(second)
        # While it trains; by someone impatient.
        third = runs.start("run", *METHODS["mask4d"], resume=True)
        third.until_there("weights/v00001/*")
        third.signal(signal.SIGINT, group=True)
        third.signal(signal.SIGINT)
        check_interrupted(third)
        other.finish()
        check_same(other.folder, truth)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    last = runs.start("run", *METHODS["mask4d"], resume=True)
    last.finish()
    check_same(last.folder, truth)


def check_refused(second: Run, first: Run) -> None:
    """A folder has one run at a time."""
    assert second.end() == 1
    assert error_line(second.stderr) == (
        f"{first.folder.path}: another run is using it (process {first.pid}); wait for its end, or choose another "
        "folder"
    )


def check_interrupted(run: Run) -> None:
    assert run.end() == 130, run.stderr
    assert run.stderr.splitlines()[-1] == "Interrupted"
    assert "Traceback" not in run.stderr
    assert not run.folder.processes.exists()


@pytest.mark.parametrize(
    ("size", "saved"),
    [
        ("10m", [1]),
        pytest.param("4k", None, marks=pytest.mark.slow),
        pytest.param("64k", [], marks=pytest.mark.slow),
        pytest.param("4m", [], marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_told_in_a_line_and_damages_nothing(
    size: str, saved: list[int] | None, runs: Runs, undisturbed: Callable[[str], RunFolder]
) -> None:
    truth = undisturbed("mask4d")
    with small_disk(runs.folder / "disk", size) as disk:
        full = runs.start("disk/run", *METHODS["mask4d"])
        assert full.end() == 1
        line = error_line(full.stderr)
        assert str(full.folder.path) in line
        assert "No space left on device" in line
        if saved is not None:
            assert checkpoints(full.folder) == saved
            check_saved(full.folder, truth)
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        last = runs.start("disk/run", *METHODS["mask4d"], resume=full.folder.settings.exists())
        last.finish()
        check_same(last.folder, truth)


def test_an_unwritable_folder_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("something else")
    result = run("train", CONFIG, "--out", str(tmp_path / "file" / "run"))
    assert result.exit_code == 1
    assert error_line(result.stderr) == (
        f"{CONFIG}: {tmp_path}/file/run: cannot be written: Not a directory; choose another folder"
    )
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        result = run("train", CONFIG, "--out", str(disk))
        assert error_line(result.stderr) == (
            f"{CONFIG}: {disk}: cannot be written: Read-only file system; choose another folder"
        )
