"""What a check finds: numbers with their limits, and facts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slime_plugin.report.formatting import format_number

Verdict = Literal["passed", "failed", "skipped"]
"""``skipped``: it cannot run here, and nothing is known."""


class SkippedError(Exception):
    """Raised by a check that cannot run here; its message says why."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One finding of a check."""

    what: str
    ok: bool
    found: str
    limit: str = ""
    """Empty for a number that is only reported, and for a fact."""
    remedy: str = ""
    """What to do if it is not ok; for what is ok, something to know."""
    value: float | None = None
    """The number itself; None for a fact, and for what is not finite."""
    assumption: str = ""
    """Key of ``memorywalker plan --assume`` whose number ``value`` is; empty if a plan assumes nothing like it."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Others that belong to it, by name, for programs."""

    @classmethod
    def at_most(cls, what: str, value: float, limit: float, remedy: str, unit: str = "") -> Measurement:
        """Return a number that has a limit. One that is not a number is over it."""
        return cls._limited(what, value, value <= limit, f"<= {_shown(limit, unit)}", remedy, unit)

    @classmethod
    def at_least(cls, what: str, value: float, limit: float, remedy: str, unit: str = "") -> Measurement:
        return cls._limited(what, value, value >= limit, f">= {_shown(limit, unit)}", remedy, unit)

    @classmethod
    def beside_plan(
        cls, what: str, value: float, assumed: float | None, unit: str, per_unit: float = 1.0, assumption: str = ""
    ) -> Measurement:
        """Return a number beside that of ``memorywalker plan``, if it has one; ``unit`` has ``per_unit`` of them."""
        limit = "" if assumed is None else f"plan: {_shown(assumed / per_unit, unit)}"
        return cls(what, True, _shown(value / per_unit, unit), limit, value=value, assumption=assumption)

    @classmethod
    def _limited(cls, what: str, value: float, ok: bool, limit: str, remedy: str, unit: str) -> Measurement:
        finite = value if math.isfinite(value) else None  # JSON has no others
        return cls(what, ok, _shown(value, unit), limit, "" if ok else remedy, finite)


def worst(values: Iterable[float]) -> float:
    """Return the largest; one that is not a number is worse than any that is. 0 if there are none."""
    return max(values, key=lambda value: (math.isnan(value), value), default=0.0)


def _shown(value: float, unit: str) -> str:
    return f"{format_number(value)} {unit}".rstrip()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the verification, with the measurements below it."""

    check: str
    verdict: Verdict
    seconds: float
    measurements: tuple[Measurement, ...] = ()
    message: str = ""
    """Why it was skipped, or what it was ended by."""
    remedy: str = ""
    """What to do about the message."""
    traceback: str = field(default="", repr=False)

    @property
    def remedies(self) -> list[str]:
        """Return what to do, each once."""
        failed = [finding.remedy for finding in self.measurements if not finding.ok]
        return list(dict.fromkeys(text for text in (*failed, self.remedy) if text))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "remedies": self.remedies}
