"""Run a command, and terminate every process it started once it exits or standard input is closed.

    python -I supervisor.py PSUTIL_FOLDER GRACE_S STDIN COMMAND...

The owner holds the other end of standard input. The kernel closes it even if the owner is killed, so the command never
outlives its owner. The supervisor is a subreaper: orphans below it become its children, so no process escapes by
leaving its group or session. It runs as a script in an isolated interpreter, so it imports nothing of this package, and
is told where psutil is: that may be installed for a user or be on PYTHONPATH.
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
from collections.abc import Iterable

if __name__ == "__main__":
    sys.path.append(sys.argv.pop(1))

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(grace_s: float, stdin: str, *command: str) -> int:
    """Return the exit code of the command, 128 + N if signal N ended it or stopped the supervisor."""
    become_subreaper()
    signals, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)  # read from the pipe
    with open(stdin, "rb") as file:
        child = subprocess.Popen(
            command,
            stdin=file,
            process_group=0,  # a command that signals its group does not signal the supervisor
            preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL),  # noqa: PLW1509  # there are no threads
        )
    code = _wait(child, signals)
    _terminate_descendants(grace_s)
    return code


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    """Signal those that still exist; psutil never signals a process that reuses a PID."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _wait(child: subprocess.Popen[bytes], signals: int) -> int:
    owner, exited = sys.stdin.fileno(), os.pidfd_open(child.pid)
    while True:
        ready = select.select([owner, exited, signals], [], [])[0]
        if exited in ready:
            code = child.wait()
            return code if code >= 0 else 128 - code
        if signals in ready:
            return 128 + os.read(signals, 1)[0]
        if not os.read(owner, 4096):
            return 128 + signal.SIGTERM


def _terminate_descendants(grace_s: float) -> None:
    """Send SIGTERM to the command, which may end its children in order, then to all that are left, then SIGKILL."""
    supervisor, deadline = psutil.Process(), time.monotonic() + grace_s
    for recursive in (False, True):
        processes = supervisor.children(recursive)
        send_signal(processes, signal.SIGTERM)
        psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
    while _has_children():
        send_signal(supervisor.children(recursive=True), signal.SIGKILL)  # again: they may start others meanwhile
        time.sleep(0.02)


def _has_children() -> bool:
    """Reap children that have exited, and return whether any is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
