"""Tool calls of an iteration, and the limit above which its rollouts are not trained: they are full of error messages.

An expired key or a service that is down looks like any other result to the policy, and like a bad policy in the reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_plugin.record import Record
from slime_plugin.rollout.tools.tool import TOOL_FAILURES

MIN_FAILURES = 8
"""Fewer are no reason to stop, whatever their share."""
_REMEDIES = {
    "key": "check the API key and the credit of its account",
    "rate limit": "lower the tool's rate, or rollout.concurrency",
    "unavailable": "the log of the rollouts has what the service answered",
    "timeout": "raise rollout.tool_seconds or the tool's timeout, or lower rollout.concurrency",
    "crashed": "the tool raised an exception, which is in the log of the rollouts",
}


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """What became of the tool calls of some rollouts. Agents that are programs call tools of their own."""

    calls: int
    errors: Mapping[str, int]
    """By kind."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> ToolCalls:
        calls, errors = 0, Counter[str]()
        for record in records:
            report = record.meta.report
            calls += report.calls or 0
            errors.update(report.error_kinds)
        return cls(calls, errors)

    @property
    def failures(self) -> Mapping[str, int]:
        """Errors that the policy did not cause, by kind."""
        return {kind: number for kind, number in self.errors.items() if kind in TOOL_FAILURES}

    @property
    def failed_share(self) -> float | None:
        """Share of failures among the calls that could be executed; None if there were none."""
        failed = sum(self.failures.values())
        executed = self.calls - sum(self.errors.values()) + failed
        return failed / executed if executed else None

    def to_json(self) -> dict[str, Any]:
        return {"calls": self.calls, "call_errors": dict(self.errors), "tool_failures": self.failed_share}

    def problem(self, limit: float) -> str | None:
        """Why the rollouts should not be trained; None if they may be."""
        failed, share = sum(self.failures.values()), self.failed_share
        if share is None or share <= limit or failed < MIN_FAILURES:
            return None
        kinds = sorted(self.failures.items(), key=lambda item: -item[1])
        found = ", ".join(f"{kind} {number}" for kind, number in kinds)
        return (
            f"{failed} of {round(failed / share)} tool calls failed for no fault of the policy ({found}): {share:.0%}, "
            f"over rollout.max_tool_failures {limit:g}; {_REMEDIES[kinds[0][0]]}, then resume"
        )
