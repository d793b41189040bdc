from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slime_plugin.record import Record, parse_record

ROOT = Path(__file__).parent.parent

# Before a test imports torch, and for the ranks it starts: several processes share the cores, and threads that spin
# while they wait for each other make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.pop("COLUMNS", None)  # xdist tells its workers; commands that are tested write to no terminal

# Machines differ in speed; a slow example is not a wrong one. Deeper searches: pytest --hypothesis-profile=deep
settings.register_profile("default", deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=20_000)
settings.load_profile("default")


def example(name: str) -> Record:
    return parse_record((ROOT / "examples" / "records" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def running() -> Record:
    """The paper's running example."""
    return example("running_example")


@pytest.fixture
def weather() -> Record:
    """The paper's weather lookup."""
    return example("weather")


@pytest.fixture
def memex() -> Record:
    """Offload, retrieve elsewhere, restore."""
    return example("offload_and_restore")
