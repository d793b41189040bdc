"""slime and Megatron-LM from source, where ``SLIME_SRC`` and ``MEGATRON_SRC`` say they are.

Neither is on PyPI, and neither is part of this project. With their sources at hand, and what slime imports
(``requirements.slime``), the tests of this folder run through slime's own parser, rollout loop, batches, losses and
schedules, on a CPU::

    SLIME_SRC=~/slime MEGATRON_SRC=~/Megatron-LM launch/test_slime.sh
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLES = ("SLIME_SRC", "MEGATRON_SRC")
AT_HAND = all(os.environ.get(name) for name in VARIABLES)
needs_slime = [
    pytest.mark.skipif(
        not AT_HAND, reason=f"{' and '.join(VARIABLES)} do not name the sources of slime and Megatron-LM"
    ),
    pytest.mark.filterwarnings("ignore"),  # theirs: no GPU, no Transformer Engine, no Apex
]
"""Marks of a test that runs through slime's own code."""


@functools.cache
def slime_imports() -> None:
    """Make ``import slime`` and ``import megatron.training`` work in this process, before anybody imports Megatron."""
    for name in VARIABLES:
        folder = str(Path(os.environ[name]).resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the launch scripts do; Megatron asks
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on loopback only
    from slime_plugin.rollout.server.sglang_on_cpu import install_stubs

    install_stubs()
    import torch

    if not torch.cuda.is_available():
        from megatron.training import arguments

        arguments.get_device_arch_version = lambda: 9  # Megatron's parser asks the GPU; a Hopper would say this


def versions() -> dict[str, str]:
    """Commits of the sources, and the version of the SGLang whose flags slime takes over."""
    from importlib.metadata import version

    commits = {
        name: subprocess.run(
            ["git", "-C", os.environ[variable], "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name, variable in zip(("slime", "Megatron-LM"), VARIABLES, strict=True)
    }
    return {**commits, "SGLang": version("sglang"), "sglang-router": version("sglang-router")}
