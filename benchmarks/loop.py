"""Where the time of the quick start goes, and its memory: ``make loop``.

Runs a configuration as ``memorywalker train`` does, with the clock at hand. The runtime's own overhead is everything in
an iteration that neither samples nor trains: converting rollouts to rows, carrying them to the ranks, exporting the
weights, updating the engine, checkpoints, waiting for actors.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from slime_plugin.config.overrides import load_cell
from slime_plugin.local.loop import train
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import descendants

WORK = ("generate", "reference", "old", "train")
OVERHEAD = ("convert", "put", "transfer", "export", "update", "save", "other")


class Clock:
    """Notes when stages begin, and when the first iteration has rollouts under way."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.stages: list[tuple[float, str]] = []
        self.first_rollout: float | None = None
        self.lines: list[dict[str, Any]] = []

    def stage(self, what: str) -> None:
        self.stages.append((time.perf_counter() - self.begun, what))
        print(f"{self.stages[-1][0]:7.1f} s  {what}", flush=True)

    def rollouts(self, iteration: int, done: int, total: int) -> None:
        self.first_rollout = self.first_rollout or time.perf_counter() - self.begun

    def line(self, line: dict[str, Any]) -> None:
        if line["kind"] == "iteration":
            self.lines.append(line)


class Memory(threading.Thread):
    """The most memory that this process and all it started have had at once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.5):
            pids = [os.getpid(), *(process.pid for process in descendants(os.getpid()))]
            self.peak = max(self.peak, sum(_proportional(pid) for pid in pids))

    def stop(self) -> None:
        self._done.set()
        self.join()


def _proportional(pid: int) -> int:
    """Bytes; what several processes share is dealt out among them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # gone meanwhile
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    cell = load_cell(options.config, options.overrides)
    clock, memory = Clock(), Memory()
    memory.start()
    with tempfile.TemporaryDirectory() as folder:
        train(cell, RunFolder(Path(folder) / "run"), clock)
        total = time.perf_counter() - clock.begun
    memory.stop()
    _print(clock, total, memory.peak)


def _print(clock: Clock, total: float, peak: int) -> None:
    lines = clock.lines
    spent = {name: sum(line["seconds"][name] for line in lines) for name in (*WORK, *OVERHEAD, "total")}
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {len(lines)} iterations\n")
    print(f"{'phase':<12}{'s / iteration':>14}{'share':>9}")
    for name in (*WORK, *OVERHEAD):
        print(f"{name:<12}{spent[name] / len(lines):>14.3f}{spent[name] / spent['total']:>9.1%}")
    shares = [sum(line["seconds"][name] for name in OVERHEAD) / line["seconds"]["total"] for line in lines]
    print(
        f"\noverhead of the runtime: {sum(spent[name] for name in OVERHEAD) / spent['total']:.1%} of an iteration",
        end=" ",
    )
    print(f"(median {statistics.median(shares):.1%}, worst {max(shares):.1%})")
    for name in ("rollout_tokens_per_second", "train_tokens_per_second"):
        print(f"{name.replace('_', ' ')}: {statistics.median(line[name] for line in lines):,.0f}")
    print(f"from the command to the first rollout: {clock.first_rollout or 0.0:.1f} s")
    print(f"whole run: {total:.1f} s; peak memory of all processes: {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
