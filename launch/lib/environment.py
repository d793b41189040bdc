"""The environment of slime, Megatron and NCCL on every node of a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
"""The project's folder."""
PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SLIME_DIR", "MEGATRON_DIR", "NUM_GPUS", "JOIN_TIMEOUT")
"""Variables that every node inherits from where the job was started."""
FAMILIES = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "NVTE_", "SGLANG_", "RAY_", "HF_", "WANDB_")
"""Prefixes of further variables that it inherits."""
NOT_PASSED = ("RAY_ADDRESS", "RAY_TMPDIR")
"""Of another cluster, and of another machine."""


def passed(keys: list[str]) -> dict[str, str]:
    """Return the variables that nodes inherit: the above, the keys that a configuration names, and ``PASS_ENV``."""
    names = {*PASSED, *keys, *os.environ.get("PASS_ENV", "").replace(",", " ").split()}
    return {
        name: value
        for name, value in os.environ.items()
        if (name in names or name.startswith(FAMILIES)) and name not in NOT_PASSED
    }


def import_paths() -> list[str]:
    """This project, Megatron-LM, which is not installed as a package, and slime."""
    named = [os.environ.get(name, "") for name in ("MEGATRON_DIR", "SLIME_DIR", "PYTHONPATH")]
    return list(dict.fromkeys(path for text in (str(ROOT), *named) for path in text.split(os.pathsep) if path))


def expected() -> dict[str, str]:
    """Return the variables to set on each node; those that are a matter of choice keep a value that is set."""
    return {
        "PYTHONPATH": os.pathsep.join(import_paths()),
        "PYTHONUNBUFFERED": "1",
        # A node ends at once: nothing on it is to be moved to another one.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Megatron relies on the order of kernel launches to overlap communication and compute.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # NVLink SHARP hangs where there is no NVLink.
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE") or str(int(_has_nvlink())),
    }


def _has_nvlink() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return re.search(r"\bNV\d+\b", shown.stdout) is not None
