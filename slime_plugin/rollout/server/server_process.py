"""An HTTP server as a child process: started, waited for and terminated with everything that it starts.

It runs under :mod:`slime_plugin.run.supervisor` in a session of its own: an interrupt on the terminal reaches the owner
and not the server, and the server terminates when its owner stops it, exits or is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from slime_plugin.errors import printable
from slime_plugin.rollout.server.ports import ServerError, check_free, hold, http_url, port_of
from slime_plugin.run.processes import session_members, supervised
from slime_plugin.run.supervisor import send_signal

START_TIMEOUT_S = 1800.0
"""Seconds until a server has to be healthy."""
TAIL_BYTES = 1 << 18
"""Bytes at the end of a log that are searched for errors and stages."""

T = TypeVar("T")
OnStage = Callable[[float, str], None]
"""Called with the seconds since the start and the current stage."""


class ServerProcess:
    """Base class of servers. A context manager: healthy inside, terminated afterwards.

    It may be started, stopped and started again; stopping a server that does not run does nothing.
    """

    STAGES: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Text in the log that marks the start of a stage, and the name of the stage; in order."""

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        log: Path | None = None,
        grace_s: float = 3.0,
    ) -> None:
        """``grace_s``: seconds from SIGTERM to SIGKILL. Without ``log`` the log is a temporary file, which is removed
        when the server is stopped, unless it failed."""
        self.name = name
        self.host = host
        self._wanted_port = port
        self._wanted_log = log
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._failed = False
        self._port: int | None = None
        self._held = contextlib.ExitStack()
        self._log: Path | None = None

    def command(self, port: int) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def env(self) -> Mapping[str, str]:
        """Return variables to add to the environment."""
        return {}

    def healthy(self) -> bool:
        return self._get("/health") is not None

    def check(self) -> None:
        """Raise what is wrong with the settings, before anything is started."""
        if self._wanted_port is not None:
            check_free(self.host, self._wanted_port)

    @property
    def port(self) -> int:
        return self._started(self._port)

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)

    @property
    def pid(self) -> int:
        """PID of the supervisor, which leads the session of the server."""
        return self._started(self._process).pid

    @property
    def log(self) -> Path:
        return self._started(self._log)

    @property
    def alive(self) -> bool:
        return self._process is not None and _exit_status(self._process.pid) is None

    def start(self) -> None:
        """Start without waiting until it serves, which :meth:`wait` does: several servers can start at once."""
        with self._lock:
            if self._process is not None:
                raise ServerError(f"{self.name}: runs already, with pid {self._process.pid}; stop it first")
            self.check()
            with contextlib.ExitStack() as stack:
                holder = stack.enter_context(hold(self.host, self._wanted_port))  # it may be minutes until it listens
                descriptor, self._log = self._open_log()
                try:
                    self._process = subprocess.Popen(
                        supervised(self.command(port_of(holder)), self._grace_s),
                        stdin=subprocess.PIPE,
                        stdout=descriptor,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env={**os.environ, **self.env()},
                    )
                except OSError as error:
                    raise ServerError(f"{self.name}: cannot be started: {error.strerror}") from error
                finally:
                    os.close(descriptor)
                self._port, self._held = port_of(holder), stack.pop_all()
            self._started_at, self._failed = time.monotonic(), False
            atexit.register(self.stop)

    def wait(self, on_progress: OnStage = lambda seconds, stage: None) -> None:
        """Wait until it is healthy. If it exits before that, or takes too long, stop it and raise an error."""
        while not (self.healthy() and self.alive):
            seconds = time.monotonic() - self._started_at
            failure = _exit_status(self.pid)
            if failure is None and seconds > START_TIMEOUT_S:
                failure = f"is not healthy after {START_TIMEOUT_S:.0f} s"
            if failure is not None:
                error = self._exit_error(failure)
                self.stop()
                raise error
            on_progress(seconds, self._stage())
            time.sleep(0.25)
        on_progress(time.monotonic() - self._started_at, "healthy")

    def check_alive(self) -> None:
        """Raise :class:`ServerError` with the end of the log if it has exited."""
        status = _exit_status(self.pid)
        if status is not None:
            raise self._exit_error(status)

    def stop(self) -> None:
        """Terminate it and everything it started. Returns once none of these processes is left."""
        with self._lock:
            process, log = self._process, self._log
            if process is None or log is None:
                return
            failed = self._failed or _exit_status(process.pid) is not None
            try:
                assert process.stdin is not None
                process.stdin.close()  # the supervisor terminates everything
                deadline = time.monotonic() + 2 * self._grace_s + 2  # what the supervisor takes at most, and start-up
                while _exit_status(process.pid) is None and time.monotonic() < deadline:
                    time.sleep(0.05)
            finally:  # even if an interrupt arrives while we wait, or the supervisor was killed
                while left := session_members(process.pid):
                    send_signal(left, signal.SIGKILL)
                    time.sleep(0.02)
                process.wait()
                self._process = None
                self._held.close()
                atexit.unregister(self.stop)
            if self._wanted_log is None and not failed:
                log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _started(self, value: T | None) -> T:
        if value is None:
            raise ServerError(f"{self.name}: does not run; start it first")
        return value

    def _open_log(self) -> tuple[int, Path]:
        if self._wanted_log is None:
            descriptor, name = tempfile.mkstemp(prefix="memorywalker-", suffix=".log")
            return descriptor, Path(name)
        try:
            return os.open(self._wanted_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), self._wanted_log
        except OSError as error:
            raise ServerError(f"{self._wanted_log}: the log cannot be written: {error.strerror}") from error

    def _get(self, path: str) -> bytes | None:
        """Return the body of a response with status 200, None without one."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _stage(self) -> str:
        text = _tail(self.log)
        reached = [stage for marker, stage in self.STAGES if marker in text]
        return reached[-1] if reached else "starting"

    def _exit_error(self, failure: str) -> ServerError:
        self._failed = True
        seconds = time.monotonic() - self._started_at
        lines = "".join(f"\n  {line}" for line in tail_errors(self.log))
        ends = ", which ends with" if lines else ""
        return ServerError(f"{self.name}: {failure} after {seconds:.0f} s; see {self.log}{ends}{lines}")


def _exit_status(pid: int) -> str | None:
    """How a child process ended; None while it runs. It is not reaped, so its PID is not reused."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "has exited"  # and was reaped by someone else
    if result is None:
        return None
    status = result.si_status - 128 if result.si_code == os.CLD_EXITED else result.si_status
    if result.si_code == os.CLD_EXITED and not 0 < status < signal.NSIG:  # the supervisor exits with 128 + signal
        return f"ended with exit code {result.si_status}"
    return f"was killed by signal {status}"


_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*)?$|^[\w. -]+: error: ")


def tail_errors(log: Path) -> list[str]:
    """Return the last exception in a log, or else its last lines."""
    lines = [line.rstrip() for line in _tail(log).splitlines() if line.strip()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    return [printable(line, 400) for line in errors[-1:] or lines[-5:]]


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""  # a deleted log is no reason to stop serving
