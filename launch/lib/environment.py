"""What slime, Megatron and NCCL expect to find in the environment, on every node of a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
"""The project's folder."""
PASSED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SLIME_DIR", "MEGATRON_DIR", "NUM_GPUS", "JOIN_TIMEOUT")
"""Variables that every node gets as they are where the job was started."""
FAMILIES = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "NVTE_", "SGLANG_", "RAY_", "HF_", "WANDB_")
"""So do all whose names begin like this."""
NOT_PASSED = ("RAY_ADDRESS", "RAY_TMPDIR")
"""Of another cluster, and of another machine."""


def passed(keys: list[str]) -> dict[str, str]:
    """What the nodes get: the above, the keys that a configuration names, and what ``PASS_ENV`` names."""
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
    """What is set on each node; a variable that is set already keeps its value where it is a matter of choice."""
    return {
        "PYTHONPATH": os.pathsep.join(import_paths()),
        "PYTHONUNBUFFERED": "1",
        # A node that is told to end ends: nothing on it is to be moved to another one before.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Megatron overlaps communication with computing by the order in which kernels are launched.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # NVLink SHARP hangs where there is no NVLink.
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE") or str(int(_has_nvlink())),
    }


def _has_nvlink() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return re.search(r"\bNV\d+\b", shown.stdout) is not None
