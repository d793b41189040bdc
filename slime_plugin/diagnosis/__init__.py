"""What is wrong with a run, from its folder: ``memorywalker doctor RUN``.

A check is a function of :class:`RunContents` that yields symptoms, each with its numbers, its most likely cause and a
remedy. To add one, write it in one of the modules and list it in ``CHECKS``; what programs log has a table of its own
(:mod:`.log_patterns`). A check that finds nothing wrong yields nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_plugin.diagnosis import folder_symptoms, rollout_symptoms, training_symptoms
from slime_plugin.diagnosis.health import health_of
from slime_plugin.diagnosis.log_symptoms import log_symptoms
from slime_plugin.diagnosis.run_contents import RunContents
from slime_plugin.diagnosis.slime_lines import gpu_memory
from slime_plugin.diagnosis.symptom import CONSEQUENCE, Symptom, by_likelihood, is_alarming

CHECKS: tuple[Callable[[RunContents], Iterator[Symptom]], ...] = (
    training_symptoms.not_finite,
    log_symptoms,
    folder_symptoms.verification,
    folder_symptoms.checkpoints,
    rollout_symptoms.tool_failures,
    rollout_symptoms.no_logprobs,
    rollout_symptoms.weight_versions,
    rollout_symptoms.equal_rewards,
    rollout_symptoms.truncated,
    rollout_symptoms.excluded,
    rollout_symptoms.no_edits,
    rollout_symptoms.damaged_stores,
    training_symptoms.logdiff,
    training_symptoms.first_ratio,
    training_symptoms.first_reference_kl,
    training_symptoms.sdcc_off,
    training_symptoms.entropy_collapse,
    training_symptoms.no_gradient,
    folder_symptoms.unreadable_files,
    folder_symptoms.ended_early,
    folder_symptoms.still_running,
)
"""Symptoms that are equally likely are shown in this order."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The symptoms of a run, the most likely cause first."""

    run: RunContents
    symptoms: tuple[Symptom, ...]
    health: dict[str, Any]

    @property
    def ok(self) -> bool:
        return not is_alarming(self.symptoms)


def diagnose(path: Path) -> Diagnosis:
    """Read the folder of a local run or of a job under slime. Damaged files are symptoms, never errors."""
    run = RunContents.read(path)
    symptoms = by_likelihood(_without_consequences([symptom for check in CHECKS for symptom in check(run)]))
    health = health_of(run.lines)
    if run.kind == "job":
        health |= {"memory": gpu_memory(run.logs)}
    return Diagnosis(run, tuple(symptoms), health)


def _without_consequences(symptoms: list[Symptom]) -> Iterator[Symptom]:
    """What follows from an error is no alarm of its own."""
    has_cause = any(symptom.severity == "error" and symptom.rank < CONSEQUENCE for symptom in symptoms)
    for symptom in symptoms:
        yield replace(symptom, severity="info") if has_cause and symptom.rank == CONSEQUENCE else symptom


__all__ = ["CHECKS", "Diagnosis", "RunContents", "Symptom", "diagnose"]
