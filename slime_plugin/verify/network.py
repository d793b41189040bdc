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
CHECKED = 1 << 20
"""Elements whose values are checked."""
BUCKET_BYTES = 512 << 20
"""Of weights that slime sends at once."""
MODULUS = 251
"""Checked integers are below it: sums of them are exact in float32 on up to 66,000 ranks, and they are in bfloat16."""
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
    weight_bytes: int
    weight_seconds: float


def measure(nodes: Sequence[str], reduced_bytes: int, weight_bytes: int) -> NetworkTimes:
    """Measure in a world whose ranks are on ``nodes``. Collective.

    Weights go from rank 0 to all ranks of the other nodes, or to all others on one node.
    """
    rank, device = dist.get_rank(), world.device()
    reduced = torch.zeros(reduced_bytes // 4, device=device)
    receivers = [other for other, node in enumerate(nodes) if node != nodes[0]] or list(range(1, len(nodes)))
    group = dist.new_group([0, *receivers])
    takes_part = rank in (0, *receivers)
    bucket = torch.zeros(min(BUCKET_BYTES, weight_bytes) // 2 if takes_part else 0, dtype=torch.bfloat16, device=device)
    buckets = -(-weight_bytes // BUCKET_BYTES)

    def send_weights() -> None:
        for _ in range(buckets if takes_part else 0):
            dist.broadcast(bucket, src=0, group=group)

    return NetworkTimes(
        wrong_sums=_wrong_sums(rank, len(nodes), device),
        latency=_seconds(lambda: _all_reduce(reduced[:1]), device),
        reduced_bytes=reduced.nbytes,
        reduce_seconds=_seconds(lambda: _all_reduce(reduced), device),
        wrong_weights=_wrong_weights(rank, group, device) if takes_part else 0,
        weight_bytes=buckets * bucket.nbytes,
        weight_seconds=_seconds(send_weights, device),
    )


def measurements(found: Sequence[NetworkTimes], nodes: Sequence[str], link: float | None) -> Iterator[Measurement]:
    """Yield what the ranks found. ``link`` is what a plan assumes between nodes, in bytes per second; None on CPUs."""
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
    sender = max(found, key=lambda one: one.weight_bytes)
    speed = sender.weight_bytes / sender.weight_seconds
    shown = f"{sender.weight_seconds:.3g} s, {speed / GB:.3g} GB/s"
    yield Measurement(f"{sender.weight_bytes / GB:.2g} GB of weights", True, shown, value=sender.weight_seconds)


def _wrong_sums(rank: int, ranks: int, device: torch.device) -> int:
    numbers = torch.arange(CHECKED, device=device)
    summed = ((numbers * (rank + 1)) % MODULUS).float()
    _all_reduce(summed)
    expected = torch.zeros(CHECKED, dtype=torch.long, device=device)
    for other in range(ranks):
        expected += (numbers * (other + 1)) % MODULUS
    return int((summed.long() != expected).sum())


def _wrong_weights(rank: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    sent = (torch.arange(CHECKED, device=device) * 7 % MODULUS).bfloat16()
    weights = sent.clone() if rank == 0 else torch.zeros_like(sent)
    dist.broadcast(weights, src=0, group=group)
    return int((weights != sent).sum())


def _seconds(collective: Callable[[], None], device: torch.device) -> float:
    """Return the median time of the slowest rank, without the first call, which sets up connections."""
    times = []
    for _ in range(REPEATS + 1):
        _all_reduce(torch.zeros(1, device=device))  # ranks begin together
        _wait(device)
        started = time.perf_counter()
        collective()
        _wait(device)
        taken = torch.tensor([time.perf_counter() - started], device=device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        times.append(float(taken))
    return statistics.median(times[1:])


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
