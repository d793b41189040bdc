"""What a run has started, by process id, so that exactly that can be ended, also after a crash.

A number is used again once its process is gone. So beside it stands when the process began, and only the process that
began then is ever ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

GRACE = 5.0
"""Seconds that processes have to end by themselves before they are killed."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    began: int
    """In clock ticks since the machine was started."""
    name: str = ""

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


class Ledger:
    """The processes of a run, written down in its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, Process] = {}

    def update(self) -> None:
        """Write down what this process has started by now."""
        for process in descendants(os.getpid()):
            self._known[process.pid] = process
        draft = self._path.with_suffix(".part")
        draft.write_text(
            json.dumps([{"pid": p.pid, "began": p.began, "name": p.name} for p in self._known.values()], indent=1),
            encoding="utf-8",
        )
        draft.replace(self._path)

    def end(self) -> None:
        """End whatever of it still runs."""
        for process in descendants(os.getpid()):
            self._known[process.pid] = process
        end_all(list(self._known.values()))
        self._path.unlink(missing_ok=True)


def end_left_over(path: Path) -> int:
    """What a run that was killed has left behind. How many processes that were."""
    try:
        left = [Process(int(p["pid"]), int(p["began"]), str(p["name"])) for p in json.loads(path.read_text("utf-8"))]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        left = []  # the machine went down while it was written
    alive = sum(process.alive for process in left)
    end_all(left)
    path.unlink(missing_ok=True)
    return alive


def end_all(processes: list[Process]) -> None:
    """Ask, wait a little, and kill."""
    for process in processes:
        process.signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    while any(process.alive for process in processes) and time.monotonic() < until:
        time.sleep(0.05)
    for process in processes:
        process.signal(signal.SIGKILL)
