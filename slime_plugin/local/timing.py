"""How costs are compared: actions take turns, and ratios are taken within a repetition, because machines are noisy.

Shared by ``memorywalker compare``, ``memorywalker verify`` and ``benchmarks/cost.py``.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slime_plugin.methods import Layout

OnTimed = Callable[[int, str, float], None]
"""Called after each action with the number of its repetition, its name and its seconds."""


def time_in_turns(
    actions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    prepare: Callable[[str], object] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
    warm_ups: int = 0,
    on_timed: OnTimed = lambda repetition, name, seconds: None,
) -> dict[str, list[float]]:
    """Return the seconds of each action, per repetition. Each repetition begins with another action.

    ``prepare`` is called before each action with its name and is not timed. The first ``warm_ups`` repetitions, which
    find neither memory nor caches warm, come on top of ``repeats`` and do not count.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(warm_ups + repeats):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            prepare(name)
            begin = clock()
            actions[name]()
            taken = clock() - begin
            if repetition >= warm_ups:
                seconds[name].append(taken)
            on_timed(repetition, name, taken)
    return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return the ratio of each repetition."""
    return [a / b for a, b in zip(seconds, baseline, strict=True)]


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    return statistics.median(ratios(seconds, baseline))


def plain_chains(layout: Layout) -> Layout:
    """Return the rows with each token following the one before: the wrong contexts, at the cost to compare trees with.

    As many tokens are trained as in the trees.
    """
    rows = []
    for row in layout.rows:
        position = np.arange(len(row), dtype=np.int32)
        rows.append(replace(row, parent=position - 1, position=position))
    return replace(layout, rows=tuple(rows))


def device_name() -> str:
    """Return the name of the GPU, or of the processor if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
