"""What was started is ended, and nothing else."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.run import processes
from slime_plugin.run.processes import (
    ProcessRegistry,
    descendants,
    is_alive,
    start_ticks,
    supervised,
    terminate,
    terminate_leftovers,
)
from tests.conftest import ROOT

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
        found = {process.name() for process in descendants(child.pid)}
        if found == {"sleep"}:
            break
        time.sleep(0.02)
    below = descendants(child.pid)
    assert [process.name() for process in below] == ["sleep", "sleep"]
    assert child.pid in {process.pid for process in descendants(os.getpid())}
    assert {process.pid for process in below} < {process.pid for process in descendants(os.getpid())}
    terminate(below)
    assert not any(map(is_alive, below))


def test_a_number_that_is_used_again_is_another_process(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    bystander = start("sleep", "600")
    path, began = tmp_path / "processes.json", start_ticks(psutil.Process(bystander.pid))
    path.write_text(json.dumps({"scratch": "", "processes": [{"pid": bystander.pid, "began": began - 1}]}))
    assert terminate_leftovers(path) == 0
    assert bystander.poll() is None
    path.write_text(json.dumps({"scratch": "", "processes": [{"pid": bystander.pid, "began": began}]}))
    assert terminate_leftovers(path) == 1
    assert bystander.wait(10) == -signal.SIGTERM


def test_the_start_of_a_process_is_the_one_that_the_kernel_tells(start: Callable[..., subprocess.Popen[str]]) -> None:
    """In clock ticks since boot, as registries of version 0.6.0 have it."""
    child = start("sleep", "600")
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()
    assert start_ticks(psutil.Process(child.pid)) == int(fields[19])


def test_a_change_of_the_clock_does_not_change_when_a_process_started(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start("sleep", "600")
    process = psutil.Process(child.pid)
    process.create_time()  # which psutil remembers
    before, boot = start_ticks(process), psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 7)
    assert start_ticks(process) == start_ticks(psutil.Process(child.pid)) == before


def test_what_is_dead_but_not_waited_for_is_gone(start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("sleep", "600")
    found = psutil.Process(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    for _ in range(200):
        if not is_alive(found):
            break
        time.sleep(0.02)
    assert not is_alive(found)
    assert child.pid not in {process.pid for process in descendants(os.getpid())}


def test_a_process_lives_until_its_last_thread_has_ended(start: Callable[..., subprocess.Popen[str]]) -> None:
    """Its main thread has, so it looks like a zombie, but its port is in use."""
    exit_thread = {"x86_64": 60}.get(platform.machine(), 93)  # number of the system call
    child = start(
        sys.executable,
        "-c",
        "import ctypes, socket, threading, time; port = socket.create_server(('127.0.0.1', 0));"
        "print(port.getsockname()[1], flush=True); threading.Thread(target=time.sleep, args=(600,)).start();"
        f"ctypes.CDLL(None).syscall({exit_thread}, 0)",
    )
    assert child.stdout is not None
    port = int(child.stdout.readline())
    process = psutil.Process(child.pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    socket.create_connection(("127.0.0.1", port)).close()
    assert is_alive(process)
    process.kill()
    while process.num_threads() > 1:
        time.sleep(0.02)
    assert not is_alive(process)


def test_who_does_not_end_when_asked_is_killed(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    child = start(sys.executable, "-c", STUBBORN)
    assert child.stdout is not None
    child.stdout.readline()
    terminate([psutil.Process(child.pid)])
    assert child.wait(10) == -signal.SIGKILL


def test_the_next_start_ends_what_a_killed_run_left(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A driver that is killed: its registry names a child, and a grandchild that came later."""
    path = tmp_path / "processes.json"
    bystander = start("sleep", "600")
    driver = start(
        sys.executable,
        "-c",
        f"""
import pathlib, subprocess, time
from slime_plugin.run.processes import ProcessRegistry
registry = ProcessRegistry(pathlib.Path({str(path)!r}))
child = subprocess.Popen(["sh", "-c", "sleep 1; sleep 600 & wait"], start_new_session=True)
registry.update()
print(registry.scratch, flush=True)
time.sleep(600)
""",
    )
    assert driver.stdout is not None
    scratch = Path(driver.stdout.readline().strip())
    assert scratch.is_dir()
    for _ in range(500):
        if len(below := descendants(driver.pid)) == 2 and "sleep" in {process.name() for process in below}:
            break
        time.sleep(0.02)
    time.sleep(1.2)  # the first sleep is over, so the second one is in no registry
    below = descendants(driver.pid)
    driver.kill()
    driver.wait()
    assert terminate_leftovers(path) == 1
    assert not any(map(is_alive, below))
    assert not scratch.exists()
    assert not path.exists()
    assert bystander.poll() is None
    assert terminate_leftovers(path) == 0


