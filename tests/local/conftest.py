from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.runs import Runs, record_rollouts
from tests.train.conftest import deep, truth

__all__ = ["deep", "truth"]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run"
    record_rollouts(path, 4)
    return path


@pytest.fixture
def runs(tmp_path: Path, recorded: Path) -> Iterator[Runs]:
    """Training runs on recorded rollouts."""
    runs = Runs(tmp_path, recorded)
    yield runs
    runs.clear()


@pytest.fixture
def real_runs(tmp_path: Path) -> Iterator[Runs]:
    """Training runs with an engine."""
    runs = Runs(tmp_path, None)
    yield runs
    runs.clear()
