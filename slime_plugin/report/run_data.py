"""A training run as its report needs it: metrics by name, and what was compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.method import MethodSettings
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.methods import DENOMINATOR, method_of
from slime_plugin.report.charts import Point
from slime_plugin.run.folder import RunFolder

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The content of a run's small files. Its rollouts stay on disk."""

    folder: RunFolder
    name: str
    settings: dict[str, Any]
    iterations: tuple[Line, ...]
    steps: tuple[Line, ...]
    comparison: dict[str, Any] | None
    """None if nothing has been compared."""

    @property
    def method(self) -> str:
        return _type(self.settings, "method")

    @property
    def trained_method(self) -> MethodSettings | None:
        """With its settings; None if they are of another version, or its code cannot be imported here."""
        try:
            chosen = parse_config({"method": self.settings.get("method")}, Cell, str(self.folder.settings)).method
            method_of(chosen)
        except ConfigError:
            return None
        return chosen

    @property
    def harness(self) -> str:
        return _type(self.settings, "harness")

    @property
    def planned(self) -> float | None:
        """Configured number of iterations."""
        return number(self.settings, "trainer", "iterations")

    @property
    def denominator(self) -> str:
        """The method whose cost is 1."""
        return denominator_of(self.comparison or {})

    @property
    def reward(self) -> tuple[float, float] | None:
        """Reward at the beginning and at the end."""
        return ends(self.over_iterations("reward"))

    @property
    def logdiff(self) -> float | None:
        """Mean logdiff of the trained method, with the weights that sampled."""
        return mean(self.over_iterations("logdiff", "mean"))

    @property
    def largest_logdiff(self) -> float | None:
        return largest(self.over_iterations("logdiff", "max"))

    @property
    def cost(self) -> float | None:
        """Time of training on a batch, as a multiple of the denominator's."""
        return self.compared(self.method, "cost")

    @property
    def switched_off(self) -> tuple[int, str] | None:
        """The first step without SDCC's KL, and why."""
        return next(((line["step"], str(line["sdcc_off"])) for line in self.steps if line.get("sdcc_off")), None)

    def over_iterations(self, *keys: str) -> list[Point]:
        """A number of every iteration, by its name and the names inside it; None where there is none."""
        return [(line["iteration"], number(line, *keys)) for line in self.iterations]

    def over_steps(self, key: str) -> list[Point]:
        return [(line["step"], number(line, key)) for line in self.steps]

    def compared(self, method: str, *keys: str) -> float | None:
        """A number that was measured for a method on this run's rollouts."""
        return number(self.comparison or {}, "methods", method, *keys)

    @property
    def compared_methods(self) -> list[str]:
        return list((self.comparison or {}).get("methods", {}))


def denominator_of(comparison: Mapping[str, Any]) -> str:
    """The method that its costs are measured against; version 0.6 did not write it down."""
    return str(comparison.get("denominator", DENOMINATOR))


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """The runs, each under a name of its own."""
    paths = [folder.path.resolve() for folder in folders]
    twice = next((path for i, path in enumerate(paths) if path in paths[:i]), None)
    if twice is not None:
        raise MemoryWalkerError(f"{twice}: given twice; name every run once")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def number(line: Mapping[str, Any], *keys: str) -> float | None:
    """Return the number under nested keys; None if a key is missing or its value is not a finite number."""
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def ends(points: Sequence[Point]) -> tuple[float, float] | None:
    """The means of the first and the last tenth of a noisy line. None for fewer than two points.

    >>> ends([(0, 0.0), (1, None), (2, 1.0)])
    (0.0, 1.0)
    """
    values = [value for _, value in points if value is not None]
    if len(values) < 2:
        return None
    some = max(1, len(values) // 10)
    return math.fsum(values[:some]) / some, math.fsum(values[-some:]) / some


def mean(points: Sequence[Point]) -> float | None:
    values = [value for _, value in points if value is not None]
    return math.fsum(values) / len(values) if values else None


def largest(points: Sequence[Point]) -> float | None:
    return max((value for _, value in points if value is not None), default=None)


def running_mean(points: Sequence[Point], reach: int) -> list[Point]:
    """Each point as the mean of what is known up to ``reach`` points to either side.

    >>> running_mean([(0, 0.0), (1, None), (2, 3.0)], 1)
    [(0, 0.0), (1, 1.5), (2, 3.0)]
    """
    return [(at, mean(points[max(0, i - reach) : i + reach + 1])) for i, (at, _) in enumerate(points)]


def _read_run(folder: RunFolder, name: str) -> Run:
    settings = folder.read_settings()
    lines = list(folder.read_metrics())
    iterations = tuple(line for line in lines if line.get("kind") == "iteration")
    if not iterations and not folder.iterations():
        raise MemoryWalkerError(
            f"{folder.path}: nothing to report yet: no iteration in {folder.metrics.name} and no "
            f"rollout-*.records; wait for the first iteration, or continue it with memorywalker train --resume"
        )
    steps = tuple(line for line in lines if line.get("kind") == "step")
    return Run(folder, name, settings, iterations, steps, folder.read_comparison())


def _type(settings: dict[str, Any], key: str) -> str:
    part = settings.get(key)
    return str(part.get("type", "unnamed")) if isinstance(part, dict) else "unnamed"
