from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.rollout.server import Flags, Server
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ROOT / "examples" / "small_world" / "model"


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    """A real SGLang server with that model."""
    with Server(Flags(model_folder, "cpu", max_total_tokens=16384)) as server:
        yield server


@pytest.fixture(scope="session")
def policy(model_folder: Path) -> Any:
    """The same model in transformers, in float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train(False)
