"""What every start of a run writes down about itself: ``evidence/start-00000.json``, and one more for each resume.

::

    {"version": 1, "time": "2026-11-19T06:13:09+00:00", "command": [...], "host": ..., "python": ..., "packages": {...},
     "sources": {...}, "cpus": 8, "memory_bytes": ..., "gpus": [...], "environment": {...}, "log_bytes": {...},
     "verification": {"path": "runs/verify-NAME/verify.json", "time": ..., "ok": true, "verdict": "12 passed"},
     "end": {"time": ..., "how": "finished" | "interrupted" | "failed", "error": ..., "is_bug": false}}

``end`` is missing while the run is going, and for good if it was killed. ``log_bytes`` are the sizes of the logs before
the start, so that what an earlier start has logged can be told from its own. ``verification`` is what
``launch/verify.sh`` has written beside the folder of the run; None if nothing is there. No secret is ever written: the
value of a variable that may hold one is ``set``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from slime_plugin import __version__
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.files import write_atomically
from slime_plugin.run.redaction import (
    SET,
    is_secret_variable,
    key_variables,
    redact_text,
    redact_words,
    secret_values,
)
from slime_plugin.run.supervisor import STOP_SIGNALS

FOLDER = "evidence"
PACKAGES = (
    *("torch", "megatron-core", "sglang", "sglang-router", "ray", "flash-attn", "transformer-engine", "triton"),
    *("transformers", "tokenizers", "safetensors", "numpy", "pydantic"),
)
"""Distributions whose versions decide what a run does."""
VARIABLES = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "SLIME_DIR", "MEGATRON_DIR", "NUM_GPUS"),
    *("NUM_CPUS", "JOIN_TIMEOUT", "OMP_NUM_THREADS", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
FAMILIES = (
    *("NCCL_", "GLOO_", "UCX_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "TRITON_", "NVTE_", "MEGATRON_"),
    *("FLASHINFER_", "SGLANG_", "SLIME_", "RAY_", "HF_", "WANDB_", "SLURM_JOB", "SLURM_NNODES"),
)
"""Variables that are written down, by name and by prefix. No other one is."""
ERROR_CHARACTERS = 4000
"""Of an error, at most."""
PROGRAM_TIMEOUT_S = 10.0
STOPPED = (None, 0, signal.SIGTERM, *(128 + number for number in STOP_SIGNALS))
"""Exit codes of a process that was told to stop. Ray makes a driver exit with the number of SIGTERM."""

How = Literal["finished", "interrupted", "failed"]


@contextlib.contextmanager
def recorded_start(run: Path, cell: Mapping[str, Any], words: Sequence[str] | None = None) -> Iterator[None]:
    """Write the evidence of a start into the folder of a run, and when the block ends, how it ended.

    ``words`` are the command line. Evidence is not worth failing for: a folder that cannot be written is left alone.
    """
    path = _next_path(run / FOLDER)
    evidence = collect(run, cell, sys.argv if words is None else words)
    _write(path, evidence)

    def end(how: How, error: BaseException | None = None) -> None:
        text = "" if error is None else f"{type(error).__name__}: {error}"
        is_bug = not isinstance(error, MemoryWalkerError)
        shown = {} if error is None else {"error": _redacted(text, cell)[:ERROR_CHARACTERS], "is_bug": is_bug}
        _write(path, {**evidence, "end": {"time": _now(), "how": how, **shown}})

    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        failed = isinstance(stop, SystemExit) and stop.code not in STOPPED
        end("failed" if failed else "interrupted", stop if failed else None)
        raise
    except BaseException as error:
        end("failed", error)
        raise
    end("finished")


def collect(run: Path, cell: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the evidence of a start. Nothing heavy is imported."""
    keys = set(key_variables(cell))
    return {
        "version": 1,
        "time": _now(),
        "command": redact_words(words, secret_values(os.environ, keys)),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"memorywalker": __version__, **_versions()},
        "sources": dict(_sources()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": _free_bytes(run),
        "gpus": _gpus(),
        "environment": environment(os.environ, keys),
        "log_bytes": log_bytes(run),
        "verification": verification(run),
    }


def environment(variables: Mapping[str, str], keys: set[str]) -> dict[str, str]:
    """The variables that matter; of one that may hold a secret, only that it is set."""
    chosen = {
        name: value
        for name, value in variables.items()
        if name in keys or name.lower() in VARIABLES or name in VARIABLES or name.startswith(FAMILIES)
    }
    return {
        name: (SET if value else "") if is_secret_variable(name, keys) else redact_text(value)
        for name, value in sorted(chosen.items())
    }


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Return the evidence of all starts in order, without files that cannot be read."""
    starts = []
    for path in sorted((run / FOLDER).glob("start-*.json")):
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(value, dict):
                starts.append(value)
    return starts


def log_bytes(run: Path) -> dict[str, int]:
    """Return the sizes of the logs that later starts append to."""
    sizes = {}
    for path in sorted((run / "logs").glob("*.log")):
        with contextlib.suppress(OSError):
            sizes[path.name] = path.stat().st_size
    return sizes


def verification(run: Path) -> dict[str, Any] | None:
    """Return the verdict of the verification beside a run, ``verify-NAME``; None without one that can be read."""
    path = run.resolve().with_name(f"verify-{run.resolve().name}") / "verify.json"
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {"path": str(path), **{name: found.get(name) for name in ("time", "ok", "verdict")}}
    return None


def _next_path(folder: Path) -> Path:
    """The lock of a run admits one start at a time, so nobody else takes the same name."""
    numbers = [int(path.stem[6:]) for path in folder.glob("start-*.json") if path.stem[6:].isdecimal()]
    return folder / f"start-{max(numbers, default=-1) + 1:05d}.json"


def _write(path: Path, evidence: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(evidence, indent=1) + "\n")


def _redacted(text: str, cell: Mapping[str, Any]) -> str:
    return redact_text(text, secret_values(os.environ, set(key_variables(cell))))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _sources() -> Iterator[tuple[str, str]]:
    """Yield the commits of what is used from a git checkout."""
    folders = {"memorywalker": Path(__file__).parents[2]}
    for name, variable in (("slime", "SLIME_DIR"), ("megatron", "MEGATRON_DIR")):
        if named := os.environ.get(variable):
            folders[name] = Path(named)
        elif (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None:
            folders[name] = Path(spec.origin).parents[1]
    for name, folder in folders.items():
        if (folder / ".git").exists() and (commit := _output("git", "-C", str(folder), "rev-parse", "HEAD")):
            changed = "+" if _output("git", "-C", str(folder), "status", "--porcelain", "-uno") else ""
            yield name, f"{commit[:12]}{changed}"


def _gpus() -> list[str]:
    shown = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return shown.splitlines()


def _output(*command: str) -> str:
    """Return what a program prints; nothing if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
        return done.stdout.strip()
    return ""


def _free_bytes(run: Path) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(run).free
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
