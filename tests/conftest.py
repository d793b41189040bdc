from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slime_plugin.record import Record, parse_record

ROOT = Path(__file__).parent.parent

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
