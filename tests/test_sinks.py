"""Metrics: what was written is there, whatever happens to the writer; event files say the same."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.config.tracking import Tracking, Wandb
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.metrics import Metrics, truncate_metrics

QUIET = Tracking(tensorboard=False)
LINES: list[dict[str, Any]] = [
    {"kind": "step", "iteration": 0, "step": 0, "time": 100.5, "loss": 0.25, "leaf_kl": None, "sdcc_off": None},
    {"kind": "step", "iteration": 0, "step": 1, "time": 101.5, "loss": -0.5, "leaf_kl": 2.0, "sdcc_off": "why"},
    {
        "kind": "iteration",
        "iteration": 0,
        "time": 102.5,
        "reward": 0.75,
        "rollouts": 64,
        "seconds": {"generate": 2.5, "train": 1.0},
        "lost": {"evicted by fold": 12},
        "places": {"fold/near": {"tokens": 3, "logdiff": 0.5}},
    },
    {"kind": "step", "iteration": 1, "step": 2, "time": 103.5, "loss": 1.0},
]


def written(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]


def test_every_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    with Metrics(folder, QUIET, {}) as metrics:
        for number, line in enumerate(LINES, start=1):
            metrics.write(line)
            assert written(folder) == LINES[:number], "without waiting for close"
    assert list(folder.read_metrics()) == LINES


def test_a_writer_that_was_killed_costs_no_line(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from slime_plugin.run.metrics import Metrics; from slime_plugin.run.folder import RunFolder\n"
        "from slime_plugin.config.tracking import Tracking\n"
        "metrics = Metrics(RunFolder(Path(sys.argv[1])), Tracking(tensorboard=False), {})\n"
        "for i in range(50): metrics.write({'kind': 'step', 'iteration': 0, 'step': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in written(RunFolder(tmp_path))] == list(range(50))


@pytest.mark.parametrize("length", [0, 20, 10_000])
def test_a_line_that_was_cut_short_does_not_swallow_the_next(tmp_path: Path, length: int) -> None:
    folder = RunFolder(tmp_path)
    with Metrics(folder, QUIET, {}) as metrics:
        metrics.write(LINES[0])
    with open(folder.metrics, "ab") as file:
        file.write(b'{"kind": "' + b"x" * length)
    with Metrics(folder, QUIET, {}) as metrics:
        metrics.write(LINES[1])
    assert written(folder) == LINES[:2]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with Metrics(RunFolder(tmp_path), QUIET, {}) as metrics:
        metrics.write({"kind": "step", "iteration": 0, "step": 0, "loss": math.nan, "in": {"deep": [math.inf, 1.5]}})
    assert written(RunFolder(tmp_path)) == [
        {"kind": "step", "iteration": 0, "step": 0, "loss": None, "in": {"deep": [None, 1.5]}}
    ]


def test_resuming_keeps_the_lines_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    truncate_metrics(folder, 3)
    assert not folder.metrics.exists(), "nothing to keep"
    with Metrics(folder, QUIET, {}) as metrics:
        for line in LINES:
            metrics.write(line)
    before = folder.metrics.read_bytes()
    with open(folder.metrics, "ab") as file:
        file.write(b'{"kind": "st')
    truncate_metrics(folder, 2)
    assert folder.metrics.read_bytes() == before, "whole lines as they were"
    truncate_metrics(folder, 1)
    assert written(folder) == LINES[:3]
    truncate_metrics(folder, 0)
    assert folder.metrics.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_one_clear_line_and_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    folder = RunFolder(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    metrics = Metrics(folder, QUIET, {})
    try:
        metrics.write(LINES[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (folder.metrics.stat().st_size + 10, hard))
        with pytest.raises(
            MemoryWalkerError, match=r"metrics\.jsonl: cannot be written: File too large; free some space"
        ):
            metrics.write(LINES[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    metrics.write(LINES[2])
    metrics.close()
    assert written(folder) == [LINES[0], LINES[2]]


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MemoryWalkerError, match="cannot be written"):
        Metrics(RunFolder(tmp_path / "file"), QUIET, {})


def events(folder: Path) -> Iterator[Any]:
    """The records of event files, unpacked by hand: u64 length, u32 check sum, the event, u32 check sum."""
    event = importlib.import_module("tensorboardX.proto.event_pb2").Event
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            (check,) = struct.unpack_from("<I", data, at + 12 + size)
            body = data[at + 12 : at + 12 + size]
            assert check == masked_crc32c(body)
            yield event.FromString(body)
            at += 16 + size
        assert at == len(data)


def masked_crc32c(data: bytes) -> int:
    """Bit by bit, as the definition has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def scalars(folder: Path) -> list[tuple[str, int, float, float]]:
    return [
        (value.tag, event.step, event.wall_time, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
    ]


def test_event_files_say_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    folder = RunFolder(tmp_path)
    with Metrics(folder, Tracking(), {}) as metrics:
        for line in LINES:
            metrics.write(line)
    assert scalars(folder.tensorboard / "steps") == [
        ("step/loss", 0, 100.5, 0.25),
        ("step/loss", 1, 101.5, -0.5),
        ("step/leaf_kl", 1, 101.5, 2.0),
        ("step/loss", 2, 103.5, 1.0),
    ]
    assert scalars(folder.tensorboard / "iterations") == [
        ("iteration/reward", 0, 102.5, 0.75),
        ("iteration/rollouts", 0, 102.5, 64.0),
        ("seconds/generate", 0, 102.5, 2.5),
        ("seconds/train", 0, 102.5, 1.0),
        ("lost/evicted_by_fold", 0, 102.5, 12.0),
        ("places/fold/near/tokens", 0, 102.5, 3.0),
        ("places/fold/near/logdiff", 0, 102.5, 0.5),
    ]


def test_a_resumed_run_hides_what_it_writes_anew(tmp_path: Path) -> None:
    """TensorBoard drops what stands at or after the step of a session that starts."""
    pytest.importorskip("tensorboardX")
    folder = RunFolder(tmp_path)
    with Metrics(folder, Tracking(), {}) as metrics:
        for line in LINES:
            metrics.write(line)
    truncate_metrics(folder, 1)
    with Metrics(folder, Tracking(), {}) as metrics:
        metrics.write(LINES[3] | {"loss": 3.0})
    starts = [event.step for event in events(folder.tensorboard / "steps") if event.HasField("session_log")]
    assert starts == [0, 2]
    assert [value for _, at, _, value in scalars(folder.tensorboard / "steps") if at == 2] == [1.0, 3.0]
    assert len(list((folder.tensorboard / "steps").iterdir())) == 2


@pytest.mark.parametrize(
    ("package", "tracking", "remedy"),
    [
        ("tensorboardX", Tracking(), r"pip install 'memorywalker\[train\]', or set tracking\.tensorboard=false"),
        ("wandb", Tracking(tensorboard=False, wandb=Wandb(mode="offline")), "pip install wandb"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, tracking: Tracking, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what importing it then does is what it does where it is missing
    with pytest.raises(ConfigError, match=remedy):
        Metrics(RunFolder(tmp_path), tracking, {})


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    monkeypatch.setitem(os.environ, "WANDB_SILENT", "true")
    folder = RunFolder(tmp_path / "fold")
    tracking = Tracking(tensorboard=False, wandb=Wandb(mode="offline"))
    with Metrics(folder, tracking, {"method": {"type": "mask4d"}}) as metrics:
        for line in LINES:
            metrics.write(line)
    (file,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    for word in (b"step/loss", b"iteration/reward", b"seconds/generate", b"mask4d", b"axis/step"):
        assert word in data
    assert (folder.path / "wandb" / "memorywalker-id").read_bytes() in data
    assert written(folder) == LINES
