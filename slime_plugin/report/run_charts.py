"""The plots of a run's page. Each part says what it shows, and what would be there if it were measured.

Plots over iterations and steps have one line per run, and a plot for each harness. What was compared on the rollouts of
a run has a plot for each run, with one line, dot or bar per method. A part without data is one sentence that names the
command to get it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_plugin.report.charts import Series, bar_chart, column_chart, dot_chart
from slime_plugin.report.headline import switched_off
from slime_plugin.report.run_data import Run, number
from slime_plugin.report.run_series import (
    COLOURS,
    SMALL,
    Groups,
    by_harness,
    by_junction,
    colour_of,
    colours_of,
    compared,
    counts_of,
    edited,
    has_leaves,
    not_compared,
    of_harness,
    of_run,
    over,
    place_name,
    plot,
    smoothed,
    unless,
)

_PHASES = ("generate", "convert", "transfer", "reference", "old", "train", "export", "update", "save", "other")
_METHOD_DASHES = {"logittree": "7 5", "sdcc": "2 3"}  # they lie on mask4d's and on naive_compressed's line


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page."""

    id: str
    title: str
    text: str
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Charts by the run or the harness that they are about."""
    small: bool = False
    """Many small plots side by side, not two large ones."""
    missing: tuple[str, ...] = ()
    """What is not there, and how to get it."""


def parts(runs: Sequence[Run]) -> Iterator[Part]:
    yield _reward(runs)
    yield _drift(runs)
    yield _junctions(runs)
    if any(has_leaves(run) or run.method == "sdcc" for run in runs):
        yield _sdcc(runs)
    yield _compression(runs)
    yield _cost(runs)
    yield _lost(runs)
    yield _time(runs)
    yield _optimisation(runs)


def _reward(runs: Sequence[Run]) -> Part:
    groups: Groups = defaultdict(list)
    for harness, some in by_harness(runs):
        of = of_harness(harness, runs)
        lines = [line for run, series in some for line in smoothed(run, series)]
        groups[harness] += plot(f"Mean reward{of}", lines, x="iteration", y="reward", zero=True)
        title = f"Spread of rewards within the batch{of}"
        groups[harness] += plot(title, over(some, "reward_std"), x="iteration", y="standard deviation", zero=True)
    text = "Mean over the rollouts of an iteration; aborted and failed ones are left out."
    return Part("reward", "Reward", text, groups, missing=unless(groups, "no rewards yet"))


def _drift(runs: Sequence[Run]) -> Part:
    text = (
        "Mean |trainer - rollout| of log-probabilities per trained token, in nats, with the weights that sampled. An "
        "exact method is at the floor, the rounding error of the two engines; what is above it is its own error."
    )
    groups: Groups = defaultdict(list)
    for harness, some in by_harness(runs):
        own = over(some, "logdiff", "mean")
        title = f"The trained method{of_harness(harness, runs)}"
        if len(runs) == 1:
            title = f"The trained method, {runs[0].method}"
            largest = Series("largest", runs[0].over_iterations("logdiff", "max"), "s0", "2 4")
            own = [Series("mean", own[0].points, "s0"), largest]
        groups[harness] += plot(title, own, x="iteration", y="nats per token", log=True)
    for run in compared(runs):
        by_iteration = (run.comparison or {}).get("by_iteration", [])
        lines = [
            Series(
                name,
                [(line["iteration"], number(line, "methods", name, "mean")) for line in by_iteration],
                colour_of(name),
                _METHOD_DASHES.get(name, ""),
            )
            for name in run.compared_methods
        ]
        floor = number(run.comparison or {}, "floor", "mean")
        title = f"The same rollouts under every method{of_run(run, runs)}"
        levels = {"floor": floor} if floor else {}
        first = 0 if len(runs) == 1 else len(groups[run.harness])
        groups[run.harness][first:first] = plot(
            title, lines, x="iteration", y="nats per token", log=True, levels=levels
        )
    return Part("drift", "Drift", text, groups, missing=not_compared(runs, "the drift of the other methods"))


def _junctions(runs: Sequence[Run]) -> Part:
    text = (
        "Where a token stands: what edit came last before it was sampled. Near is among the first 16 tokens after it."
    )
    groups: Groups = defaultdict(list)
    for run in runs:
        of = of_run(run, runs)
        methods = (run.comparison or {}).get("methods", {})
        places = list(dict.fromkeys(place for method in methods.values() for place in method.get("places", {})))
        rows = {
            place_name(place): {name: run.compared(name, "places", place, "mean") for name in methods}
            for place in places
        }
        if rows:
            colours = {name: colour_of(name) for name in methods}
            x = "mean |trainer - rollout|, nats per token"
            groups[run.name].append(dot_chart(f"By the last edit{of}", rows, colours, x=x))
        lines = [
            Series(name, by_junction(method), colour_of(name), _METHOD_DASHES.get(name, ""))
            for name, method in methods.items()
        ]
        if any(len(line.points) > 1 for line in lines):
            title = f"By the number of edits before the token{of}"
            groups[run.name] += plot(title, lines, x="edits before", y="nats per token", log=True)
        places = list(dict.fromkeys(place for line in run.iterations for place in line.get("places") or {}))
        lines = [
            Series(place_name(place), run.over_iterations("places", place, "logdiff"), f"s{i % COLOURS}")
            for i, place in enumerate(places)
        ]
        title = f"Over iterations, as trained with {run.method}{of}"
        if len(places) > 1:
            groups[run.name] += plot(title, lines, x="iteration", y="nats per token", log=True)
    missing = not_compared(runs, "drift at junctions under other methods")
    if not edited(runs):
        return Part("junctions", "Drift at junctions", "", missing=("No rollout was edited: there are no junctions.",))
    return Part("junctions", "Drift at junctions", text, groups, missing=missing)


def _sdcc(runs: Sequence[Run]) -> Part:
    text = (
        "KL from the live contexts to the compressed one at the diverging leaves: it spikes where edits fire. The gate "
        "is open where a step has leaves; the weight ramps up, and is 0 for good once the KL has diverged."
    )
    groups: Groups = defaultdict(list)
    for run in (run for run in runs if has_leaves(run)):
        off = switched_off(run)
        marks: dict[str, float] = {"switched off": off[0]} if off else {}
        limit = number(run.settings, "method", "kl_limit")
        kl = run.over_steps("leaf_kl")
        near = limit is not None and any(value is not None and value > limit / 10 for _, value in kl)
        levels = {"limit": limit} if limit is not None and near else {}
        of, charts = of_run(run, runs), groups[run.name]
        leaf_kl = [
            Series("KL per leaf", kl, "sdcc", kind="stems"),
            Series("Pinsker bound, sqrt(KL / 2)", run.over_steps("pinsker"), "s1", kind="dots"),
        ]
        title = f"KL at diverging leaves{of}"
        charts += plot(title, leaf_kl, x="step", y="nats", log=True, levels=levels, marks=marks)
        weight = [Series("weight", run.over_steps("sdcc_weight"), "sdcc")]
        charts += plot(f"Weight of the KL{of}", weight, x="step", y="weight", zero=True, marks=marks)
        leaves = [Series("leaves", run.over_steps("leaves"), "s2", kind="stems")]
        charts += plot(f"Diverging leaves per step{of}", leaves, x="step", y="leaves", zero=True)
        entropies = [
            Series("student", run.over_steps("student_entropy"), "sdcc", kind="dots"),
            Series("teacher", run.over_steps("teacher_entropy"), "s1", kind="dots"),
            Series("mean distance", run.over_steps("entropy_gap"), "s3", kind="dots"),
        ]
        charts += plot(f"Entropy at the leaves{of}", entropies, x="step", y="nats", zero=True)
    missing = () if groups else ("No step had a diverging leaf so far: SDCC had nothing to do.",)
    return Part("sdcc", "SDCC", text, groups, missing=missing)


def _compression(runs: Sequence[Run]) -> Part:
    text = (
        "Eviction density: evicted tokens over tokens of the tape. Frequency: share of rollouts that were compressed. "
        "Depth: share of the tape that these lost."
    )
    if not edited(runs):
        line = "No rollout was edited. A harness that edits is configured with harness: agentfold, tc_rag or memexrl."
        return Part("compression", "Compression", "", missing=(line,))
    groups: Groups = defaultdict(list)
    for harness, some in by_harness(runs):
        for key, title, y in (
            ("eviction_density", "Eviction density", "share of the tape"),
            ("frequency", "Compression frequency", "share of rollouts"),
            ("depth", "Compression depth", "share of the tape"),
            ("K", "Edits per rollout", "edits"),
            ("E", "Evicted per edit", "tokens"),
            ("D", "Diverging leaves per rollout", "tokens"),
        ):
            title += of_harness(harness, runs)
            groups[harness] += plot(title, over(some, key), x="iteration", y=y, zero=True, **SMALL)
    return Part("compression", "Compression", text, groups, small=True)


def _cost(runs: Sequence[Run]) -> Part:
    text = "What exactness costs, measured on the same rollouts, and how many tokens a pass computes."
    groups: Groups = defaultdict(list)
    for run in runs:
        comparison: dict[str, Any] = run.comparison or {}
        names, of, charts = run.compared_methods, of_run(run, runs), groups[run.name]
        costs = {name: {"": cost} for name in names if (cost := run.compared(name, "cost")) is not None}
        if costs:
            against = comparison.get("denominator", "naive_compressed")
            note = f"Seconds of one update over those of {against}; {comparison.get('machine') or 'on one machine'}."
            colours = {name: colour_of(name) for name in names}
            charts.append(
                bar_chart(f"Measured cost of an update{of}", costs, colours, say="{:.2f} x".format, note=note)
            )
        tokens = {
            name: {
                "with gradient": run.compared(name, "tokens") or 0.0,
                "without gradient": run.compared(name, "teacher_tokens") or 0.0,
            }
            for name in names
        }
        if any(sum(parts.values()) for parts in tokens.values()):
            colours = {"with gradient": "s0", "without gradient": "s7"}
            charts.append(bar_chart(f"Tokens computed{of}", tokens, colours))
        lines = [
            Series("a chain per branch", run.over_iterations("branch_tokens"), "logittree"),
            Series("prefix tree", run.over_iterations("trie_tokens"), "mask4d"),
            Series("final contexts", run.over_iterations("compressed_tokens"), "naive_compressed"),
            Series("computed", run.over_iterations("tokens"), "s7", "2 4"),
        ]
        charts += plot(f"Tokens of an iteration{of}", lines, x="iteration", y="tokens", zero=True)
        ratio = [Series("ratio", run.over_iterations("trie_ratio"), "mask4d")]
        charts += plot(f"Prefix tree over branches{of}", ratio, x="iteration", y="ratio", zero=True)
    return Part("cost", "Cost", text, groups, missing=not_compared(runs, "the measured cost of every method"))


def _lost(runs: Sequence[Run]) -> Part:
    text = "Sampled tokens that are not trained, by cause. Every sampled token is trained once or counted here."
    groups: Groups = defaultdict(list)
    for run in runs:
        of = of_run(run, runs)
        columns = [(line["iteration"], counts_of(line.get("lost"))) for line in run.iterations]
        colours = colours_of(cause for _, causes in columns for cause in causes)
        if any(causes for _, causes in columns):
            title = f"As trained with {run.method}{of}"
            groups[run.name].append(column_chart(title, columns, colours, x="iteration", y="tokens"))
        lost = {
            name: counts_of(method.get("lost")) for name, method in (run.comparison or {}).get("methods", {}).items()
        }
        if any(lost.values()):
            colours = colours_of(cause for causes in lost.values() for cause in causes)
            groups[run.name].append(bar_chart(f"Lost under every method{of}", lost, colours))
    said = f"{', '.join(dict.fromkeys(run.method for run in runs))}: every sampled token was trained."
    return Part("lost", "Lost tokens", text, groups, missing=() if groups else (said,))


def _time(runs: Sequence[Run]) -> Part:
    groups: Groups = defaultdict(list)
    for run in runs:
        of = of_run(run, runs)
        columns = [(line["iteration"], counts_of(line.get("seconds"))) for line in run.iterations]
        phases = [*_PHASES, *dict.fromkeys(name for _, of in columns for name in of if name not in (*_PHASES, "total"))]
        if any(seconds for _, seconds in columns):
            title = f"Seconds of an iteration, by phase{of}"
            colours = {name: f"s{i % COLOURS}" for i, name in enumerate(phases)}
            groups[run.name].append(column_chart(title, columns, colours, x="iteration", y="seconds"))
        speeds = [
            Series("rollout", run.over_iterations("rollout_tokens_per_second"), "s0"),
            Series("training", run.over_iterations("train_tokens_per_second"), "s5"),
        ]
        title = f"Tokens per second{of}"
        groups[run.name] += plot(title, speeds, x="iteration", y="tokens per second", log=True)
    return Part("time", "Time", "Where an iteration's time goes.", groups, missing=unless(groups, "no times yet"))


def _optimisation(runs: Sequence[Run]) -> Part:
    groups: Groups = defaultdict(list)
    for harness, some in by_harness(runs):
        for key, title, y, zero in (
            ("loss", "Loss", "loss", False),
            ("policy", "Policy loss", "loss", False),
            ("entropy", "Entropy", "nats", True),
            ("grad_norm", "Gradient norm", "norm", True),
            ("reference_kl", "KL to the reference", "nats", True),
            ("logdiff", "|trainer - rollout| at the step", "nats", True),
            ("k3", "KL to the rollout policy (k3)", "nats", True),
            ("clipped", "Clipped ratios", "share", True),
            ("ratio", "Mean ratio", "ratio", False),
            ("lr", "Learning rate", "lr", True),
        ):
            lines = [replace(series, points=run.over_steps(key)) for run, series in some]
            title += of_harness(harness, runs)
            groups[harness] += plot(title, lines, x="step", y=y, zero=zero, **SMALL)
    missing = unless(groups, "no update steps yet")
    return Part("optimisation", "Optimisation", "One point per update step.", groups, True, missing)
