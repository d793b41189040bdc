"""The sections of a run's page: their charts, what these show, and the command that measures what is missing.

Charts over iterations and steps have one line per run, and there is one for each harness. What was compared on the
rollouts of a run has a chart for each run, with one line, dot or bar per method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_plugin.config.harness import EDITOR_TYPES
from slime_plugin.methods import Distillation, method_of
from slime_plugin.report.charts import (
    DASHES,
    Chart,
    Colours,
    Point,
    Series,
    bar_chart,
    column_chart,
    dot_chart,
    line_chart,
)
from slime_plugin.report.formatting import format_factor, format_place
from slime_plugin.report.matrix_table import CONTROL
from slime_plugin.report.run_data import Run, number, running_mean
from slime_plugin.run.metrics import ITERATION_PHASES

_SMOOTH_FROM = 24
"""Iterations from which a line is drawn as a running mean, with the values themselves behind it."""
_COMPRESSION = (
    ("eviction_density", "Eviction density", "share of the tape"),
    ("frequency", "Compression frequency", "share of rollouts"),
    ("depth", "Compression depth", "share of the tape"),
    ("K", "Edits per rollout", "edits"),
    ("E", "Evicted per edit", "tokens"),
    ("D", "Diverging leaves per rollout", "tokens"),
)
_OPTIMISATION = (
    ("loss", "Loss", "loss", False),
    ("policy", "Policy loss", "loss", False),
    ("entropy", "Entropy", "nats", True),
    ("grad_norm", "Gradient norm", "norm", True),
    ("reference_kl", "KL to the reference", "nats", True),
    ("logdiff", "|logdiff| at the step", "nats", True),
    ("k3", "KL to the rollout policy (k3)", "nats", True),
    ("clipped", "Clipped ratios", "share", True),
    ("ratio", "Mean ratio", "ratio", False),
    ("lr", "Learning rate", "learning rate", True),
)
Groups = dict[str, list[Chart]]
Points = Sequence[Point]
StyledRuns = Sequence[tuple[Run, Series]]
"""Runs that share charts, each with the colour and the dash of its lines."""


@dataclass(frozen=True, slots=True)
class Section:
    id: str
    """The page has its title and its text."""
    groups: Groups = field(default_factory=dict)
    """Charts by the run or the harness that they are about."""
    missing: Sequence[str] = ()
    """What was not measured, and the command that measures it."""


def sections_of(runs: Sequence[Run]) -> Iterator[Section]:
    page = _Page(runs)
    edited = any(number(line, "K") for run in runs for line in run.iterations)
    trained = ", ".join(dict.fromkeys(run.method for run in runs))
    yield _section("reward", page.by_harness(page.rewards), "There are no rewards yet; memorywalker train writes them.")
    yield Section("logdiff", page.by_harness(page.logdiff), page.not_compared("the logdiff of the other methods"))
    if edited:
        missing = page.not_compared("logdiff by place under other methods")
        yield Section("junctions", page.by_run(page.places), missing)
    else:
        yield Section("junctions", missing=["No rollout was edited: there is nothing to compare by place."])
    groups = page.by_run(page.leaves)
    if any(groups.values()) or any(map(_distillation, runs)):
        yield _section("sdcc", groups, "No step had a diverging leaf so far: the teacher had nothing to do.")
    groups = page.by_harness(page.user)
    if any(groups.values()):
        yield Section("user", groups)
    if edited:
        yield Section("compression", page.by_harness(page.compression))
    else:
        editors = ", ".join(name for name in EDITOR_TYPES if name != CONTROL)
        line = f"No rollout was edited. A harness that edits is configured with harness: {editors}."
        yield Section("compression", missing=[line])
    yield Section("cost", page.by_run(page.cost), page.not_compared("the measured cost of every method"))
    yield _section("lost", page.by_run(page.lost), f"{trained}: every sampled token was trained.")
    yield _section("time", page.by_run(page.time), "There are no times yet; memorywalker train writes them.")
    groups = page.by_harness(page.optimisation)
    yield _section("optimisation", groups, "There are no update steps yet; memorywalker train writes them.")


def _distillation(run: Run) -> Distillation | None:
    return None if run.trained_method is None else method_of(run.trained_method).distillation


def _section(name: str, groups: Groups, otherwise: str) -> Section:
    """``otherwise`` is shown if there is no chart."""
    return Section(name, groups, [] if any(groups.values()) else [otherwise])


class _Page:
    """The charts of all sections; a name has one colour in all of them."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.methods = Colours([name for run in runs for name in (*run.compared_methods, run.method)])
        self.causes, self.edits, self.phases = Colours(), Colours(), Colours([*ITERATION_PHASES, "other"])

    def rewards(self, styled: StyledRuns) -> Iterator[Chart]:
        lines = [line for run, style in styled for line in _smoothed(run, style)]
        yield from line_chart("Mean reward", lines, x="iteration", y="reward", zero=True)
        lines = [replace(style, points=run.over_iterations("reward_std")) for run, style in styled]
        title = "Spread of rewards within the batch"
        yield from line_chart(title, lines, x="iteration", y="standard deviation", zero=True)

    def logdiff(self, styled: StyledRuns) -> Iterator[Chart]:
        for run, _ in styled:
            compared = (run.comparison or {}).get("by_iteration", [])
            lines = [
                self._line(name, [(line["iteration"], number(line, "methods", name, "mean")) for line in compared])
                for name in run.compared_methods
            ]
            floor = number(run.comparison or {}, "floor", "mean")
            levels = {"floor": floor} if floor else {}
            title = "The same rollouts under every method" + (f", {run.name}" if len(styled) > 1 else "")
            yield from line_chart(title, lines, x="iteration", y="nats per token", log=True, levels=levels)
        title = "The trained method"
        lines = [replace(style, points=run.over_iterations("logdiff", "mean")) for run, style in styled]
        if len(self.runs) == 1:
            title = f"The trained method, {self.runs[0].method}"
            largest = self.runs[0].over_iterations("logdiff", "max")
            lines = [replace(lines[0], name="mean"), replace(lines[0], name="largest", points=largest, dash="dot")]
        yield from line_chart(title, lines, x="iteration", y="nats per token", log=True)

    def places(self, run: Run) -> Iterator[Chart]:
        compared = (run.comparison or {}).get("methods", {})
        rows = {
            format_place(place): {name: run.compared(name, "places", place, "mean") for name in compared}
            for place in dict.fromkeys(place for method in compared.values() for place in method.get("places", {}))
        }
        yield from dot_chart("By the last edit", rows, self.methods, x="mean |logdiff|, nats per token")
        lines = [
            self._line(name, [(line["junction"], number(line, "mean")) for line in method.get("junctions", [])])
            for name, method in compared.items()
        ]
        if any(len(line.points) > 1 for line in lines):
            title = "By the number of edits before the token"
            yield from line_chart(title, lines, x="edits before the token", y="nats per token", log=True)
        trained = dict.fromkeys(place for line in run.iterations for place in line.get("places") or {})
        points = {format_place(place): run.over_iterations("places", place, "logdiff") for place in trained}
        if len(points) > 1:
            title = f"Over iterations, as trained with {run.method}"
            yield from line_chart(title, _series(points, self.edits), x="iteration", y="nats per token", log=True)

    def leaves(self, run: Run) -> Iterator[Chart]:
        kl = run.over_steps("leaf_kl")
        if all(value is None for _, value in kl):
            return
        marks = {"switched off": float(run.switched_off[0])} if run.switched_off else {}
        distillation = _distillation(run)
        limit = None if distillation is None else distillation.kl_limit
        near = limit is not None and any(value is not None and value > limit / 10 for _, value in kl)
        levels = {"limit": limit} if limit is not None and near else {}
        lines = _series({"KL per leaf": kl, "Pinsker bound, sqrt(KL / 2)": run.over_steps("pinsker")}, dots=True)
        title = "KL at diverging leaves"
        yield from line_chart(title, lines, x="step", y="nats", log=True, levels=levels, marks=marks)
        lines = _series({"coefficient": run.over_steps("sdcc_weight")})
        yield from line_chart("Coefficient of the KL", lines, x="step", y="coefficient", zero=True, marks=marks)
        lines = _series({"leaves": run.over_steps("leaves")}, dots=True)
        yield from line_chart("Diverging leaves per step", lines, x="step", y="leaves", zero=True)
        keys = {"student": "student_entropy", "teacher": "teacher_entropy", "mean distance": "entropy_gap"}
        lines = _series({name: run.over_steps(key) for name, key in keys.items()}, dots=True)
        yield from line_chart("Entropy at the leaves", lines, x="step", y="nats", zero=True)

    def compression(self, styled: StyledRuns) -> Iterator[Chart]:
        for key, title, y in _COMPRESSION:
            lines = [replace(style, points=run.over_iterations(key)) for run, style in styled]
            yield from line_chart(title, lines, x="iteration", y=y, zero=True, small=True)

    def cost(self, run: Run) -> Iterator[Chart]:
        names, machine = run.compared_methods, (run.comparison or {}).get("machine") or "on one machine"
        costs = {name: {"": cost} for name in names if (cost := run.compared(name, "cost")) is not None}
        note = f"Seconds of training on a batch over those of {run.denominator}; {machine}."
        x = f"times {run.denominator}"
        yield from bar_chart(
            "Measured cost of training on a batch", costs, self.methods, x=x, text=format_factor, note=note
        )
        kinds = {"with gradient": "tokens", "without gradient": "teacher_tokens"}
        tokens = {name: {kind: run.compared(name, key) or 0 for kind, key in kinds.items()} for name in names}
        yield from bar_chart("Tokens computed", tokens, Colours(list(kinds)), x="tokens")
        keys = {"branches": "branch_tokens", "prefix tree": "trie_tokens", "final contexts": "compressed_tokens"}
        points = {name: run.over_iterations(key) for name, key in (keys | {"computed": "tokens"}).items()}
        yield from line_chart("Tokens of an iteration", _series(points), x="iteration", y="tokens", zero=True)
        lines = _series({"prefix tree": run.over_iterations("trie_ratio")})
        yield from line_chart("Prefix tree over branches", lines, x="iteration", y="ratio of tokens", zero=True)

    def lost(self, run: Run) -> Iterator[Chart]:
        columns = {line["iteration"]: _counts(line.get("lost")) for line in run.iterations}
        title = f"As trained with {run.method}"
        yield from column_chart(title, columns, self.causes, x="iteration", y="tokens")
        compared = (run.comparison or {}).get("methods", {})
        bars = {name: _counts(method.get("lost")) for name, method in compared.items()}
        yield from bar_chart("Lost under every method", bars, self.causes, x="tokens")

    def time(self, run: Run) -> Iterator[Chart]:
        columns = {line["iteration"]: _counts(line.get("seconds")) for line in run.iterations}
        for seconds in columns.values():
            seconds.pop("total", None)
        title = "Seconds of an iteration, by phase"
        yield from column_chart(title, columns, self.phases, x="iteration", y="seconds")
        speeds = {"rollout": "rollout_tokens_per_second", "training": "train_tokens_per_second"}
        lines = _series({name: run.over_iterations(key) for name, key in speeds.items()})
        yield from line_chart("Tokens per second", lines, x="iteration", y="tokens per second", log=True)

    def user(self, styled: StyledRuns) -> Iterator[Chart]:
        found = (line.get("user") or {} for run, _ in styled for line in run.iterations)
        for name in dict.fromkeys(name for metrics in found for name in metrics):
            lines = [replace(style, points=run.over_iterations("user", name)) for run, style in styled]
            yield from line_chart(name, lines, x="iteration", y=name, small=True)

    def optimisation(self, styled: StyledRuns) -> Iterator[Chart]:
        for key, title, y, zero in _OPTIMISATION:
            lines = [replace(style, points=run.over_steps(key)) for run, style in styled]
            yield from line_chart(title, lines, x="step", y=y, zero=zero, small=True)

    def by_harness(self, charts: Callable[[StyledRuns], Iterator[Chart]]) -> Groups:
        """Charts that the runs of a harness share; their lines differ by method where that tells them apart."""
        groups: Groups = {}
        harnesses = list(dict.fromkeys(run.harness for run in self.runs))
        for harness in harnesses:
            some = [run for run in self.runs if run.harness == harness]
            trained = [run.method for run in some]
            by_method, names = len(some) == 1 or len(set(trained)) > 1, Colours([run.name for run in some])
            styled = []
            for i, run in enumerate(some):
                colour = self.methods[run.method] if by_method else names[run.name]
                repeat = trained[:i].count(run.method) if by_method else 0
                styled.append((run, Series(run.name, (), colour, DASHES[repeat % len(DASHES)])))
            groups[harness] = _titled(charts(styled), harness, len(harnesses) > 1)
        return groups

    def by_run(self, charts: Callable[[Run], Iterator[Chart]]) -> Groups:
        return {run.name: _titled(charts(run), run.name, len(self.runs) > 1) for run in self.runs}

    def not_compared(self, what: str) -> list[str]:
        return [
            f"Not measured{f', {run.name}' if len(self.runs) > 1 else ''}: {what}. "
            f"memorywalker compare {run.folder.path} does."
            for run in self.runs
            if not run.compared_methods
        ]

    def _line(self, method: str, points: Points) -> Series:
        return Series(method, points, self.methods[method], self.methods.dash(method))


def _series(points: Mapping[str, Points], colours: Colours | None = None, dots: bool = False) -> list[Series]:
    """Series that differ from those of the same chart, by order if no ``colours`` are given."""
    colours = colours or Colours(list(points))
    return [Series(name, values, colours[name], colours.dash(name), dots) for name, values in points.items()]


def _titled(charts: Iterator[Chart], group: str, several: bool) -> list[Chart]:
    """Where there are several groups, a title says whose chart it is."""
    return [replace(chart, title=f"{chart.title}, {group}") if several else chart for chart in charts]


def _smoothed(run: Run, style: Series) -> Iterator[Series]:
    """The rewards of a run: as they are, or behind their running mean if they are many."""
    points = run.over_iterations("reward")
    if len(points) < _SMOOTH_FROM:
        yield replace(style, points=points)
        return
    yield replace(style, points=points, name=f"{run.name}, each iteration", background=True)
    yield replace(style, points=running_mean(points, len(points) // 20 + 1))


def _counts(value: Any) -> dict[str, float]:
    """The numbers of an object that are there and not 0."""
    return {name: found for name in value if (found := number(value, name))} if isinstance(value, dict) else {}
