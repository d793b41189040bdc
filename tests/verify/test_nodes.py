"""Verification of several nodes: what is wrong with their network or their software turns a line red."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.verify import network
from slime_plugin.verify.measurement import Measurement
from slime_plugin.verify.network import NetworkTimes, measure, measurements
from slime_plugin.verify.nodes import UNREADABLE, Node, differences, summary
from tests.conftest import ROOT
from tests.test_launch import REMOTE_SHELL, executable

NODES = ["first", "first", "second"]
BYTES = 1 << 19


def measured(on_progress: OnProgress, breakage: str) -> NetworkTimes:
    right = dist.broadcast

    def stale(tensor: Any, **settings: Any) -> None:
        """The last rank keeps what it had in the last element."""
        kept = tensor[-1, -1].clone()
        right(tensor, **settings)
        if dist.get_rank() == 2:
            tensor[-1, -1] = kept

    if breakage == "stale weights":
        vars(dist)["broadcast"] = stale
    if breakage == "a rank left out":
        group = dist.new_group([0, 1])
        network._all_reduce = lambda tensor: dist.all_reduce(tensor, group=group) if dist.get_rank() < 2 else None
    return measure(NODES, BYTES, BYTES)


def found(breakage: str) -> list[Measurement]:
    return list(measurements(run_ranks(3, measured, breakage), NODES, 10**9, None))


def test_a_sound_network() -> None:
    sums, latency, reduced, weights, sent = found("")
    assert (sums.value, weights.value) == (0, 0)
    assert all(finding.ok for finding in (sums, latency, reduced, weights, sent))
    assert sums.what == "all-reduce, 3 ranks on 2 nodes: elements that are not the sum"
    assert all((finding.value or 0) > 0 for finding in (latency, reduced, sent))


@pytest.mark.parametrize(("breakage", "red"), [("stale weights", "weights from"), ("a rank left out", "all-reduce, 3")])
def test_what_is_lost_on_the_way(breakage: str, red: str) -> None:
    (wrong,) = [finding for finding in found(breakage) if not finding.ok]
    assert wrong.what.startswith(red)
    assert "dmesg" in wrong.remedy


def test_a_network_that_is_too_slow_for_its_plan() -> None:
    """Three quarters of 2 GB cross the border of a node twice in a second: 3 GB/s of 50."""
    times = NetworkTimes(0, 1e-5, 2 * 10**9, 1.0, 0, 10**9, 0.5)
    slow = list(measurements([times] * 4, ["a", "a", "b", "b"], 10**9, 50e9))[2]
    assert (slow.ok, slow.found, slow.limit) == (False, "3 GB/s", ">= 5 GB/s")
    assert (slow.assumption, slow.value) == ("link", 3e9)
    fast = list(measurements([replace(times, reduce_seconds=0.1)] * 4, ["a", "a", "b", "b"], 10**9, 50e9))[2]
    assert fast.ok
    inside = list(measurements([times] * 2, ["a", "a"], 10**9, 50e9))[2]
    assert (inside.ok, inside.assumption) == (True, ""), "NVLink, of which this says nothing"


def test_nodes_that_differ() -> None:
    told = {
        "a": {"software": {"torch": "2.9.1", "NCCL": "2.27.5"}, "gpus": ["H100"], "seen": "token"},
        "b": {"software": {"torch": "2.9.0", "NCCL": "2.27.5", "apex": "0.1"}, "gpus": ["A100"], "seen": "token"},
        "c": {
            "software": {"torch": "2.9.1", "NCCL": "2.27.5"},
            "gpus": ["H100"],
            "seen": f"{UNREADABLE}: No such file",
        },
        "d": {"software": {"torch": "2.9.1"}, "gpus": ["H100"], "seen": "older"},
    }
    rows = [(row.what, row.found, row.limit, row.ok) for row in differences(told, "token", Path("runs/x"))]
    assert rows == [
        ("torch on b", "2.9.0", "2.9.1", False),
        ("apex on b", "0.1", "missing", False),
        ("GPUs on b", "A100", "", True),
        ("runs/x on c", "unreadable: No such file", "shared", False),
        ("NCCL on d", "missing", "2.27.5", False),
        ("runs/x on d", "another folder", "shared", False),
        ("nodes", "a, b, c, d", "", True),
    ]


def test_what_failed_on_a_node() -> None:
    limited = {"what": "queries", "ok": False, "found": "1", "limit": "<= 0", "remedy": "mend it"}
    sound = {"what": "keys", "ok": True, "found": "0", "limit": "<= 0", "remedy": ""}
    value = {
        "ok": False,
        "verdict": "0 passed; 1 failed: rope; 1 skipped: tools",
        "checks": [
            {"check": "rope", "verdict": "failed", "message": "", "seconds": 2, "measurements": [limited, sound]},
            {"check": "tools", "verdict": "skipped", "message": "no tools", "seconds": 1, "measurements": []},
        ],
    }
    line = summary(Node("1", "10.0.0.7"), value)
    assert (line.check, line.verdict, line.seconds, line.remedies) == ("10.0.0.7", "failed", 3, ["mend it"])
    assert [(finding.what, finding.found) for finding in line.measurements] == [
        ("checks", "0 passed; 1 failed: rope; 1 skipped: tools"),
        ("rope: queries", "1"),
        ("tools: no tools", "skipped"),
    ]
    lost = summary(Node("1", "10.0.0.7"), {"error": "verify ended with -9: Killed; see a.log"})
    assert (lost.verdict, lost.message) == ("failed", "verify ended with -9: Killed; see a.log")


def test_an_option_is_no_value_of_another_one() -> None:
    words = ["launch/verify.sh", "configs/quickstart.yaml", "--out", "--only", "rope"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--out has no value" in done.stderr


def verify_hosts(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *("launch/verify.sh", "--hosts", "-127.0.0.1,127.0.0.2", "configs/quickstart.yaml", "--out", str(folder)),
            *("--device", "cpu", "--quick", "cluster.nodes=2", "cluster.gpus=2", *words),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "REMOTE_SHELL": str(executable(folder.parent / "remote-shell", REMOTE_SHELL)),
            "NUM_GPUS": "2",
            "NUM_CPUS": "4",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_two_hosts(tmp_path: Path) -> None:
    done = verify_hosts(tmp_path / "sound", "--only", "attention,rope")
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads((tmp_path / "sound" / "verify.json").read_text())
    *together, head, other = [check["check"] for check in value["checks"]]
    assert (together, other) == (["nodes", "network"], "127.0.0.2")  # Ray gives the head another address of its machine
    assert "4 ranks on 2 nodes" in value["checks"][1]["measurements"][0]["what"]
    assert "4 passed" in (tmp_path / "sound" / "verify.html").read_text()
    for host in (head, other):
        own = json.loads((tmp_path / "sound" / f"{host}.json").read_text())
        assert [check["check"] for check in own["checks"]] == ["attention", "rope"]
        assert (tmp_path / "sound" / f"{host}.html").is_file()

    done = verify_hosts(tmp_path / "broken", "--only", "rope", f"model={tmp_path / 'no-model'}")
    assert done.returncode == 1
    assert "there is no folder" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "-a,b", "configs/quickstart.yaml"], "2 hosts for a configuration of 1 nodes"),
        (["configs/quickstart.yaml", "cluster.nodes=2"], "name them with --hosts, or verify one with cluster.nodes=1"),
        (["--hosts", "-a b", "configs/quickstart.yaml"], "is not a host name"),
        (["--hosts"], "--hosts has no value"),
        (["configs/quickstart.yaml", "--dry-run"], "there is no option --dry-run"),
        (["configs/quickstart.yaml", "--only"], "--only has no value"),
    ],
)
def test_what_cannot_be_verified(words: list[str], message: str) -> None:
    done = subprocess.run(["launch/verify.sh", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
