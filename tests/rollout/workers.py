"""Which worker runs what, for pytest -n auto -p tests.rollout.workers: tests that need the engine share one worker.

So one server serves them all: it takes 2 GB and a core. Tests that start training runs share one too. (xdist has a mark
for that, which pytest 9.2 hides from it.)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_FIXTURES = {
    "engine": r"\bserver: Server\b|\bmodel_folder: Path\b|\breal_runs: Runs\b",
    "ray": r"\bruns: Runs\b",  # what the first of them computes, the others compare with
}
_TESTS = Path(__file__).parent.parent
SCOPES = {
    f"tests/{path.relative_to(_TESTS)}": scope
    for scope, fixtures in _FIXTURES.items()
    for folder in ("rollout", "local")
    for path in (_TESTS / folder).glob("test_*.py")
    if re.search(fixtures, path.read_text(encoding="utf-8"))
}
"""Files with tests that ask for these fixtures."""


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # untyped
    def _split_scope(self, nodeid: str) -> str:
        """Tests of the same scope run on the same worker."""
        return SCOPES.get(nodeid.partition("::")[0], nodeid)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)
