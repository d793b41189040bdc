"""A symptom: what is wrong, or strange, about a run, with its most likely cause and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["error", "warning", "info"]
"""The run ended because of it, or learns nothing; it is not as it should be; it is good to know and may be intended."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

CAUSE, SIGN, CONSEQUENCE = 0, 1, 2
"""Ranks. An error that others follow from; one that may be either; one that follows from others."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding of :func:`slime_plugin.diagnosis.diagnose`."""

    name: str
    severity: Severity
    seen: str
    """What was found, with its numbers."""
    cause: str
    """The most likely one."""
    remedy: str
    where: str = ""
    """The file, with the line of a log."""
    rank: int = SIGN
    """Among symptoms of the same severity, lower is more likely the cause of the others."""


def is_alarming(symptoms: Iterable[Symptom]) -> bool:
    return any(symptom.severity != "info" for symptom in symptoms)


def by_likelihood(symptoms: Iterable[Symptom]) -> list[Symptom]:
    """Sort by severity, then by rank; otherwise the order stays."""
    return sorted(symptoms, key=lambda symptom: (SEVERITIES.index(symptom.severity), symptom.rank))
