"""What a run has started, by process id, so that exactly that can be ended, also after a crash.

A number is used again once its process is gone. So beside it stands when the process began, and only the process that
began then is ever ended.

``processes.lock`` belongs to the run that is at work in the folder, and is free again once that run is gone, however it
went.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_plugin.errors import ConfigError, MemoryWalkerError

SCRATCH = "mw-"
"""How the name of a run's temporary folder begins."""
GRACE = 5.0
"""Seconds that processes have to end by themselves before they are killed."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    began: int
    """In clock ticks since the machine was started."""
    name: str = ""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        found = _stat(pid)
        return None if found is None else cls(pid, found.began, found.name)

    @property
    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found.began == self.began

    def signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    began: int
    name: str


def _stat(pid: int) -> _Stat | None:
    """None if there is no such process, or only what a parent has not yet waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition(" (")[2].rpartition(") ")
    state, parent, *fields = rest.split()
    return None if state in "ZX" else _Stat(int(parent), int(fields[17]), name)


def descendants(pid: int) -> list[Process]:
    """Everything that a process has started and that still runs, whatever session or group it is in."""
    found = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    below, added = {pid}, True
    while added:
        more = {p for p, stat in found.items() if stat is not None and stat.parent in below and p not in below}
        below |= more
        added = bool(more)
    return [Process(p, stat.began, stat.name) for p in sorted(below - {pid}) if (stat := found[p]) is not None]


def writers_below(folder: Path) -> list[Process]:
    """Every process of ours that has a file below that folder open for writing."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # gone while we looked, or someone else's
            writes = any(
                descriptor.readlink().is_relative_to(folder)
                and _opened_with(path / "fdinfo" / descriptor.name) & os.O_ACCMODE != os.O_RDONLY
                for descriptor in (path / "fd").iterdir()
            )
            if writes and (process := Process.of(int(path.name))) is not None:
                found.append(process)
    return found


def _opened_with(info: Path) -> int:
    (flags,) = [line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:")]
    return int(flags, 8)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Be the only run in that folder."""
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
                f"{folder}: another run is at work in it (process {file.read() or 'unknown'}); wait for its end, or "
                "choose another folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be locked: {error.strerror}; use a local disk") from error
        file.truncate(0)
        with contextlib.suppress(OSError):  # only to be told to others, and whoever needs the space will say so
            file.write(str(os.getpid()))
            file.flush()
        yield


class Ledger:
    """The processes of a run and its temporary folder, written down in the run's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._others = set(descendants(os.getpid()))  # the helpers of whatever else this process has done before
        self._known: dict[int, Process] = {}
        self.scratch = Path(tempfile.mkdtemp(prefix=SCRATCH))

    def look(self) -> None:
        """Remember what this process has started by now, since the ledger was opened."""
        for process in descendants(os.getpid()):
            if process not in self._others:
                self._known[process.pid] = process

    def update(self) -> None:
        """Write it down."""
        self.look()
        processes = [{"pid": p.pid, "began": p.began, "name": p.name} for p in self._known.values()]
        draft = self._path.with_suffix(".part")
        try:
            draft.write_text(json.dumps({"scratch": str(self.scratch), "processes": processes}, indent=1), "utf-8")
            draft.replace(self._path)
        except OSError as error:
            raise MemoryWalkerError(
                f"{self._path}: cannot be written: {error.strerror}; free some space and go on with --resume"
            ) from error

    def end(self) -> None:
        """End whatever of it still runs."""
        self.look()
        end_all(list(self._known.values()))
        shutil.rmtree(self.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def end_left_over(path: Path) -> int:
    """What a run that was killed has left behind. How many processes that were.

    What it had no time to write down is known by the logs that it keeps in the run's temporary folder.
    """
    try:
        left = json.loads(path.read_text("utf-8"))
        processes = [Process(int(p["pid"]), int(p["began"]), str(p["name"])) for p in left["processes"]]
        scratch = Path(left["scratch"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        processes, scratch = [], None  # the machine went down while it was written
    if scratch is not None and scratch.name.startswith(SCRATCH):
        processes += writers_below(scratch)
    alive = {process for process in processes if process.alive}
    end_all([*alive, *(below for process in alive for below in descendants(process.pid))])
    if scratch is not None and scratch.name.startswith(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
    path.unlink(missing_ok=True)
    return len(alive)


def end_all(processes: list[Process]) -> None:
    """Ask, wait a little, and kill."""
    for process in processes:
        process.signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    while any(process.alive for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
    for process in processes:
        process.signal(signal.SIGKILL)
