"""A program that serves HTTP, with everything it starts: begun, waited for and ended as one.

It runs in a session of its own. So an interrupt on the terminal reaches whoever started it and not the program itself,
and its process group is exactly what it started: ending the group leaves nothing behind, and touches nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from slime_plugin.errors import MemoryWalkerError, printable

Progress = Callable[[float, str], None]
"""Is told the seconds since the start, and what the program is doing."""

LIFELINE = "MEMORYWALKER_LIFELINE"
"""Environment variable: the end of standard input means that whoever started the program is gone."""


class ServerError(MemoryWalkerError):
    """A server that cannot be started, did not become healthy, or is gone."""


class Service:
    """One such program. A context manager: healthy inside, gone afterwards.

    It may be started, stopped and started again; stopping what does not run does nothing.
    """

    STAGES: ClassVar[tuple[tuple[str, str], ...]] = ()
    """What stands in the log once a stage has begun, and the name of the stage; in order."""

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        log: Path | None = None,
        grace: float = 3.0,
    ) -> None:
        """``grace``: seconds it has to end by itself before it is killed. Without ``log`` the log is a temporary file,
        which is removed when the service is stopped, unless something went wrong with it."""
        self.name = name
        self.host = host
        self._wanted_port = port
        self._wanted_log = log
        self._grace = grace
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._begun = 0.0
        self._failed = False
        self._port: int | None = None
        self._log: Path | None = None

    def command(self, port: int) -> list[str]:
        """What to run."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """What it finds in its environment beside what is there already."""
        return {}

    def healthy(self) -> bool:
        """Whether it serves."""
        return self._get("/health") is not None

    def check(self) -> None:
        """Raises what is wrong with the settings, before anything is started."""
        if self._wanted_port is not None:
            check_free(self.host, self._wanted_port)

    @property
    def port(self) -> int:
        if self._port is None:
            raise ServerError(f"{self.name}: has not been started, so it has no port yet")
        return self._port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the program itself; what it starts is in the process group of that number."""
        if self._process is None:
            raise ServerError(f"{self.name}: does not run")
        return self._process.pid

    @property
    def log(self) -> Path:
        if self._log is None:
            raise ServerError(f"{self.name}: has not been started, so it has no log yet")
        return self._log

    @property
    def alive(self) -> bool:
        return self._process is not None and _end_of(self._process.pid) is None

    def start(self) -> None:
        """Begin; :meth:`wait` says when it serves. So several can start side by side."""
        with self._lock:
            if self._process is not None:
                raise ServerError(f"{self.name}: runs already, with pid {self._process.pid}; stop it first")
            self.check()
            port = free_port(self.host) if self._wanted_port is None else self._wanted_port
            descriptor, self._log = self._open_log()
            theirs, ours = os.pipe()
            try:
                self._process = subprocess.Popen(
                    self.command(port),
                    stdin=theirs,
                    stdout=descriptor,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **self.environment(), LIFELINE: "stdin"},
                )
            except OSError as error:
                os.close(ours)
                raise ServerError(f"{self.name}: cannot be started: {error.strerror}") from error
            finally:
                os.close(descriptor)
                os.close(theirs)
            self._port, self._lifeline, self._begun, self._failed = port, ours, time.monotonic(), False
            atexit.register(self.stop)

    def wait(self, on_progress: Progress = lambda seconds, stage: None, *, timeout: float = 1800.0) -> None:
        """Until it is healthy. If it ends before that, or takes too long, it is stopped and that is an error."""
        while not (self.healthy() and self.alive):
            seconds = time.monotonic() - self._begun
            how = _end_of(self.pid)
            if how is None and seconds > timeout:
                how = f"is not healthy after {timeout:.0f} s"
            if how is not None:
                error = self._obituary(how)
                self.stop()
                raise error
            on_progress(seconds, self._stage())
            time.sleep(0.25)
        on_progress(time.monotonic() - self._begun, "healthy")

    def check_alive(self) -> None:
        """Raises :class:`ServerError` with the end of the log if it is gone."""
        how = _end_of(self.pid)
        if how is not None:
            raise self._obituary(how)

    def stop(self) -> None:
        """End it and all it started. Returns once none of them is left."""
        with self._lock:
            process, lifeline, log = self._process, self._lifeline, self._log
            if process is None or lifeline is None or log is None:
                return
            failed = self._failed or _end_of(process.pid) is not None
            try:
                _end_group(process, self._grace)
            finally:
                self._process = self._lifeline = None
                os.close(lifeline)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open_log(self) -> tuple[int, Path]:
        if self._wanted_log is None:
            descriptor, name = tempfile.mkstemp(prefix="memorywalker-", suffix=".log")
            return descriptor, Path(name)
        try:
            return os.open(self._wanted_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), self._wanted_log
        except OSError as error:
            raise ServerError(f"{self._wanted_log}: the log cannot be written: {error.strerror}") from error

    def _get(self, path: str) -> bytes | None:
        """What it answers; None if it does not, or not with 200."""
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
        reached = [stage for sign, stage in self.STAGES if sign in text]
        return reached[-1] if reached else "starting"

    def _obituary(self, how: str) -> ServerError:
        self._failed = True
        seconds = time.monotonic() - self._begun
        lines = "".join(f"\n  {line}" for line in last_words(self.log))
        ends = ", which ends with" if lines else ""
        return ServerError(f"{self.name}: {how} after {seconds:.0f} s; see {self.log}{ends}{lines}")


