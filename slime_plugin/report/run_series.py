"""Which runs share a plot, how their lines look, and what is said where there is nothing to draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from slime_plugin.report.charts import Point, Series, line_chart
from slime_plugin.report.run_data import Run, number, running_mean
from slime_plugin.report.summary import COMPARED

Groups = defaultdict[str, list[str]]
COLOURS = 10
"""CSS variables ``--s0`` and following."""
_SMOOTH_FROM = 24
"""Iterations from which a line is drawn as a running mean, with the values themselves behind it."""
SMALL = {"width": 380, "height": 180}
"""The size of a plot among many."""


def by_harness(runs: Sequence[Run]) -> Iterator[tuple[str, list[tuple[Run, Series]]]]:
    """Runs that share a plot, each with the look of its line: by method where that tells them apart."""
    for harness in dict.fromkeys(run.harness for run in runs):
        some = [run for run in runs if run.harness == harness]
        methods = [run.method for run in some]
        looks = []
        for i, run in enumerate(some):
            colour, repeat = f"s{i % COLOURS}", i // COLOURS
            if len(set(methods)) > 1:
                colour, repeat = colour_of(run.method), methods[:i].count(run.method)
            looks.append((run, Series(run.name, (), colour, ("", "6 4", "2 3")[repeat % 3])))
        yield harness, looks


def over(some: Sequence[tuple[Run, Series]], *keys: str) -> list[Series]:
    """A line per run: a number of every iteration."""
    return [replace(series, points=run.over_iterations(*keys)) for run, series in some]


def smoothed(run: Run, look: Series) -> Iterator[Series]:
    """The rewards of a run: as they are, or behind their running mean if they are many."""
    points = run.over_iterations("reward")
    if len(points) < _SMOOTH_FROM:
        yield replace(look, points=points)
        return
    yield replace(look, points=points, name=f"{run.name}, each iteration", faint=True)
    yield replace(look, points=running_mean(points, len(points) // 20 + 1))


def colour_of(method: str) -> str:
    return method if method in COMPARED else "s7"


def plot(title: str, lines: list[Series], **settings: Any) -> tuple[str, ...]:
    """A chart, or none if there is no number to draw."""
    log = settings.get("log", False)
    known = any(value is not None and (value > 0 or not log) for one in lines for _, value in one.points)
    return (line_chart(title, lines, **settings),) if known else ()


def compared(runs: Sequence[Run]) -> Iterator[Run]:
    """Those whose rollouts were put under several methods."""
    return (run for run in runs if run.compared_methods)


def not_compared(runs: Sequence[Run], what: str) -> tuple[str, ...]:
    return tuple(
        f"Not measured{of_run(run, runs)}: {what}. memorywalker compare {run.folder.path} does."
        for run in runs
        if not run.compared_methods
    )


def unless(groups: Groups, what: str) -> tuple[str, ...]:
    return () if any(groups.values()) else (f"There are {what}; memorywalker train writes them.",)


def of_run(run: Run, runs: Sequence[Run]) -> str:
    """The end of a title, where a title alone does not say whose plot it is."""
    return f", {run.name}" if len(runs) > 1 else ""


def of_harness(harness: str, runs: Sequence[Run]) -> str:
    return f", {harness}" if len({run.harness for run in runs}) > 1 else ""


def edited(runs: Sequence[Run]) -> bool:
    return any(number(line, "K") for run in runs for line in run.iterations)


def has_leaves(run: Run) -> bool:
    return any(number(line, "leaf_kl") is not None for line in run.steps)


def by_junction(method: dict[str, Any]) -> list[Point]:
    """Drift by the number of edits before a token."""
    return [(line["junction"], number(line, "mean")) for line in method.get("junctions", [])]


def place_name(name: str) -> str:
    """
    >>> place_name("start"), place_name("fold/near")
    ('before any edit', 'after fold, near')
    """
    return "before any edit" if name == "start" else "after {}, {}".format(*name.partition("/")[::2])


def counts_of(value: Any) -> dict[str, float]:
    """The numbers of an object that are there and not 0."""
    counts: dict[str, float] = {}
    for name in value if isinstance(value, dict) else ():
        found = number(value, name)
        if found:
            counts[name] = found
    return counts


def colours_of(names: Iterator[str]) -> dict[str, str]:
    return {name: f"s{i % COLOURS}" for i, name in enumerate(dict.fromkeys(names))}
