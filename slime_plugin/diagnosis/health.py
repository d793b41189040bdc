"""The health of a run: what its first iterations show, from the lines of its metrics.

The local loop writes it as ``health.json`` after each of them; of a job under slime the diagnosis computes it from what
slime has printed. What is unknown is null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from slime_plugin.files import write_atomically
from slime_plugin.run.folder import RunFolder

FILE = "health.json"
ITERATIONS = 3
"""Iterations that the summary covers."""
Line = Mapping[str, Any]


def health_of(lines: Iterable[Line]) -> dict[str, Any]:
    """Return the summary of the first iterations.

    ``ratio``, ``reference_kl``, ``clipped`` and ``grad_norm`` are those of an iteration's first update: before it the
    policy is the one that sampled, so that ratio is 1 and, in the first iteration, reference_kl is 0.
    """
    steps: dict[int, Line] = {}
    iterations: dict[int, Line] = {}
    for line in lines:
        number = line["iteration"]
        if number >= ITERATIONS:
            continue
        if line["kind"] == "iteration":
            iterations[number] = line
        elif number not in steps or line["step"] < steps[number]["step"]:
            steps[number] = line
    numbers = sorted({*steps, *iterations})
    found = [{"iteration": number, **_of(steps.get(number, {}), iterations.get(number, {}))} for number in numbers]
    return {"version": 1, "iterations": found}


def write_health(folder: RunFolder, iteration: int, pids: Iterable[int]) -> None:
    """Write the summary after one of the first iterations, with the memory that the run's processes use. A folder that
    cannot be written is left alone."""
    if iteration >= ITERATIONS:
        return
    health = {**health_of(folder.read_metrics()), "memory": memory_of(pids)}
    try:
        write_atomically(folder.path / FILE, json.dumps(health, indent=1) + "\n")
    except OSError:
        return


def memory_of(pids: Iterable[int]) -> dict[str, int]:
    """Return bytes of the machine, and of these processes and all that they have started."""
    processes: set[psutil.Process] = set()
    used = 0
    for pid in (os.getpid(), *pids):
        try:
            process = psutil.Process(pid)
            processes |= {process, *process.children(recursive=True)}
        except psutil.Error:  # it has ended
            continue
    for process in processes:
        try:
            used += process.memory_info().rss
        except psutil.Error:
            continue
    machine = psutil.virtual_memory()
    return {"run_bytes": used, "available_bytes": machine.available, "total_bytes": machine.total}


def _of(step: Line, line: Line) -> dict[str, Any]:
    logdiff = _part(line, "logdiff") or {"mean": step.get("logdiff")}
    return {
        **_numbers(step, "ratio", "reference_kl", "clipped", "entropy", "grad_norm"),
        "logdiff": _numbers(logdiff, "mean", "max"),
        "places": _part(line, "places") or _part(step, "places"),
        **_numbers(line, "reward", "reward_std", "rollouts", "K", "calls", "tool_failures"),
        **{key: line.get(key) for key in ("statuses", "edits", "call_errors")},
        **_numbers(line, "rollout_tokens_per_second", "train_tokens_per_second"),
        "seconds": _numbers(_part(line, "seconds"), "total")["total"],
    }


def _part(line: Line, key: str) -> Line:
    value = line.get(key)
    return value if isinstance(value, Mapping) else {}


def _numbers(line: Line, *keys: str) -> dict[str, float | None]:
    """Anything else in a file that is damaged is unknown."""
    values = {key: line.get(key) for key in keys}
    return {
        key: value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
        for key, value in values.items()
    }