def check_free(host: str, port: int) -> None:
    """Raises :class:`ServerError` if nothing can be served there."""
    try:
        _bind(host, port)
    except OSError as error:
        raise ServerError(
            f"port {port} on {host} cannot be used: {error.strerror}; choose another one, or none to get a free one"
        ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at this moment."""
    try:
        return _bind(host, 0)
    except OSError as error:
        raise ServerError(
            f"nothing can be served on {host}: {error.strerror}; choose an address of this machine"
        ) from error


def _bind(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a stopped server leaves waiting is free
        listener.bind(address)
        number: int = listener.getsockname()[1]
        return number


def _end_of(pid: int) -> str | None:
    """How a child of ours ended; None while it runs. It stays waited for, so that its number stays its own."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "was ended"  # and waited for by someone else
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return f"ended with exit code {result.si_status}"
    return f"was killed by signal {result.si_status}"


def _end_group(process: subprocess.Popen[bytes], grace: float) -> None:
    """Ask the leader, which knows how to end the others; kill whatever is left of the group.

    The leader is waited for last: until then its number, which is that of the group, cannot become another's.
    """
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        until = time.monotonic() + grace
        while _end_of(process.pid) is None and time.monotonic() < until:
            time.sleep(0.05)
    finally:  # also if an interrupt arrives while we wait
        while left := members(process.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        process.wait()


def members(group: int) -> list[int]:
    """The processes of a group or session that are not yet dead."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # The name, in parentheses, may hold anything; after it: state, parent, group, session.
            state, _, pgrp, session = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # gone while we looked
        if group in (int(pgrp), int(session)) and state not in "ZX":
            found.append(int(folder.name))
    return found


_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*)?$|^[\w. -]+: error: ")


def last_words(log: Path, number: int = 5) -> list[str]:
    """What a log says about the end: the last error that was raised, or else the last lines."""
    lines = [line.rstrip() for line in _tail(log).splitlines() if line.strip()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    return [printable(line, 400) for line in errors[-1:] or lines[-number:]]


def _tail(log: Path, size: int = 1 << 18) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""  # someone tidied up; that is no reason to stop serving


def end_with_parent() -> None:
    """For the program itself: end, with all it started, when whoever started it is gone without having stopped it."""
    if os.environ.pop(LIFELINE, None) is None:
        return

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)  # it leads a group of its own, or there would be no lifeline

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
