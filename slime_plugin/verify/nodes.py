"""The nodes of a Ray cluster: whether they have the same software, their network, and what each finds by itself."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.planner.job import ASSUMPTIONS
from slime_plugin.planner.memory import BF16
from slime_plugin.run.evidence import collect
from slime_plugin.verify.measurement import CheckResult, Measurement, Verdict
from slime_plugin.verify.settings import Device, Verification

COMMAND = (sys.executable, "-c", "from slime_plugin.cli.main import main; main()", "verify")
NETWORK_TIMEOUT_S = 300.0
REDUCED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
"""Of the all-reduce that is timed."""
BUCKET_BYTES = {"cuda": 512 << 20, "cpu": 1 << 22}
"""Of weights that are sent at once; slime's are as large."""
ONE_GPU = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}}
"""Ray shows an actor its own GPU only, whatever the environment of the job says."""
CHECKS = {
    "nodes": "the same software and the same folder on all nodes",
    "network": "sums and weights between all GPUs of all nodes",
}
"""What is checked before each node checks itself."""
UNREADABLE = "unreadable"
_UNREACHED = (
    "nodes need open ports between them, and NCCL_SOCKET_IFNAME names the interface if they have several; with "
    "NCCL_DEBUG=INFO the logs of NodeRank in the folder of the results say where they wait"
)
_LOGS = "the logs of NodeRank in the folder of the results have the rest"


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    """Ray's."""
    address: str


class NodeRank:
    """An actor with one GPU."""

    def describe(self, run: Path, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Return what should be the same on all nodes, and what the head has written into the folder of the run."""
        evidence = collect(run, cell, [])
        versions = {name: version for name, version in evidence["packages"].items() if version is not None}
        with suppress(PackageNotFoundError):
            versions["NCCL"] = version("nvidia-nccl-cu12")
        try:
            seen = (run / "seen").read_text(encoding="utf-8")
        except OSError as error:
            seen = f"{UNREADABLE}: {error.strerror}"
        software = {
            "python": evidence["python"],
            **versions,
            **{f"{k} source": v for k, v in evidence["sources"].items()},
        }
        return {"software": software, "gpus": evidence["gpus"], "seen": seen}

    def rendezvous(self) -> str:
        """Return where the ranks of a world meet: on this node. Import what the ranks need, which takes a while."""
        import ray

        from slime_plugin.rollout.server.ports import free_port
        from slime_plugin.verify import network  # noqa: F401  # for measure, which is timed

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no types for it
        return f"tcp://{f'[{host}]' if ':' in host else host}:{free_port(host)}"

    def measure(self, rendezvous: str, rank: int, nodes: Sequence[str], device: Device) -> Any:
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch has not looked yet
        import torch
        import torch.distributed as dist

        from slime_plugin.verify import network

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=len(nodes),
            timeout=timedelta(seconds=NETWORK_TIMEOUT_S / 2),
        )
        try:
            return network.measure(nodes, REDUCED_BYTES[device], BUCKET_BYTES[device])
        finally:
            dist.destroy_process_group()


def join_cluster() -> list[Node]:
    """Connect to the cluster that ``RAY_ADDRESS`` names; return its nodes, the head first."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Ray's handler prints a stack
    found = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types for it
    found.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]))
    return [Node(node["NodeID"], node["NodeManagerAddress"]) for node in found]


def check_together(verification: Verification, nodes: Sequence[Node], run: Path) -> Iterator[CheckResult]:
    """Yield the results of :data:`CHECKS`, measured by an actor per GPU."""
    import ray

    gpus = verification.cell.cluster.gpus
    places = [node for node in nodes for _ in range(gpus)]
    actor: Any = ray.remote(num_gpus=1, num_cpus=0, runtime_env=ONE_GPU)(NodeRank)  # typed for functions only
    ranks = [actor.options(scheduling_strategy=_on(node)).remote() for node in places]
    try:
        yield _result("nodes", lambda: _described(ranks[::gpus], nodes, run, verification.cell))
        if len(ranks) > 1:
            yield _result("network", lambda: _network(ranks, [node.address for node in places], verification))
    finally:
        for rank in ranks:
            ray.kill(rank)


def verify_each(
    nodes: Sequence[Node], words: Sequence[str], folder: Path, gpus: int, on_end: Callable[[Node, int], None]
) -> dict[str, dict[str, Any]]:
    """Run ``memorywalker verify`` on all nodes at once; return what each has written, by address.

    ``on_end`` is called with the exit code on each, as it ends. A node's JSON, page and log are in ``folder``.
    """
    import ray
    from ray.exceptions import RayError

    run: Any = ray.remote(num_gpus=gpus, num_cpus=0, max_retries=0)(_verify_here)
    folder = folder.resolve()
    tasks = {
        run.options(scheduling_strategy=_on(node)).remote([*words], folder / node.address, Path.cwd()): node
        for node in nodes
    }
    found, waiting = {}, list(tasks)
    while waiting:
        (task,), waiting = ray.wait(waiting)
        node = tasks[task]
        try:
            code, value = ray.get(task)
        except RayError as error:
            code, value = 1, {"error": f"the node was lost: {_last_line(error)}"}
        on_end(node, code)
        found[node.address] = value
    return found


