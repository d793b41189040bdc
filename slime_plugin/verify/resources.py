"""What the cell needs of this machine before anything is computed: what ``memorywalker doctor`` reports, and more.

Keys, corpora, programs; and on GPUs what a node of a cluster job needs: memory that may be locked, a CPU for each
process of slime, free GPUs, requests to engines that no proxy takes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

from slime_plugin import machine
from slime_plugin.config.cell import Cell
from slime_plugin.machine import Finding, Package, Probe
from slime_plugin.needs import needs_of
from slime_plugin.verify.measurement import Measurement
from slime_plugin.verify.settings import Device, Verification

SERVERS = (
    Package("numpy", "", "pip install 'numpy>=1.26'"),
    Package("uvicorn", "", "pip install 'uvicorn>=0.51'"),
    Package("starlette", "", "pip install 'starlette>=1.0'"),
)
"""Of the tap and of tools; the image installs this package without its dependencies, so nothing else checks them."""
LEAST = {"uvicorn": (0, 51), "starlette": (1, 0)}
ENGINE = Package(
    "transformer-engine", "", "the cluster image has it; docker/versions.env names the commit", "transformer_engine"
)
FREE_SHARE = 0.9
"""Of a GPU's memory."""
SLIME_CPUS = 2
"""Beside one per GPU: slime's driver and its rollout manager."""


def check(verification: Verification) -> Iterator[Measurement]:
    packages = [*machine.PACKAGES, *SERVERS]
    if verification.device == "cuda":
        packages.append(ENGINE)
    probed = machine.probe(packages)
    for finding in (
        *machine.machine(probed, packages, Path("runs")),
        *_versions(verification),
        *_devices(verification, probed),
        proxies(verification.device),
        *_needs(verification.cell),
    ):
        yield Measurement(finding.name, finding.status != "missing", finding.found, remedy=finding.remedy)


def _versions(verification: Verification) -> Iterator[Finding]:
    """Refuse versions that are known to fail."""
    for name, least in LEAST.items():
        found = _version(name)
        if found and found < least:
            shown = ".".join(map(str, least))
            yield Finding(name, "missing", f"{_text(found)} is too old", f"pip install '{name}>={shown}'")
    numpy = _version("numpy")
    if verification.device == "cuda" and numpy >= (2,):
        yield Finding("numpy", "missing", f"slime refuses {_text(numpy)}", "pip install 'numpy<2'")


def _version(name: str) -> tuple[int, ...]:
    """Return the first two numbers of an installed version; empty if it is not installed."""
    try:
        parts = metadata.version(name).split(".")[:2]
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in parts if part.isdecimal())


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _devices(verification: Verification, probed: Probe) -> Iterator[Finding]:
    """Check that ranks have a GPU each that is free, CPUs, and memory that they may lock."""
    ranks, cores = verification.parallel.ranks, len(os.sched_getaffinity(0))
    if verification.device == "cpu":
        remedy = "works, and the ranks wait for each other: lower trainer.tp, pp or cp"
        yield Finding.of("ranks", ranks <= cores, f"{ranks} on {cores} CPU cores", remedy)
        return
    cluster = verification.cell.cluster
    remedy = f"trainer.tp x pp x cp is {ranks}: lower them, or raise cluster.nodes"
    yield Finding.of("ranks", ranks <= cluster.nodes * cluster.gpus, f"{ranks} of a replica", remedy, "missing")
    remedy = f"cluster.gpus is {cluster.gpus}: set it to what every node has, or look why nvidia-smi shows fewer"
    enough = len(probed.gpus) >= min(ranks, cluster.gpus)
    yield Finding.of("GPUs of this machine", enough, str(len(probed.gpus)), remedy, "missing")
    busy = [i for i, gpu in enumerate(probed.gpus) if gpu["free"] < FREE_SHARE * gpu["total"]]
    found = f"in use: {', '.join(map(str, busy))}" if busy else "all free"
    yield Finding.of("GPUs", not busy, found, "nvidia-smi names the processes that hold them; end these", "missing")
    needed = verification.cell.cluster.gpus + SLIME_CPUS
    remedy = f"slime reserves {needed}: give the container or job step more, or Ray waits forever"
    yield Finding.of("CPUs", cores >= needed, f"{cores} of {needed}", remedy, "missing")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    free = soft == resource.RLIM_INFINITY
    remedy = "docker run --ulimit memlock=-1, or ulimit -l unlimited: NCCL locks memory for InfiniBand"
    yield Finding.of("locked memory", free, "unlimited" if free else f"at most {soft:,} bytes", remedy, "missing")


def proxies(device: Device) -> Finding:
    """Check that requests to an engine on this machine go there. slime's client follows the proxies of the environment,
    that of ``memorywalker train`` does not."""
    taken = [kind for kind in ("http", "all") if kind in getproxies()]
    if not taken or proxy_bypass("127.0.0.1"):
        return Finding("proxies", "ok", "none between this machine and its engines")
    found = f"{taken[0]}_proxy is set, and no_proxy does not name 127.0.0.1"
    remedy = "export no_proxy=127.0.0.1,localhost and the addresses of all nodes"
    return Finding("proxies", "missing" if device == "cuda" else "warn", found, remedy)


def _needs(cell: Cell) -> Iterator[Finding]:
    for need in needs_of(cell):
        yield Finding(need.kind, "missing" if need.problem else "ok", need.problem or need.found, need.remedy)