def test_what_was_started_before_the_run_is_left_alone(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    before = start("sleep", "600")
    registry = ProcessRegistry(tmp_path / "processes.json")
    ours = start("sleep", "600")
    registry.update()
    registry.end()
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
    assert terminate_leftovers(path) == 1
    assert writer.wait(10) == -signal.SIGTERM
    assert reader.poll() is None


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", '{"scratch": 1, "processes": [{}]}'])
def test_a_registry_that_makes_no_sense_ends_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "processes.json"
    path.write_text(content)
    assert terminate_leftovers(path) == 0
    assert not path.exists()


def test_only_a_temporary_folder_of_a_run_is_removed(tmp_path: Path) -> None:
    path, precious = tmp_path / "processes.json", tmp_path / "precious"
    precious.mkdir()
    path.write_text(json.dumps({"scratch": str(precious), "processes": []}))
    terminate_leftovers(path)
    assert precious.is_dir()


def test_a_registry_that_cannot_be_written_is_told_and_still_ends_everything(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("something else")
    registry = ProcessRegistry(tmp_path / "file" / "processes.json")
    with pytest.raises(MemoryWalkerError, match=r"processes.json: cannot be written: Not a directory"):
        registry.update()
    assert registry.scratch.parent == Path(tempfile.gettempdir())
    child = start("sleep", "600")
    registry.end()
    assert child.wait(10) == -signal.SIGTERM
    assert not registry.scratch.exists()


def test_a_supervisor_starts_wherever_psutil_is_installed(tmp_path: Path) -> None:
    """Below a home folder or on PYTHONPATH: an isolated interpreter looks at neither."""
    venv.create(tmp_path / "bare", with_pip=False)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "psutil").symlink_to(Path(psutil.__file__).parent)
    code = """
import subprocess
from slime_plugin.run.processes import supervised
with subprocess.Popen(supervised(["sh", "-c", "exit 7"], 1.0), stdin=subprocess.PIPE) as process:
    print(process.wait())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(ROOT)))}
    python = [str(tmp_path / "bare" / "bin" / "python"), "-c", code]
    done = subprocess.run(python, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("7\n", "")


@pytest.mark.parametrize("stop", ["terminate", "close", "exit"])
def test_a_supervisor_ends_with_its_command_and_all_that_it_started(
    stop: str,
) -> None:
    seconds = 2 if stop == "exit" else 600
    script = f'setsid {sys.executable} -c "{STUBBORN}" & echo started; sleep {seconds}; exit 7'
    command = supervised(["sh", "-c", script], 0.3)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        assert {supervisor.stdout.readline() for _ in range(2)} == {"started\n", "ready\n"}
        below = descendants(supervisor.pid)
        assert len(below) >= 2
        if stop == "terminate":
            for _ in range(3):  # whoever is impatient changes nothing
                supervisor.terminate()
        elif stop == "close":
            supervisor.stdin.close()
        assert supervisor.wait(30) == (7 if stop == "exit" else 128 + signal.SIGTERM)
        assert not any(map(is_alive, below))
