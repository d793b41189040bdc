"""Run a Ray node on every host of a job until the driver on the first of them exits.

Each host runs ``node.py``. Its configuration is the first line of its standard input, so secrets are on no command line
and in no file. A node runs as long as its standard input is open: however this process ends, the nodes end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from environment import ROOT, allocator, passed

REMOTE_SHELL = "ssh -o BatchMode=yes -o ServerAliveInterval=15"
PORTS = range(20_000, 30_000)
"""One is chosen for a job; neither Ray's workers nor the kernel use these."""
GRACE_S = 40.0
"""For a node to end, which takes up to half of that to terminate what it started."""
POLL_S = 0.2


class Host:
    """The connection to the node of a host."""

    def __init__(self, name: str, remote: list[str], config: dict[str, object]) -> None:
        self.name = name
        command = [sys.executable, str(ROOT / "launch" / "lib" / "node.py")]
        if remote:
            command = [*remote, name, *map(shlex.quote, command)]
        # In its own session, so that Ctrl-C reaches only this process, which stops the nodes in order.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin is not None
        self._stdin = self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # reported when it is polled
            self._stdin.write(json.dumps(config).encode() + b"\n")
            self._stdin.flush()

    def release(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            report(f"{self.name}: its node has not ended after {GRACE_S:g} s; the next start there ends what is left")
            self.process.terminate()


class Job:
    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._signal = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Return the exit code of the driver, once it or a node has exited."""
        head, *workers = self.hosts
        while True:
            if self._signal:
                report(f"stopped by {signal.Signals(self._signal).name}")
                return 128 + self._signal
            if (code := head.process.poll()) is not None:
                return code if code >= 0 else 128 - code
            for worker in workers:
                if (code := worker.process.poll()) is not None:
                    report(f"{worker.name}: its node ended with {code}, before the job did; the others are stopped")
                    return 1
            time.sleep(POLL_S)

    def end(self) -> None:
        """Stop the driver before the nodes that it uses."""
        for together in (self.hosts[:1], self.hosts[1:]):
            for host in together:
                host.release()
            for host in together:
                host.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def ray_token() -> dict[str, str]:
    """Return a token for this job: without it nobody can join its cluster or run anything there."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def report(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, the same on all hosts")
    parser.add_argument("--hosts", default="", help="names with commas, the head first; none is this machine")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of each host")
    parser.add_argument("--keys", default="", help="names of variables that hold keys, with commas")
    parser.add_argument("driver", help="module that is run on the head")
    parser.add_argument("flags", nargs="*", help="its command line, behind --")
    args = parser.parse_args()

    names = args.hosts.split(",") if args.hosts else [socket.gethostname()]
    port = int(os.environ.get("RAY_PORT") or random.choice(PORTS))
    config: dict[str, object] = {
        "run": str(args.run),
        "began": time.strftime("%Y%m%d-%H%M%S"),
        "address": f"{names[0].rpartition('@')[2] if args.hosts else '127.0.0.1'}:{port}",
        "environment": {
            **ray_token(),
            **allocator(args.flags),
            **passed([key for key in args.keys.split(",") if key]),
        },
        "driver": None,
        "hosts": [name.rpartition("@")[2] for name in names],
        "gpus": args.gpus,
    }
    remote = shlex.split(os.environ.get("REMOTE_SHELL") or REMOTE_SHELL)
    if args.hosts and shutil.which(remote[0]) is None:
        report(f"there is no {remote[0]} here; REMOTE_SHELL names the command that reaches a host")
        return 1
    job = Job()
    try:
        for name in names:
            driver = [args.driver, *args.flags] if name == names[0] else None
            job.hosts.append(Host(name, remote if args.hosts else [], {**config, "host": name, "driver": driver}))
        return job.run()
    finally:
        job.end()


if __name__ == "__main__":
    sys.exit(main())
