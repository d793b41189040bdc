"""One Ray node of a job, and on the head the job's driver.

``hosts.py`` starts it on every host and sends its configuration as a line of JSON. From then on it runs as long as its
standard input is open: when that is closed, on a signal, or when Ray or the driver exits, it terminates what it started
and nothing else. It is a subreaper, so no process escapes it.

The driver is a child of this node instead of a Ray job: so its output is a file here, its exit code is known, an
interrupt ends it, and its environment is on no command line.
"""

from __future__ import annotations

import contextlib
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
from slime_plugin.run.processes import SCRATCH_PREFIX, ProcessRegistry, descendants, terminate, terminate_leftovers  # noqa: E402
from slime_plugin.run.supervisor import STOP_SIGNALS, become_subreaper, set_parent_death_signal  # noqa: E402

POLL_S = 0.2
REGISTRY_INTERVAL_S = 60.0
"""Between updates of the registry, which the next job reads if this process is killed."""
GRACE_S = 10.0
"""From SIGTERM to SIGKILL of the driver."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What ``hosts.py`` sends."""

    run: Path
    began: str
    """Start time of the job; names the folder of its logs."""
    host: str
    address: str
    """Of the head, with its port."""
    environment: dict[str, str]
    driver: list[str] | None
    """Module and flags, on the head."""
    hosts: list[str]
    """All nodes, the head first."""
    gpus: int
    """Of each node."""


class Stop(Exception):  # noqa: N818  # not always an error
    """Stop the node."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Node:
    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._logs = config.run / "logs" / config.began / config.host
        registry = config.run / "processes" / f"{config.host}.json"
        registry.parent.mkdir(parents=True, exist_ok=True)
        self._logs.parent.mkdir(parents=True, exist_ok=True)
        self._terminate_leftovers(registry)
        self._registry = ProcessRegistry(registry)
        self._ray: subprocess.Popen[bytes] | None = None
        self._driver: subprocess.Popen[bytes] | None = None
        self._signal, self._registry_updated_at = 0, 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        try:
            self._start_ray()
            if self._config.driver is None:
                while True:
                    self._poll()
            self._join()
            return self._run_driver(self._config.driver)
        except Stop as stop:
            if str(stop):
                report(f"{self._config.host}: {stop}")
            return stop.code
        finally:
            self._shut_down()

    def _start_ray(self) -> None:
        host, _, port = self._config.address.rpartition(":")
        if self._config.driver is None:
            self._wait_for_port(host, int(port))  # Ray itself gives up too early
            role = ["--address", self._config.address]
        else:
            role = ["--head", "--port", port, "--include-dashboard=false"]
        name = self._config.host.rpartition("@")[2]
        if _is_address(name):
            role += ["--node-ip-address", name]
        for resource in ("gpus", "cpus"):
            if number := os.environ.get(f"NUM_{resource.upper()}"):
                role += [f"--num-{resource}", number]
        options = ["--temp-dir", str(self._registry.scratch), "--disable-usage-stats"]
        with open(self._logs.parent / f"{self._config.host}.ray.log", "ab") as log:
            self._ray = _start([sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role, *options], log)
        self._logs.symlink_to(self._registry.scratch / "session_latest" / "logs")  # until they are copied
        self._registry.update()
        self._wait_for_port(host, int(port))

    def _join(self) -> None:
        nodes, timeout_s = len(self._config.hosts), os.environ.get("JOIN_TIMEOUT") or "300"
        script = str(Path(__file__).with_name("joined.py"))
        joined = _start([sys.executable, script, str(nodes), str(self._config.gpus), timeout_s], None)
        if self._wait_for(joined):
            raise Stop(1, f"the job was not started; what Ray says is in {self._logs.parent}")

    def _run_driver(self, command: list[str]) -> int:
        log = self._config.run / "logs" / "driver.log"
        tee = subprocess.Popen(["tee", "-a", "-i", str(log)], stdin=subprocess.PIPE)
        assert tee.stdin is not None
        self._driver = _start([sys.executable, "-m", *command], tee.stdin)
        tee.stdin.close()
        self._registry.update()
        code = self._wait_for(self._driver)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(5)
        if code:
            report(f"{self._config.host}: the driver ended with {code}; its output is in {log}")
        return code if code >= 0 else 128 - code

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int:
        while (code := process.poll()) is None:
            self._poll()
        return code

    def _wait_for_port(self, host: str, port: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), timeout=2).close()
                return
            self._poll()

    def _poll(self) -> None:
        """Wait :data:`POLL_S`; raise :class:`Stop` if the node has to stop."""
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready and not os.read(0, 4096):
            raise Stop(0 if self._config.driver is None else 128 + signal.SIGTERM)
        if self._signal:
            raise Stop(128 + self._signal, f"stopped by {signal.Signals(self._signal).name}")
        if self._ray is not None and (code := self._ray.poll()) is not None:
            raise Stop(1, f"Ray ended with {code}; see {self._logs.parent}")
        if time.monotonic() - self._registry_updated_at > REGISTRY_INTERVAL_S:
            self._registry_updated_at = time.monotonic()
            with contextlib.suppress(MemoryWalkerError):  # a full disk is no reason to stop the job
                self._registry.update()

    def _shut_down(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._driver is not None and self._driver.poll() is None:
            self._driver.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(GRACE_S)
        terminate(descendants(os.getpid()))
        _keep_logs(self._registry.scratch, self._logs)  # complete now
        self._registry.end()

    def _terminate_leftovers(self, registry: Path) -> None:
        """Keep the logs of a job that was killed here, and terminate its processes."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            scratch = Path(json.loads(registry.read_text("utf-8"))["scratch"])
            _keep_logs(scratch, self._logs.with_name(f"{self._config.host}.old"))
        if count := terminate_leftovers(registry):
            report(f"{self._config.host}: terminated {count} processes that an earlier job had left")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _start(command: list[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),  # noqa: PLW1509  # there are no threads
    )


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _keep_logs(scratch: Path, folder: Path) -> None:
    """Copy Ray's logs into the run's folder. A worker's are named after its actor: ``RolloutManager-4711.out``."""
    if not scratch.name.startswith(SCRATCH_PREFIX):
        return
    if folder.is_symlink():
        folder.unlink()
    for path in sorted((scratch / "session_latest" / "logs").glob("*")):
        if not path.is_file():
            continue
        with contextlib.suppress(OSError):  # a full disk, or deleted meanwhile: logs are not worth failing for
            folder.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / _log_name(path))


