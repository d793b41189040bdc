"""Which worker runs what, for pytest -n auto -p tests.bridge.workers: tests that need the engine share one worker.

So one server serves them all: it takes 2 GB and a core. (xdist has a mark for that, which pytest 9.2 hides from it.)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ENGINE = frozenset(
    f"tests/bridge/{path.name}"
    for path in Path(__file__).parent.glob("test_*.py")
    if re.search(r"\bserver: Server\b|\bmodel_folder: Path\b", path.read_text(encoding="utf-8"))
)
"""Files with tests that ask for the engine's fixtures."""


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # untyped
    def _split_scope(self, nodeid: str) -> str:
        """Tests of the same scope run on the same worker."""
        return "engine" if nodeid.partition("::")[0] in ENGINE else nodeid


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)
