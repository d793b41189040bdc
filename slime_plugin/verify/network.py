"""The network between nodes, as training uses it: sums of gradients, and weights on their way to engines.

The ranks of one torch.distributed world measure, one per GPU, those of a node next to each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from slime_plugin.verify import world
from slime_plugin.verify.measurement import Measurement

GB, MICROSECOND = 1e9, 1e-6
REPEATS = 5
SLOW_S = 2.0
"""A collective that takes longer is timed once."""
PATTERN = 1 << 16
"""Elements after which the values that are checked repeat."""
MODULUS = 251
"""These are integers below it: sums of them are exact in float32 on up to 66,000 ranks, and they are in bfloat16."""
LEAST_SHARE = 0.1
"""Of the bandwidth that a plan assumes; with less, NCCL hardly uses the network that it should."""
_DAMAGED = "look at dmesg and nvidia-smi on these hosts, and try NCCL_ALGO=Ring NCCL_PROTO=Simple"
_SLOW = (
    "NCCL_DEBUG=INFO shows whether NCCL has fallen back to TCP; NCCL_IB_HCA and NCCL_SOCKET_IFNAME choose the port; "
    "containers need /dev/infiniband (docker/run.sh)"
)


@dataclass(frozen=True, slots=True)
class NetworkTimes:
    """What one rank found. Seconds are those of the slowest rank, as medians over repetitions."""

    wrong_sums: int
    """Elements of an all-reduce that are not the sum."""
    latency: float
    """Of an all-reduce of one number."""
    reduced_bytes: int
    reduce_seconds: float
    wrong_weights: int
    """Elements of a broadcast that are not what was sent."""
    bucket_bytes: int
    """Of weights that are sent at once."""
    bucket_seconds: float


def measure(nodes: Sequence[str], reduced_bytes: int, bucket_bytes: int) -> NetworkTimes:
    """Measure in a world whose ranks are on ``nodes``. Collective.

    Weights go from rank 0 to all ranks of the other nodes, or to all others on one node.
    """
    rank, device = dist.get_rank(), world.device()
    receivers = [other for other, node in enumerate(nodes) if node != nodes[0]] or list(range(1, len(nodes)))
    group = dist.new_group([0, *receivers])
    takes_part = rank in (0, *receivers)
    reduced = torch.zeros(reduced_bytes // 4 // PATTERN, PATTERN, device=device)
    bucket = torch.zeros(bucket_bytes // 2 // PATTERN, PATTERN, dtype=torch.bfloat16, device=device)

    def send() -> None:
        if takes_part:
            dist.broadcast(bucket, src=0, group=group)

    latency = _seconds(lambda: _all_reduce(torch.zeros(1, device=device)), device)
    reduce_seconds, bucket_seconds = _seconds(lambda: _all_reduce(reduced), device), _seconds(send, device)
    reduced[:] = _pattern(rank, device)
    _all_reduce(reduced)
    expected = sum(_pattern(other, device).double() for other in range(len(nodes)))
    bucket[:] = _pattern(rank, device).bfloat16()
    send()
    sent = _pattern(0 if takes_part else rank, device).bfloat16()
    return NetworkTimes(
        wrong_sums=int((reduced != expected).sum()),
        latency=latency,
        reduced_bytes=reduced.nbytes,
        reduce_seconds=reduce_seconds,
        wrong_weights=int((bucket != sent).sum()),
        bucket_bytes=bucket.nbytes,
        bucket_seconds=bucket_seconds,
    )


def measurements(
    found: Sequence[NetworkTimes], nodes: Sequence[str], weight_bytes: int, link: float | None
) -> Iterator[Measurement]:
    """Yield what the ranks found.

    ``weight_bytes`` are those of the model. ``link`` is what a plan assumes between nodes, in bytes per second; None on
    CPUs.
    """
    first, ranks, count = found[0], len(nodes), len(set(nodes))
    where = f"{ranks} ranks on {count} node{'s' * (count > 1)}"
    wrong = sum(one.wrong_sums for one in found)
    yield Measurement.at_most(f"all-reduce, {where}: elements that are not the sum", wrong, 0, _DAMAGED)
    yield Measurement("all-reduce of one number", True, f"{first.latency / MICROSECOND:,.0f} us", value=first.latency)
    # In a ring each rank, and with it each node, sends and receives this many bytes per byte that is summed.
    rate = 2 * (ranks - 1) / ranks * first.reduced_bytes / first.reduce_seconds
    what = f"all-reduce of {first.reduced_bytes / GB:.2g} GB: bytes per second and node"
    if link is None or count == 1:
        yield Measurement(what, True, f"{rate / GB:.3g} GB/s", value=rate)
    else:
        limited = Measurement.at_least(what, rate / GB, LEAST_SHARE * link / GB, _SLOW, "GB/s")
        yield replace(limited, value=rate, assumption="link")
    wrong = sum(one.wrong_weights for one in found)
    to = "other nodes" if count > 1 else "the others"
    yield Measurement.at_most(f"weights from the first rank to {to}: elements that differ", wrong, 0, _DAMAGED)
    speed = first.bucket_bytes / first.bucket_seconds
    shown = f"{speed / GB:.3g} GB/s, {weight_bytes / speed:.3g} s for the {weight_bytes / GB:.2g} GB of the model"
    yield Measurement(f"{first.bucket_bytes / GB:.2g} GB of weights at once", True, shown, value=speed)


def _pattern(rank: int, device: torch.device) -> Tensor:
    """[PATTERN] integers that are others on every rank."""
    return (torch.arange(PATTERN, device=device) * (2 * rank + 3) % MODULUS).float()


def _seconds(collective: Callable[[], None], device: torch.device) -> float:
    """Return the median time of the slowest rank, without the first call, which sets up connections."""
    times: list[float] = []
    while len(times) <= (1 if times and times[-1] > SLOW_S else REPEATS):
        _all_reduce(torch.zeros(1, device=device))  # ranks begin together
        _wait(device)
        started = time.perf_counter()
        collective()
        _wait(device)
        taken = torch.tensor([time.perf_counter() - started], device=device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)  # the same on all ranks, so that all repeat it as often
        times.append(float(taken))
    return statistics.median(times[1:])


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
