"""Runs one agent and sees to it that whatever the agent started ends with it. A script: it imports nothing of ours.

    python -I warden.py GRACE STDIN COMMAND...

It adopts every process that loses its parent below it, so nothing gets away by leaving its group or session. It goes on
until the agent has ended or its own standard input is closed, which also happens when whoever started it is killed.
Then everything below it is asked to end, after GRACE seconds killed, and it exits with the agent's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main(grace: float, stdin: str, *command: str) -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt processes")
    with open(stdin, "rb") as task:
        agent = subprocess.Popen(command, stdin=task, start_new_session=True)
    code = wait(agent)
    deadline = time.monotonic() + grace
    signal_all(signal.SIGTERM)
    while any_left():
        if time.monotonic() > deadline:
            signal_all(signal.SIGKILL)  # again and again: they may go on starting others meanwhile
        time.sleep(0.02)
    return 128 + signal.SIGTERM if code is None else code if code >= 0 else 128 - code


def wait(agent: subprocess.Popen[bytes]) -> int | None:
    """Its code; None if we are to end it."""
    ended = os.pidfd_open(agent.pid)
    while ended not in (ready := select.select([sys.stdin.fileno(), ended], [], [])[0]):
        if ready and not os.read(sys.stdin.fileno(), 4096):
            return None
    return agent.wait()


def any_left() -> bool:
    """Whether there is a process below us. Waits for those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def signal_all(number: int) -> None:
    for pid, began in list(below()):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)  # from now on the number cannot become another process's
            try:
                if (found := stat(pid)) is not None and found[1] == began:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def below() -> Iterator[tuple[int, int]]:
    """Every process below us, and when it began."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    found = {pid: entry for pid in pids if (entry := stat(pid)) is not None}
    ours = {os.getpid()}
    while more := {pid for pid, (parent, _) in found.items() if parent in ours} - ours:
        ours |= more
    return ((pid, found[pid][1]) for pid in ours - {os.getpid()})


def stat(pid: int) -> tuple[int, int] | None:
    """Its parent, and when it began in clock ticks; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
