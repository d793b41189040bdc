"""The environment of slime, Megatron and NCCL on every node of a job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
"""The project's folder."""
PASSED = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SLIME_DIR", "MEGATRON_DIR", "NUM_GPUS", "NUM_CPUS", "JOIN_TIMEOUT"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS"),
)
"""Variables that every node inherits from where the job was started."""
FAMILIES = (
    *("NCCL_", "GLOO_", "UCX_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "NVTE_", "MEGATRON_", "FLASHINFER_", "SGLANG_"),
    *("SLIME_", "RAY_", "HF_", "WANDB_"),
)
"""Prefixes of further variables that it inherits."""
NOT_PASSED = ("RAY_ADDRESS", "RAY_TMPDIR")
"""Of another cluster, and of another machine."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""The way to the outside, in lower or upper case. Tools of the rollouts need it."""


def passed(keys: list[str]) -> dict[str, str]:
    """Return the variables that nodes inherit: the above, the keys that a configuration names, and ``PASS_ENV``."""
    names = {*PASSED, *keys, *os.environ.get("PASS_ENV", "").replace(",", " ").split()}
    return {
        name: value
        for name, value in os.environ.items()
        if (name in names or name.startswith(FAMILIES) or name.lower() in (*PROXIES, "no_proxy"))
        and name not in NOT_PASSED
    }


def allocator(flags: list[str]) -> dict[str, str]:
    """Let PyTorch's allocator grow its segments while training, which wastes less where rows vary in length.

    Not for ranks that sleep while engines run on their GPUs: torch_memory_saver cannot release expandable segments.
    """
    sleeping = {"--colocate", "--offload", "--offload-train"} & set(flags)
    return {} if sleeping else {"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1"}


def import_paths() -> list[str]:
    """This project, Megatron-LM, which is not installed as a package, and slime."""
    named = [os.environ.get(name, "") for name in ("MEGATRON_DIR", "SLIME_DIR", "PYTHONPATH")]
    return list(dict.fromkeys(path for text in (str(ROOT), *named) for path in text.split(os.pathsep) if path))


def expected(hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables to set on each node of ``hosts``; a choice that is already made is kept."""
    return {
        **_direct(hosts),
        "PYTHONPATH": os.pathsep.join(import_paths()),
        "PYTHONUNBUFFERED": "1",
        # A node ends at once: nothing on it is to be moved to another one.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Megatron relies on the order of kernel launches to overlap communication and compute.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # NVLink SHARP hangs where there is no NVLink.
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE") or str(int(_has_nvlink())),
    }


def _direct(hosts: Iterable[str]) -> dict[str, str]:
    """Except the nodes of the job from proxies: requests to engines and Ray's own connections would be sent there."""
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        return {}
    excepted = [word for name in ("no_proxy", "NO_PROXY") for word in os.environ.get(name, "").split(",") if word]
    for host in ("localhost", "127.0.0.1", "::1", *hosts, socket.gethostname()):
        excepted.append(host)
        with contextlib.suppress(OSError):  # a name that only ssh knows
            excepted += [str(found[4][0]) for found in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)]
    joined = ",".join(dict.fromkeys(excepted))
    return {"no_proxy": joined, "NO_PROXY": joined}


def _has_nvlink() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return re.search(r"\bNV\d+\b", shown.stdout) is not None
