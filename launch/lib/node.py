"""One Ray node of a job, and on the head the job's driver: started, watched and ended by process id.

``hosts.py`` starts it on every host and tells it what to do in a line of JSON. From then on an open standard input is
all that keeps it: when that is closed, when it gets a signal or when Ray or the driver ends, it ends all that it
started, and nothing else. Whatever its processes leave behind becomes its child, so that nothing escapes it.

The driver is a process of this node, and not one that ``ray job submit`` hands to Ray: so its output is a file here,
its exit code is known, an interrupt ends it, and the environment reaches it without being put on a command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import ipaddress
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from environment import ROOT, expected, import_paths

sys.path[:0] = import_paths()

from slime_plugin.errors import MemoryWalkerError  # noqa: E402  # may lie beside this folder, and not be installed
from slime_plugin.local.processes import SCRATCH, Ledger, descendants, end_all, end_left_over  # noqa: E402

TICK = 0.2
WRITE_EVERY = 60.0
"""Seconds between two looks at which processes there are. They are needed if this process itself is killed."""
GRACE = 10.0
"""Seconds that the driver has to end by itself before it is killed."""
_BECOME_REAPER, _SIGNAL_WITH_PARENT = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Order:
    """What a node is to do."""

    run: Path
    began: str
    """When the job was started; the name of the folder of its logs."""
    host: str
    address: str
    """Of the head, with its port."""
    environment: dict[str, str]
    driver: list[str] | None
    """Module and flags, on the head."""
    nodes: int
    gpus: int
    """Of each node."""


class Stop(Exception):  # noqa: N818  # not always an error
    """The node is not to go on."""

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(why)
        self.code = code


class Node:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._logs = order.run / "logs" / order.began / order.host
        record = order.run / "processes" / f"{order.host}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        self._logs.parent.mkdir(parents=True, exist_ok=True)
        self._clear(record)
        self._ledger = Ledger(record)
        self._ray: subprocess.Popen[bytes] | None = None
        self._driver: subprocess.Popen[bytes] | None = None
        self._signal, self._written = 0, 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def run(self) -> int:
        try:
            self._start_ray()
            if self._order.driver is None:
                self._stay()
            self._join()
            return self._run_driver(self._order.driver)
        except Stop as stop:
            if str(stop):
                tell(f"{self._order.host}: {stop}")
            return stop.code
        finally:
            self._end()

    def _start_ray(self) -> None:
        host, _, port = self._order.address.rpartition(":")
        if self._order.driver is None:
            while not _answers(host, int(port)):  # before that, Ray would give up
                self._tick()
            role = ["--address", self._order.address]
        else:
            role = ["--head", "--port", port, "--include-dashboard=false"]
        name = self._order.host.rpartition("@")[2]
        if _is_address(name):
            role += ["--node-ip-address", name]
        if gpus := os.environ.get("NUM_GPUS"):
            role += ["--num-gpus", gpus]
        where = ["--temp-dir", str(self._ledger.scratch), "--disable-usage-stats"]
        with open(self._logs.parent / f"{self._order.host}.ray.log", "ab") as log:
            self._ray = _start([sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role, *where], log)
        self._logs.symlink_to(self._ledger.scratch / "session_latest" / "logs")  # until they are copied
        self._ledger.update()
        while not _answers(host, int(port)):
            self._tick()

    def _join(self) -> None:
        gpus = self._order.nodes * self._order.gpus
        timeout = os.environ.get("JOIN_TIMEOUT") or "300"
        script = str(Path(__file__).with_name("joined.py"))
        joined = _start([sys.executable, script, str(self._order.nodes), str(gpus), timeout], None)
        if self._wait_for(joined):
            raise Stop(1, f"the job was not begun; what Ray says is in {self._logs.parent}")

    def _run_driver(self, words: list[str]) -> int:
        log = self._order.run / "logs" / "driver.log"
        tee = subprocess.Popen(["tee", "-a", "-i", str(log)], stdin=subprocess.PIPE)
        assert tee.stdin is not None
        self._driver = _start([sys.executable, "-m", *words], tee.stdin)
        tee.stdin.close()
        self._ledger.update()
        code = self._wait_for(self._driver)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(5)
        if code:
            tell(f"{self._order.host}: the driver ended with {code}; its output is in {log}")
        return code if code >= 0 else 128 - code

    def _stay(self) -> NoReturn:
        while True:
            self._tick()

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int:
        while (code := process.poll()) is None:
            self._tick()
        return code

    def _tick(self) -> None:
        """Wait a moment; raises :class:`Stop` if the node is not to go on."""
        ready, _, _ = select.select([0], [], [], TICK)
        if ready and not os.read(0, 4096):
            raise Stop(0 if self._order.driver is None else 128 + signal.SIGTERM)
        if self._signal:
            raise Stop(128 + self._signal, f"stopped by {signal.Signals(self._signal).name}")
        if self._ray is not None and (code := self._ray.poll()) is not None:
            raise Stop(1, f"Ray ended with {code}; see {self._logs.parent}")
        if time.monotonic() - self._written > WRITE_EVERY:
            self._written = time.monotonic()
            with contextlib.suppress(MemoryWalkerError):  # a full disk; the job is not ended for that
                self._ledger.update()

    def _end(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it is being done
        if self._driver is not None and self._driver.poll() is None:
            self._driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(GRACE)
        end_all(descendants(os.getpid()))
        _keep(self._ledger.scratch, self._logs)  # to their last lines
        self._ledger.end()

    def _clear(self, record: Path) -> None:
        """What an earlier job has left here because it was killed: its logs are kept, its processes ended."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            scratch = Path(json.loads(record.read_text("utf-8"))["scratch"])
            _keep(scratch, self._logs.with_name(f"{self._order.host}.old"))
        if count := end_left_over(record):
            tell(f"{self._order.host}: ended {count} processes that an earlier job had left")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _start(command: list[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        preexec_fn=_end_with_parent,  # noqa: PLW1509  # there are no threads
    )


def _end_with_parent() -> None:
    _LIBC.prctl(_SIGNAL_WITH_PARENT, signal.SIGTERM)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=2).close()
        return True
    return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _keep(scratch: Path, folder: Path) -> None:
    """Copy Ray's logs into the folder of the run. A worker's are named after its actor: ``RolloutManager-4711.out``."""
    if not scratch.name.startswith(SCRATCH):
        return
    if folder.is_symlink():
        folder.unlink()
    for path in sorted((scratch / "session_latest" / "logs").glob("*")):
        if not path.is_file():
            continue
        with contextlib.suppress(OSError):  # a full disk, or gone by now: logs are not worth failing for
            folder.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / _name(path))


