"""Symptoms from the logs of a run, and from the error that its last start ended with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from slime_plugin.diagnosis.log_patterns import HARMLESS, LOG_PATTERNS, LogPattern, needles, pattern_of
from slime_plugin.diagnosis.log_text import LogPart
from slime_plugin.diagnosis.run_contents import RunContents
from slime_plugin.diagnosis.symptom import SIGN, Severity, Symptom

MOST_LINES = 10_000
"""Lines of one log and one text that are looked at: a program may repeat an error forever."""
_EXCEPTION = re.compile(r"(?:^|\s|\))((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): ?(\S.*)$")


@dataclass(slots=True)
class _Found:
    """The lines that match one pattern."""

    pattern: LogPattern
    line: str
    """The first of them."""
    place: str
    number: int = 1


def log_symptoms(run: RunContents) -> Iterator[Symptom]:
    """What a run that has reached its end has logged on the way is good to know, and no more."""
    found = _search(run.logs)
    if run.error is not None:
        pattern = pattern_of(run.error_place, run.error)
        if pattern is not None and pattern.name not in found:
            found[pattern.name] = _Found(pattern, run.error, run.error_place)
    order = [pattern.name for pattern in LOG_PATTERNS]
    for name in sorted(found, key=order.index):
        yield _symptom(run, found[name])
    known = any(hit.pattern.severity != "info" for hit in found.values())
    if not known and not run.is_done and not run.is_running:
        yield from _unknown(run)


def _search(logs: Iterable[LogPart]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for log in logs:
        lines = {at: line for needle in needles() for at, line in islice(log.lines_with(needle), MOST_LINES)}
        for at in sorted(lines):
            pattern = pattern_of(log.name, lines[at])
            if pattern is None:
                continue
            if pattern.name in found:
                found[pattern.name].number += 1
            else:
                found[pattern.name] = _Found(pattern, lines[at], log.place(at))
    return found


def _symptom(run: RunContents, found: _Found) -> Symptom:
    pattern, over = found.pattern, run.is_done
    times = f" ({found.number} lines like it)" if found.number > 1 else ""
    return Symptom(
        pattern.name,
        "info" if over else pattern.severity,
        f"{run.shown(found.line)}{times}",
        f"{pattern.cause}{'; the run has gone on after it' if over else ''}",
        pattern.remedy,
        found.place,
        pattern.rank,
    )


def _unknown(run: RunContents) -> Iterator[Symptom]:
    """The error that the run ended with, or the last exception in its logs, if no pattern knows it."""
    if run.error is not None:
        yield _unknown_error("error", run.shown(run.error.splitlines()[0]), run.error_place)
        return
    for log in run.logs:
        found = {
            at: line
            for needle in ("Error: ", "Exception: ")
            for at, line in islice(log.lines_with(needle), MOST_LINES)
            if _EXCEPTION.search(line) and not HARMLESS.search(line)
        }
        if found:
            yield _unknown_error("warning", run.shown(found[max(found)]), log.place(max(found)))
            return


def _unknown_error(severity: Severity, seen: str, place: str) -> Symptom:
    return Symptom(
        "an error",
        severity,
        seen,
        "an error that no pattern knows; the run has not gone on after it",
        "read what is before it; if it is a bug, attach what memorywalker doctor RUN --bundle writes to a report",
        place,
        SIGN,
    )