def _log_name(log: Path) -> str:
    worker = re.fullmatch(r"worker-\w+-\w+-(\d+)\.(out|err)", log.name)
    if worker is None:
        return log.name
    with open(log, encoding="utf-8", errors="replace") as file:
        actor = re.search(r"^:actor_name:([\w.]+)", file.read(4096), re.MULTILINE)
    return f"{actor[1]}-{worker[1]}.{worker[2]}" if actor else log.name


def check_packages(config: NodeConfig) -> None:
    """Exit with an error if Ray or slime is missing, before anything is started."""
    of_slime = config.driver is not None and config.driver[0].startswith("slime_plugin.cluster.")
    for package in ("ray", *(["slime"] if of_slime else [])):
        if importlib.util.find_spec(package) is None:
            fail(
                f"{config.host}: there is no {package}; use the image of docker/slime.Dockerfile, or install slime and "
                "set SLIME_DIR and MEGATRON_DIR (docs/cluster.md)"
            )


def report(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    report(text)
    sys.exit(1)


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        fail("node.py is started by hosts.py, which sends its configuration")
    received = json.loads(line)
    config = NodeConfig(**{**received, "run": Path(received["run"])})
    os.chdir(ROOT)
    os.environ.update(config.environment)
    os.environ.update(expected(config.hosts))
    os.environ["RAY_ADDRESS"] = config.address
    os.environ["TENSORBOARD_DIR"] = str(config.run / "tensorboard")  # or slime writes below its working folder
    sys.path[:0] = import_paths()
    become_subreaper()
    check_packages(config)
    try:
        return Node(config).run()
    except MemoryWalkerError as error:
        fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