def _name(log: Path) -> str:
    worker = re.fullmatch(r"worker-\w+-\w+-(\d+)\.(out|err)", log.name)
    if worker is None:
        return log.name
    with open(log, encoding="utf-8", errors="replace") as file:
        actor = re.search(r"^:actor_name:([\w.]+)", file.read(4096), re.MULTILINE)
    return f"{actor[1]}-{worker[1]}.{worker[2]}" if actor else log.name


def check(order: Order) -> None:
    """What is not here, before anything is started."""
    for package in ("ray", *(["slime"] if order.driver and order.driver[0].startswith("slime_plugin.") else [])):
        if importlib.util.find_spec(package) is None:
            fail(
                f"{order.host}: there is no {package}; use the image of docker/slime.Dockerfile, or install slime and "
                "set SLIME_DIR and MEGATRON_DIR (docs/cluster.md)"
            )


def tell(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    tell(text)
    sys.exit(1)


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        fail("node.py is started by hosts.py, which tells it what to do")
    told = json.loads(line)
    order = Order(**{**told, "run": Path(told["run"])})
    os.chdir(ROOT)
    os.environ.update(order.environment)
    os.environ.update(expected())
    os.environ["RAY_ADDRESS"] = order.address
    sys.path[:0] = import_paths()
    _LIBC.prctl(_BECOME_REAPER, 1)
    check(order)
    try:
        return Node(order).run()
    except MemoryWalkerError as error:
        fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
