"""What the memory of this machine and the links between its ranks do: bytes per second, and the latency of a sum."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from slime_plugin.verify import world

REPEATS = 5
COLUMNS = 4096
"""Of the matrix that is read."""
SUMS = 20
"""All-reduces that are timed together: one alone is shorter than the clock is exact."""


def seconds_of(action: Callable[[], object]) -> float:
    """Return the median seconds of an action until the device has done it, after a first time that does not count."""
    taken = []
    for _ in range(1 + REPEATS):
        _finish()
        begin = time.perf_counter()
        action()
        _finish()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_bandwidth(size: int, dtype: torch.dtype) -> float:
    """Return the bytes per second at which a matrix of ``size`` bytes is read by its product with a vector."""
    matrix = torch.ones(size // (COLUMNS * dtype.itemsize), COLUMNS, dtype=dtype, device=world.device())
    vector = torch.ones(COLUMNS, dtype=dtype, device=world.device())
    return matrix.nbytes / seconds_of(lambda: torch.mv(matrix, vector))


def host_bandwidth(size: int) -> float:
    """Return the bytes per second between a GPU and pinned memory of its host, in the slower direction."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=world.device())
    down = seconds_of(lambda: there.copy_(host, non_blocking=True))
    return size / max(down, seconds_of(lambda: host.copy_(there, non_blocking=True)))


def sum_latency(numbers: int, dtype: torch.dtype, group: dist.ProcessGroup) -> float:
    """Return the seconds of an all-reduce of a few numbers. Collective."""
    tensor = torch.zeros(numbers, dtype=dtype, device=world.device())

    def add() -> None:
        for _ in range(SUMS):
            dist.all_reduce(tensor, group=group)

    return seconds_of(add) / SUMS


def gather_bandwidth(size: int, group: dist.ProcessGroup) -> float:
    """Return the bytes per second that a rank gets of the others, while each collects ``size`` bytes. Collective."""
    part = torch.zeros(size // group.size(), dtype=torch.uint8, device=world.device())
    parts = torch.empty(len(part) * group.size(), dtype=torch.uint8, device=world.device())
    seconds = seconds_of(lambda: dist.all_gather_into_tensor(parts, part, group=group))
    return (len(parts) - len(part)) / seconds
