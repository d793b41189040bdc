"""A Ray node on every host of a job, for as long as the driver on the first of them runs.

On each host runs ``node.py``. What it is to do is the first line of its standard input: so secrets are on no command
line and in no file, and travel as safely as the connection does. A node stays as long as its standard input is open.
However this process ends, the connections end with it, and so do the nodes.
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

from environment import ROOT, passed

REMOTE_SHELL = "ssh -o BatchMode=yes -o ServerAliveInterval=15"
PORTS = range(20_000, 30_000)
"""Of which one is chosen for a job; neither Ray's workers nor the kernel hand these out."""
GRACE = 40.0
"""Seconds that a node has to end. It takes half of them itself before it kills what it started."""
TICK = 0.2


class Host:
    """The connection to one of them."""

    def __init__(self, name: str, remote: list[str], order: dict[str, object]) -> None:
        self.name = name
        command = [sys.executable, str(ROOT / "launch" / "lib" / "node.py")]
        if remote:
            command = [*remote, name, *map(shlex.quote, command)]
        # In a session of its own, so that Ctrl-C comes here alone, and what is stopped first is decided here.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin is not None
        self._wire = self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # what it died of is told when it is looked at
            self._wire.write(json.dumps(order).encode() + b"\n")
            self._wire.flush()

    def release(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._wire.close()

    def wait(self) -> None:
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            tell(f"{self.name}: its node has not ended after {GRACE:g} s; the next start there ends what is left")
            self.process.terminate()


class Job:
    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._signal = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def run(self) -> int:
        """Until the driver has ended, which gives the exit code, or something is wrong."""
        head, *workers = self.hosts
        while True:
            if self._signal:
                tell(f"stopped by {signal.Signals(self._signal).name}")
                return 128 + self._signal
            if (code := head.process.poll()) is not None:
                return code if code >= 0 else 128 - code
            for worker in workers:
                if (code := worker.process.poll()) is not None:
                    tell(f"{worker.name}: its node ended with {code}, before the job did; the others are stopped")
                    return 1
            time.sleep(TICK)

    def end(self) -> None:
        """The driver first: what it works with is there until it has ended."""
        for together in (self.hosts[:1], self.hosts[1:]):
            for host in together:
                host.release()
            for host in together:
                host.wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def private() -> dict[str, str]:
    """A token for this job alone: who does not have it cannot join its cluster or run anything there."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def tell(text: str) -> None:
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
    order: dict[str, object] = {
        "run": str(args.run),
        "began": time.strftime("%Y%m%d-%H%M%S"),
        "address": f"{names[0].rpartition('@')[2] if args.hosts else '127.0.0.1'}:{port}",
        "environment": {**private(), **passed([key for key in args.keys.split(",") if key])},
        "driver": None,
        "nodes": len(names),
        "gpus": args.gpus,
    }
    remote = shlex.split(os.environ.get("REMOTE_SHELL") or REMOTE_SHELL)
    if args.hosts and shutil.which(remote[0]) is None:
        tell(f"there is no {remote[0]} here; REMOTE_SHELL names the command that reaches a host")
        return 1
    job = Job()
    try:
        for name in names:
            driver = [args.driver, *args.flags] if name == names[0] else None
            job.hosts.append(Host(name, remote if args.hosts else [], {**order, "host": name, "driver": driver}))
        return job.run()
    finally:
        job.end()


if __name__ == "__main__":
    sys.exit(main())
