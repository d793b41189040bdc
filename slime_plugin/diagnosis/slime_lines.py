"""The metrics that slime prints into ``logs/driver.log``, as lines of ``metrics.jsonl`` (docs/training.md).

slime prints Python dictionaries, of updates by ``step 3: {'train/loss': 0.1, ...}`` and of iterations by
``perf 1: {'rollout/memorywalker/reward': 0.5, ...}``. They may hold ``nan`` and types of numpy, so that they are
searched for numbers instead of parsed. Sums over tokens are per rollout there, and become means over tokens here.

>>> printed = "(actor pid=7) model.py:918 - step 1: {'train/loss': nan, 'train/tokens': 4, 'train/logdiff': 2.0}"
>>> lines = slime_lines([printed], steps_per_iteration=2)
>>> [(line["kind"], line["iteration"], line["step"], line["loss"], line["logdiff"]) for line in lines]
[('step', 0, 1, None, 0.5)]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from slime_plugin.diagnosis.log_text import LogPart
from slime_plugin.slime.recording import PREFIX
from slime_plugin.tree.places import PLACES

Line = dict[str, Any]

NEEDLES = (": {'train/", ": {'rollout/", ": {'perf/")
_PRINTED = re.compile(r"(?:^|\s)(step|perf) (\d+): \{")
_NUMBER = re.compile(r"'([\w./@ :-]+)': (?:np\.\w+\(|tensor\()?(-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf|nan))\b")
_PER_TOKEN = ("logdiff", "signed_logdiff", "k3", "multiplicative_error")
_PER_LEAF = ("leaf_kl", "pinsker", "student_entropy", "teacher_entropy", "entropy_gap")
_NESTED = ("statuses", "edits", "lost", "call_errors", "user")
"""Metrics of an iteration that are a dictionary."""


def slime_lines(printed: Iterable[str], steps_per_iteration: int) -> list[Line]:
    """Return a line per update and one per iteration. Of those that were repeated after a resume, the last counts."""
    steps: dict[int, dict[str, float]] = {}
    iterations: dict[int, dict[str, float]] = {}
    for text in printed:
        match = _PRINTED.search(text)
        if match is None:
            continue
        numbers = {key: float(value) for key, value in _NUMBER.findall(text[match.end() - 1 :])}
        if match[1] == "step":
            steps[int(match[2])] = numbers
        else:  # slime prints one for the rollouts and one for the training of an iteration
            iterations.setdefault(int(match[2]), {}).update(numbers)
    lines = [_step(number, numbers, max(1, steps_per_iteration)) for number, numbers in sorted(steps.items())]
    first_steps = {line["iteration"]: line for line in reversed(lines)}
    lines += [_iteration(number, found, first_steps.get(number)) for number, found in sorted(iterations.items())]
    return lines


def gpu_memory(logs: Iterable[LogPart]) -> dict[str, int]:
    """Return the largest use of a GPU, in bytes, and the least memory that was left on a host, as slime has logged
    them."""
    used, total, left = 0.0, 0.0, float("inf")
    for log in logs:
        for _, line in log.lines_with("Memory-Usage"):
            numbers = {key: float(value) for key, value in _NUMBER.findall(line)}
            used, total = max(used, numbers.get("used_GB", 0.0)), max(total, numbers.get("total_GB", 0.0))
            left = min(left, numbers.get("host_available_GB", left))
    found = {"gpu_used_bytes": used, "gpu_total_bytes": total, "host_available_bytes": left}
    return {key: int(value * 2**30) for key, value in found.items() if value and math.isfinite(value)}


def _step(number: int, numbers: dict[str, float], steps_per_iteration: int) -> Line:
    own = {key.removeprefix("train/"): value for key, value in numbers.items() if key.startswith("train/")}
    means = {key: _ratio(own, key, "tokens") for key in _PER_TOKEN if key in own}
    means |= {key: _ratio(own, key, "leaves") for key in _PER_LEAF if key in own}
    places = {
        place: {"tokens": own[f"{place}/tokens"], "logdiff": _ratio(own, f"{place}/logdiff", f"{place}/tokens")}
        for place in PLACES
        if own.get(f"{place}/tokens")
    }
    plain = {key: _finite(value) for key, value in own.items() if "/" not in key}
    rate = own.get("lr-pg_0")
    at = {"kind": "step", "iteration": number // steps_per_iteration, "step": number}
    return {**plain, **means, **({} if rate is None else {"lr": rate}), "places": places, **at}


def _iteration(number: int, numbers: dict[str, float], first_step: Line | None) -> Line:
    """``logdiff`` and ``places`` are those of the first update: with the weights that sampled."""
    line: Line = {"kind": "iteration", "iteration": number}
    for key, value in numbers.items():
        if not key.startswith(PREFIX):
            continue
        name, _, inner = key.removeprefix(PREFIX).partition("/")
        if inner and name in _NESTED:
            line.setdefault(name, {})[inner] = _finite(value)
        elif not inner:
            line[name] = _finite(value)
    if PREFIX + "rollouts" in numbers:
        line = {"edits": {}, "statuses": {}, "call_errors": {}, **line}  # slime prints no empty dictionaries
    seconds = {"total": numbers.get("perf/step_time"), "generate": numbers.get("perf/rollout_time")}
    line["seconds"] = {key: value for key, value in seconds.items() if value is not None}
    sampled, generated_s = line.get("sampled"), seconds["generate"]
    line["rollout_tokens_per_second"] = sampled / generated_s if sampled and generated_s else None
    line["train_tokens_per_second"] = numbers.get("perf/actor_train_tok_per_s")
    if first_step is not None:
        line["logdiff"] = {"mean": first_step.get("logdiff"), "max": None}
        line["places"] = first_step["places"]
    return line


def _ratio(numbers: dict[str, float], key: str, counter: str) -> float | None:
    total, number = numbers.get(key), numbers.get(counter)
    return _finite(total / number) if total is not None and number else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