def summary(node: Node, value: Mapping[str, Any]) -> CheckResult:
    """Return what a node has written as one line, with what failed there."""
    if "error" in value:
        return CheckResult(node.address, "failed", 0.0, message=value["error"], remedy="its log has the rest")
    found = [Measurement("checks", True, value["verdict"])]
    for check in value["checks"]:
        if check["message"]:
            what, ok = f"{check['check']}: {check['message']}", check["verdict"] != "failed"
            found.append(Measurement(what, ok, check["verdict"], remedy="" if ok else check["remedy"]))
        for finding in check["measurements"]:
            if not finding["ok"]:
                what = f"{check['check']}: {finding['what']}"
                found.append(Measurement(what, False, finding["found"], finding["limit"], finding["remedy"]))
    seconds = sum(check["seconds"] for check in value["checks"])
    return CheckResult(node.address, "passed" if value["ok"] else "failed", seconds, tuple(found))


def _verify_here(words: Sequence[str], stem: Path, project: Path) -> tuple[int, dict[str, Any]]:
    """On a node: return the exit code, and what was written, or the end of the log if nothing was."""
    output = Path(f"{stem}.json")
    output.unlink(missing_ok=True)
    log = Path(f"{stem}.log")
    words = (*COMMAND, *words, "--out", str(output), "--out", f"{stem}.html")
    with open(log, "wb") as file:
        code = subprocess.run(words, cwd=project, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if output.exists():
        value: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return code, value
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return code, {"error": f"verify ended with {code}: {lines[-1] if lines else 'without a word'}; see {log}"}


def _result(name: str, check: Callable[[], Iterator[Measurement]]) -> CheckResult:
    from ray.exceptions import GetTimeoutError, RayError

    started = time.monotonic()
    found: list[Measurement] = []
    message = remedy = ""
    try:
        found.extend(check())
    except GetTimeoutError:
        message, remedy = f"no answer for {NETWORK_TIMEOUT_S:.0f} s", _UNREACHED
    except RayError as error:
        message = _last_line(error)
        remedy = _UNREACHED if "DistBackendError" in str(error) or "timed out" in str(error) else _LOGS
    verdict: Verdict = "passed" if not message and all(finding.ok for finding in found) else "failed"
    return CheckResult(name, verdict, time.monotonic() - started, tuple(found), message, remedy)


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _described(ranks: Sequence[Any], nodes: Sequence[Node], run: Path, cell: Cell) -> Iterator[Measurement]:
    import ray

    token = uuid.uuid4().hex
    (run / "seen").write_text(token, encoding="utf-8")
    told = ray.get([rank.describe.remote(run, cell.to_json()) for rank in ranks], timeout=NETWORK_TIMEOUT_S)
    (run / "seen").unlink()
    yield from differences(dict(zip((node.address for node in nodes), told, strict=True)), token, run)


def differences(told: Mapping[str, Mapping[str, Any]], token: str, run: Path) -> Iterator[Measurement]:
    """Yield in what nodes differ from the first, by what :meth:`NodeRank.describe` has told of each."""
    head, *others = told
    ours = told[head]
    for node in others:
        theirs = told[node]
        for name in dict.fromkeys([*ours["software"], *theirs["software"]]):
            here, there = (software.get(name, "missing") for software in (ours["software"], theirs["software"]))
            if here != there:
                remedy = f"start the same image on {node} as on {head}, or install the same there"
                yield Measurement(f"{name} on {node}", False, there, here, remedy)
        if theirs["gpus"] != ours["gpus"]:
            found = ", ".join(dict.fromkeys(theirs["gpus"])) or "none"
            yield Measurement(f"GPUs on {node}", True, found, remedy=f"not those of {head}; the faster ones wait")
        if theirs["seen"] != token:
            remedy = "put runs, model and data on a file system that all nodes mount at the same path"
            found = theirs["seen"] if theirs["seen"].startswith(UNREADABLE) else "another folder"
            yield Measurement(f"{run} on {node}", False, found, "shared", remedy)
    yield Measurement("nodes", True, ", ".join(told))


def _network(ranks: Sequence[Any], places: Sequence[str], verification: Verification) -> Iterator[Measurement]:
    import ray

    from slime_plugin.verify.network import measurements

    device = verification.device
    meeting, *_ = ray.get([rank.rendezvous.remote() for rank in ranks], timeout=NETWORK_TIMEOUT_S)
    tasks = [rank.measure.remote(meeting, number, places, device) for number, rank in enumerate(ranks)]
    found = ray.get(tasks, timeout=NETWORK_TIMEOUT_S)
    weight_bytes = BF16 * verification.architecture.parameters
    return measurements(found, places, weight_bytes, ASSUMPTIONS.link if device == "cuda" else None)


def _on(node: Node) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)
