"""The checks by name, and how they are run: one after the other, whatever becomes of the others.

A check is a function ``check(verification)`` in the module of its name, which yields measurements. Modules are imported
when their check runs: what one of them cannot import is its own failure. Needs no torch.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.verify.measurement import CheckResult, Measurement, SkippedError, Verdict
from slime_plugin.verify.settings import Verification

CHECKS = {
    "resources": "versions, memory, limits and keys of this machine",
    "tools": "one real call of each tool",
    "attention": "attention of a tree against dense float64, and of a chain against the stock call",
    "rope": "positions as the model applies them against float64",
    "head": "log-probabilities, SDCC's KL and their gradients on the cell's ranks against float64",
    "model": "mask4d against logittree on the cell's ranks: log-probabilities, loss, gradient",
    "sleep": "the same log-probabilities after memory was given away and taken back, twice",
    "longest_row": "an update on the longest row that the cell allows: finite, within the planned memory",
    "engine": "rollouts of a real engine, scored by its weights, before and after it gets others",
    "training": "a small run that is killed and resumed: ratios, reference KL, numbering, learning rate",
    "speed": "updates of every method, memory and waiting, beside what a plan assumes",
}
"""In the order in which they run."""
UNEXPECTED = "not foreseen: the JSON output has the traceback; memorywalker doctor looks at the packages"


def run_checks(
    verification: Verification, names: Sequence[str], begin: Callable[[str], None] = lambda name: None
) -> Iterator[CheckResult]:
    """Yield the result of each check as it ends. ``begin`` is called with the name of each as it starts."""
    for name in names:
        begin(name)
        yield run_check(name, verification)


def run_check(name: str, verification: Verification) -> CheckResult:
    started = time.perf_counter()
    found: list[Measurement] = []

    def result(verdict: Verdict, **what: Any) -> CheckResult:
        return CheckResult(name, verdict, time.perf_counter() - started, tuple(found), **what)

    try:
        found.extend(importlib.import_module(f"slime_plugin.verify.{name}").check(verification))
    except SkippedError as why:
        return result("skipped", message=str(why))
    except MemoryWalkerError as error:
        message, _, remedy = str(error).rpartition("; ")
        return result("failed", message=message or remedy, remedy=remedy if message else "")
    except Exception as error:  # noqa: BLE001  # the one boundary: the other checks still run
        last = next(line for line in reversed([type(error).__name__, *str(error).splitlines()]) if line.strip())
        return result("failed", message=last.strip(), remedy=UNEXPECTED, traceback=traceback.format_exc())
    return result("passed" if all(finding.ok for finding in found) else "failed")
