"""Wait until all nodes and GPUs of a job have joined: ``joined.py NODES GPUS SECONDS``, with ``RAY_ADDRESS`` set."""

from __future__ import annotations

import logging
import sys
import time

import ray


def main() -> int:
    nodes, gpus, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    until, shown = time.monotonic() + seconds, ""
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types for it
        there = int(sum(node["Resources"].get("GPU", 0) for node in alive))
        state = f"{len(alive)} of {nodes} nodes and {there} of {gpus} GPUs have joined"
        if state != shown:
            print(f"launch: {state}", file=sys.stderr, flush=True)
            shown = state
        if len(alive) >= nodes and there >= gpus:
            return 0
        if time.monotonic() > until:
            print(f"launch: {state} after {seconds:g} s; JOIN_TIMEOUT sets the time to wait", file=sys.stderr)
            return 1
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
