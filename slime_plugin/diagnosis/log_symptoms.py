"""Symptoms from the logs of a run, and from the error that its last start ended with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from slime_plugin.diagnosis.log_patterns import HARMLESS, LOG_PATTERNS, LogPattern, needles, pattern_of
from slime_plugin.diagnosis.log_text import LogPart
from slime_plugin.diagnosis.run_contents import RunContents
from slime_plugin.diagnosis.symptom import CAUSE, SIGN, Symptom

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
    known = any(hit.pattern.severity != "info" for hit in found.values())
    last = None if run.error is None else pattern_of(run.error_place, run.error)
    if run.error is not None and last is not None:
        found.setdefault(last.name, _Found(last, run.error, run.error_place))
    elif run.error is not None:
        yield _unknown_error(run, run.error.splitlines()[0])
    elif not known and not run.is_done and not run.is_running:
        yield from _last_exception(run)
    order = [None if last is None else last.name, *(pattern.name for pattern in LOG_PATTERNS)]
    for name in sorted(found, key=order.index):
        yield _symptom(run, found[name])


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


def _unknown_error(run: RunContents, line: str) -> Symptom:
    """The error that the last start ended with, if no pattern knows it. This package's own say what to do."""
    if (run.end or {}).get("is_bug"):
        cause = "the last start ended with it; it is a bug, of this package or of code that the run uses"
        remedy = "read the traceback; memorywalker doctor RUN --bundle writes what a report of the bug needs"
    else:
        cause = "the last start ended with it"
        remedy = f"do what the line says; {run.resume}"
    return Symptom("an error", "error", run.shown(line), cause, remedy, run.error_place, CAUSE)


def _last_exception(run: RunContents) -> Iterator[Symptom]:
    """The last exception in the logs of a run that has left nothing else. Raylets log one whenever a job ends."""
    for log in run.logs:
        if "/raylet." in log.name:
            continue
        found = {
            at: line
            for needle in ("Error: ", "Exception: ")
            for at, line in islice(log.lines_with(needle), MOST_LINES)
            if _EXCEPTION.search(line) and not HARMLESS.search(line)
        }
        if found:
            cause = "an error that no pattern knows, and the run has not gone on after it"
            remedy = "read what is before it; memorywalker doctor RUN --bundle writes what a report of a bug needs"
            at = max(found)
            yield Symptom("an error", "warning", run.shown(found[at]), cause, remedy, log.place(at), SIGN)
            return
