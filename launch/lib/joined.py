"""Wait until the nodes of a job have joined, with their GPUs and CPUs: ``joined.py NODES GPUS SECONDS``.

GPUS is the number per node. ``RAY_ADDRESS`` names the cluster.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import ray

OWN_CPUS = 2
"""What slime takes beside one CPU per GPU: for its rollout manager and its lock."""


def main() -> int:
    nodes, gpus, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    until, shown = time.monotonic() + seconds, ""
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types for it
        there = sum(_has(node, "GPU") for node in alive)
        state = f"{len(alive)} of {nodes} nodes and {there} of {nodes * gpus} GPUs have joined"
        if state != shown:
            report(state)
            shown = state
        if len(alive) >= nodes and there >= nodes * gpus:
            return _check_cpus(alive, gpus)
        if time.monotonic() > until:
            report(f"{state} after {seconds:g} s; JOIN_TIMEOUT sets the time to wait")
            return 1
        time.sleep(0.5)


def _check_cpus(nodes: list[dict[str, Any]], gpus: int) -> int:
    """slime waits without an end for CPUs that do not exist."""
    there, needed = sum(_has(node, "CPU") for node in nodes), len(nodes) * gpus + OWN_CPUS
    few = [node for node in nodes if _has(node, "CPU") < gpus]
    if there >= needed and not few:
        return 0
    where = ", ".join(f"{_has(node, 'CPU')} on {node['NodeManagerAddress']}" for node in few or nodes)
    report(
        f"Ray counts {there} CPUs ({where}); slime reserves {needed}, one per GPU on its node and {OWN_CPUS} for "
        "itself. Give containers or job steps more CPUs, or set NUM_CPUS to the number per node"
    )
    return 1


def _has(node: dict[str, Any], resource: str) -> int:
    return int(node["Resources"].get(resource, 0))


def report(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
