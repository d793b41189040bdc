"""What was started is ended, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.local import processes
from slime_plugin.local.processes import Ledger, Process, descendants, end_left_over

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def start(*command: str, session: bool = False) -> subprocess.Popen[str]:
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=session))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def test_descendants_are_found_in_any_session(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("sh", "-c", "sleep 600 & setsid sleep 601 & echo ready; wait", session=True)
    assert child.stdout is not None
    child.stdout.readline()
    for _ in range(100):
        found = {process.name for process in descendants(child.pid)}
        if found == {"sleep"}:
            break
        time.sleep(0.02)
    below = descendants(child.pid)
    assert [process.name for process in below] == ["sleep", "sleep"]
    assert child.pid in {process.pid for process in descendants(os.getpid())}
    assert {process.pid for process in below} < {process.pid for process in descendants(os.getpid())}
    processes.end_all(below)
    assert not any(process.alive for process in below)


def test_a_number_that_is_used_again_is_another_process(start: Callable[..., subprocess.Popen[str]]) -> None:
    bystander = start("sleep", "600")
    found = Process.of(bystander.pid)
    assert found is not None
    assert found.alive
    namesake = Process(bystander.pid, found.began - 1)
    assert not namesake.alive
    processes.end_all([namesake])
    assert bystander.poll() is None


def test_what_is_dead_but_not_waited_for_is_gone(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("sleep", "600")
    found = Process.of(child.pid)
    assert found is not None
    os.kill(child.pid, signal.SIGKILL)
    for _ in range(200):
        if not found.alive:
            break
        time.sleep(0.02)
    assert not found.alive
    assert Process.of(child.pid) is None


def test_who_does_not_end_when_asked_is_killed(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.3)
    child = start(sys.executable, "-c", STUBBORN)
    assert child.stdout is not None
    child.stdout.readline()
    found = Process.of(child.pid)
    assert found is not None
    processes.end_all([found])
    assert child.wait(10) == -signal.SIGKILL


def test_the_next_start_ends_what_a_killed_run_left(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A driver that is killed: its ledger names a child, and a grandchild that came later."""
    path = tmp_path / "processes.json"
    bystander = start("sleep", "600")
    driver = start(
        sys.executable,
        "-c",
        f"""
import pathlib, subprocess, time
from slime_plugin.local.processes import Ledger
ledger = Ledger(pathlib.Path({str(path)!r}))
child = subprocess.Popen(["sh", "-c", "sleep 1; sleep 600 & wait"], start_new_session=True)
ledger.update()
print(ledger.scratch, flush=True)
time.sleep(600)
""",
    )
    assert driver.stdout is not None
    scratch = Path(driver.stdout.readline().strip())
    assert scratch.is_dir()
    for _ in range(500):
        if len(below := descendants(driver.pid)) == 2 and "sleep" in {process.name for process in below}:
            break
        time.sleep(0.02)
    time.sleep(1.2)  # the first sleep is over, so the second one is in no ledger
    below = descendants(driver.pid)
    driver.kill()
    driver.wait()
    assert end_left_over(path) == 1
    assert not any(process.alive for process in below)
    assert not scratch.exists()
    assert not path.exists()
    assert bystander.poll() is None
    assert end_left_over(path) == 0


def test_what_was_started_before_the_run_is_left_alone(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    before = start("sleep", "600")
    ledger = Ledger(tmp_path / "processes.json")
    ours = start("sleep", "600")
    ledger.update()
    ledger.end()
    assert ours.wait(10) == -signal.SIGTERM
    assert before.poll() is None


def test_whoever_writes_into_the_temporary_folder_of_a_killed_run_belongs_to_it(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path, scratch = tmp_path / "processes.json", tmp_path / "mw-killed"
    scratch.mkdir()
    (scratch / "read").write_text("something")
    path.write_text(json.dumps({"scratch": str(scratch), "processes": []}))
    writer = start("sh", "-c", f"exec 3>{scratch}/log; echo ready; exec sleep 600")
    reader = start("sh", "-c", f"exec 3<{scratch}/read; echo ready; exec sleep 600")
    for process in (writer, reader):
        assert process.stdout is not None
        process.stdout.readline()
    assert end_left_over(path) == 1
    assert writer.wait(10) == -signal.SIGTERM
    assert reader.poll() is None


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", '{"scratch": 1, "processes": [{}]}'])
def test_a_ledger_that_makes_no_sense_ends_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "processes.json"
    path.write_text(content)
    assert end_left_over(path) == 0
    assert not path.exists()


def test_only_a_temporary_folder_of_a_run_is_removed(tmp_path: Path) -> None:
    path, precious = tmp_path / "processes.json", tmp_path / "precious"
    precious.mkdir()
    path.write_text(json.dumps({"scratch": str(precious), "processes": []}))
    end_left_over(path)
    assert precious.is_dir()


def test_a_ledger_that_cannot_be_written_is_told_and_still_ends_everything(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("something else")
    ledger = Ledger(tmp_path / "file" / "processes.json")
    with pytest.raises(MemoryWalkerError, match=r"processes.json: cannot be written: Not a directory"):
        ledger.update()
    assert ledger.scratch.parent == Path(tempfile.gettempdir())
    child = start("sleep", "600")
    ledger.end()
    assert child.wait(10) == -signal.SIGTERM
    assert not ledger.scratch.exists()
