"""Training runs as a user starts them, in processes of their own, watched from outside: what they start and leave."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slime_plugin.record import Edit, Meta, Record, StoreWriter
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import descendants, is_alive
from slime_plugin.run.supervisor import send_signal
from tests.cli import INTERRUPTIBLE
from tests.conftest import ROOT

CONFIG = "configs/quickstart.yaml"
ROLLOUTS = 4
SMALL = ("trainer.prompts=2", f"rollout.samples={ROLLOUTS // 2}")
TIMES = ("time", "seconds", "rollout_tokens_per_second", "train_tokens_per_second")
"""What differs between two runs that do the same."""
AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")
"""Ray's own; if Ray is killed they look for it for a minute before they end. The next start does not wait for that."""


class Run:
    """One call of ``memorywalker train``, and every process that came of it."""

    def __init__(self, out: Path, errors: Path, *arguments: str) -> None:
        """``errors`` is the file for what it tells."""
        self.folder = RunFolder(out)
        self._errors = errors
        with errors.open("wb") as file:
            self._process = subprocess.Popen(
                [*INTERRUPTIBLE, "train", CONFIG, "--out", str(out), *arguments],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._started: dict[psutil.Process, str] = {}
        self._watching = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def stderr(self) -> str:
        return self._errors.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def until(self, reached: Callable[[], Any], seconds: float = 300) -> Any:
        """What ``reached`` gives once it is something."""
        end = time.monotonic() + seconds
        while not (found := reached()):
            assert self.running, f"ended with {self._process.returncode} before that: {self.stderr}"
            assert time.monotonic() < end, f"not within {seconds} s: {self.stderr}"
            time.sleep(0.002)
        return found

    def until_there(self, pattern: str) -> None:
        """Until the run has a file of that name."""
        self.until(lambda: any(True for _ in self.folder.path.glob(pattern)))

    def actor(self, title: str) -> int:
        """The process id of whatever has that in its command line, among the run's processes."""
        found = self.until(lambda: [p.pid for p in descendants(self.pid) if title in _title(p.pid)])
        return int(found[0])

    def signal(self, number: int, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def end(self, seconds: float = 300, but_for: tuple[str, ...] = ()) -> int:
        """Its exit code, once it has ended and nothing that it started is left."""
        code = self._process.wait(seconds)
        self._watching = False
        self._thread.join()
        end = time.monotonic() + 15
        while left := [
            process
            for process in self.left
            if not self._started[process].startswith(but_for) and not _title(process.pid).startswith(but_for)
        ]:
            assert time.monotonic() < end, f"still there: {[(p.pid, self._started[p], _title(p.pid)) for p in left]}"
            time.sleep(0.05)
        return code

    @property
    def left(self) -> list[psutil.Process]:
        """What it has started and what still runs."""
        return [process for process in self._started if is_alive(process)]

    @property
    def names(self) -> set[str]:
        """Of what still runs."""
        return {self._started[process] for process in self.left}

    def finish(self) -> None:
        assert self.end() == 0, self.stderr

    def clear(self) -> None:
        """Whatever a failed test has left of it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._watching = False
        self._thread.join()
        send_signal(self._started, signal.SIGKILL)

    def _watch(self) -> None:
        while self._watching:
            for process in descendants(self.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._started[process] = process.name()
            time.sleep(0.1)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Runs:
    """All that a test starts, and nothing of it outlives the test."""

    def __init__(self, folder: Path, recorded: Path | None) -> None:
        self.folder, self._recorded = folder, recorded
        self._all: list[Run] = []

    def start(self, name: str | Path, *settings: str, resume: bool = False) -> Run:
        arguments = [*SMALL, *settings, *(["--resume"] * resume)]
        if self._recorded is not None:
            arguments += ["--replay", str(self._recorded)]
        self._all.append(Run(self.folder / name, self.folder / f"{len(self._all)}.stderr", *arguments))
        return self._all[-1]

    def clear(self) -> None:
        for run in self._all:
            run.clear()


def record_rollouts(path: Path, iterations: int) -> None:
    """A run to be replayed: rollouts with a fold each, of random tokens, so that it needs no engine."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.settings.write_text(json.dumps({"version": 1, "cell": {}}))
    rng = np.random.default_rng(7)
    for iteration in range(iterations):
        with StoreWriter(folder.rollouts(iteration)) as store:
            for number in range(ROLLOUTS):
                store.append(_rollout(iteration, number, rng))


def _rollout(iteration: int, number: int, rng: np.random.Generator) -> Record:
    """20 tokens of prompt, 8 sampled, 4 of which are folded away, and 8 more."""
    generated = np.zeros(36, dtype=bool)
    generated[20:] = True
    return Record(
        tokens=rng.integers(0, 400, 36).tolist(),
        generated=generated.astype(int).tolist(),
        logprobs=[float(-rng.exponential(3.0)) if flag else None for flag in generated],
        views=[[(0, 28)], [(0, 20), (24, 36)]],
        edits=[Edit("fold", "policy")],
        meta=Meta(
            id=f"{iteration}-q{number // 2}-{number % 2}",
            harness="agentfold",
            group=f"q{number // 2}",
            reward=float(number % 2),
            weight_version=str(iteration),
            status="completed",
            extra={"sample": iteration * ROLLOUTS + number},
        ),
    )


def trajectory(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics without what takes time."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in folder.read_metrics()]


def places(folder: RunFolder) -> list[tuple[str, int]]:
    """Which step or iteration each line of metrics is about, in order."""
    return [(line["kind"], line[line["kind"]]) for line in folder.read_metrics()]


def files(path: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of that size."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
