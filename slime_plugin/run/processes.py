"""Find and terminate processes: those below this one, and those that a killed run left behind.

Everything that a run starts is known by PID and start time, so a process that reuses a PID is never signalled, and
nothing is ever ended by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.files import write_atomically
from slime_plugin.run import supervisor
from slime_plugin.run.supervisor import send_signal

SCRATCH_PREFIX = "mw-"
"""Prefix of the name of a run's temporary folder."""
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def supervised(command: Sequence[str], grace_s: float, stdin: str | Path = os.devnull) -> list[str]:
    """The command line that runs a command under :mod:`slime_plugin.run.supervisor`.

    Start it with a pipe as standard input: closing the pipe terminates the command and all its descendants.
    """
    psutil_folder = Path(psutil.__file__).parents[1]
    return [sys.executable, "-I", supervisor.__file__, str(psutil_folder), str(grace_s), str(stdin), *command]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie, which has exited and was not reaped yet, does not.

    A killed process with several threads looks like a zombie once its main thread has ended, and holds its files and
    ports until the last of the others has.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


def descendants(pid: int) -> list[psutil.Process]:
    """Return what a process has started and what still runs, in any session or process group, by PID."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return sorted(filter(is_alive, children), key=lambda process: process.pid)
    return []


def session_members(session: int) -> list[psutil.Process]:
    """Return the running processes of a session."""
    return _select(lambda process: os.getsid(process.pid) == session)


def writers_below(folder: Path) -> list[psutil.Process]:
    """Return our processes that have a file below that folder open for writing."""

    def writes(process: psutil.Process) -> bool:
        return any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in process.open_files())

    return _select(writes)


def terminate(processes: Iterable[psutil.Process]) -> None:
    """Send SIGTERM, wait up to :data:`GRACE_S`, and send SIGKILL to those that are left."""
    processes = list(processes)
    send_signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(map(is_alive, processes)) and time.monotonic() < deadline:  # not wait_procs: it would reap our children
        time.sleep(0.05)
    send_signal(processes, signal.SIGKILL)


def start_ticks(process: psutil.Process) -> int:
    """Clock ticks from boot to the start of a process. Unlike the time of day, they survive a change of the clock.

    psutil has them only relative to the time of day, and remembers that.
    """
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    return int(fields[19])


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. The kernel releases it when this process ends, however it ends."""
    path = folder / "processes.lock"
    try:
        file = open(path, "a+", encoding="ascii")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise MemoryWalkerError(
                f"{folder}: another run is using it (process {file.read() or 'unknown'}); wait for its end, or "
                "choose another folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be locked: {error.strerror}; use a local disk") from error
        file.truncate(0)
        with contextlib.suppress(OSError):  # the PID only informs others; a full disk is reported by the next writer
            file.write(str(os.getpid()))
            file.flush()
        yield


class ProcessRegistry:
    """The processes of a run and its temporary folder, recorded in the run's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier = set(descendants(os.getpid()))  # started by this process before the run
        self._known: set[psutil.Process] = set()
        self.scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))

    def scan(self) -> None:
        """Find what this process has started since the registry was opened."""
        self._known |= set(descendants(os.getpid())) - self._earlier

    def update(self) -> None:
        """Scan, and write the registry."""
        self.scan()
        entries = []
        for process in self._known:
            with contextlib.suppress(psutil.NoSuchProcess):
                entries.append({"pid": process.pid, "began": start_ticks(process), "name": process.name()})
        try:
            write_atomically(self._path, json.dumps({"scratch": str(self.scratch), "processes": entries}, indent=1))
        except OSError as error:
            raise MemoryWalkerError(
                f"{self._path}: cannot be written: {error.strerror}; free some space and continue with --resume"
            ) from error

    def end(self) -> None:
        """Terminate what still runs, and remove the temporary folder and the registry."""
        self.scan()
        terminate(self._known)
        shutil.rmtree(self.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def terminate_leftovers(path: Path) -> int:
    """Terminate what a killed run left behind, and return how many processes that were.

    Processes that it had no time to record are found by the logs they have open in its temporary folder.
    """
    processes, scratch = set(), None
    # there is no file, or the machine crashed writing it
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        registry = json.loads(path.read_text("utf-8"))
        scratch = Path(registry["scratch"])
        for entry in registry["processes"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(entry["pid"]))
                if start_ticks(process) == int(entry["began"]):
                    processes.add(process)
    if scratch is not None and scratch.name.startswith(SCRATCH_PREFIX):
        processes |= set(writers_below(scratch))
    processes = set(filter(is_alive, processes))
    terminate(processes.union(*(descendants(process.pid) for process in processes)))
    if scratch is not None and scratch.name.startswith(SCRATCH_PREFIX):
        shutil.rmtree(scratch, ignore_errors=True)
    path.unlink(missing_ok=True)
    return len(processes)


def _select(condition: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():  # process_iter() may yield an earlier process of a reused PID
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it ended meanwhile, or belongs to someone else
            process = psutil.Process(pid)
            if condition(process) and is_alive(process):
                found.append(process)
    return found
