"""Methods by harnesses for a terminal: reward, logdiff and cost of every run of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from slime_plugin.config.harness import SearchR1
from slime_plugin.errors import printable
from slime_plugin.methods import METHODS
from slime_plugin.report.formatting import format_brief, format_factor, join_words
from slime_plugin.report.run_data import Run, mean
from slime_plugin.report.tables import number_table

CONTROL = SearchR1().type
"""The harness that edits nothing, so that all methods are the same under it."""


def legend(runs: Sequence[Run]) -> str:
    return (
        "reward: first -> last iterations; logdiff: of the trained method, with the weights that sampled, in nats per "
        f"token; cost: of training on a batch, measured, against {denominators(runs)} on the same rollouts"
    )


def denominators(runs: Sequence[Run]) -> str:
    """The methods whose cost is 1: one, unless the runs were compared by different versions."""
    return join_words(list(dict.fromkeys(run.denominator for run in runs)))


def methods_of(runs: Sequence[Run]) -> list[str]:
    """The methods that were trained: ours in their order, then those of a user's own."""
    trained = list(dict.fromkeys(run.method for run in runs))
    return [name for name in METHODS if name in trained] + [name for name in trained if name not in METHODS]


def matrix_table(runs: Sequence[Run]) -> Table:
    """A row per method, a column per harness that edits; the control is a line of its own: :func:`control_line`."""
    edited = [run for run in runs if run.harness != CONTROL]
    harnesses = list(dict.fromkeys(run.harness for run in edited))
    methods = methods_of(edited)
    headings = ("method", "", *(printable(harness, 40) for harness in harnesses))
    table = number_table(headings, left=2, no_wrap=True, padding=(0, 2, 0, 0))
    for method in methods:
        cells = {run.harness: numbers(run) for run in edited if run.method == method}
        for i, name in enumerate(("reward", "logdiff", "cost")):
            found = [cells[harness][name] if harness in cells else "no run" * (i == 0) for harness in harnesses]
            table.add_row(method if i == 0 else "", name, *found, end_section=name == "cost")
    return table


def control_line(runs: Sequence[Run]) -> str | None:
    """The numbers of the control; None if it was not run."""
    found = [
        ", ".join(f"{key} {value}" for key, value in numbers(run).items()) for run in runs if run.harness == CONTROL
    ]
    return f"{CONTROL}, where nothing is edited and all methods are the same: {'; '.join(found)}" if found else None


def numbers(run: Run, arrow: str = "->") -> dict[str, str]:
    """Reward, logdiff and cost of a run as text."""
    ends = run.reward
    reward = f"{ends[0]:.2f} {arrow} {ends[1]:.2f}" if ends else format_brief(mean(run.over_iterations("reward")))
    if run.planned is not None and len(run.iterations) < run.planned:
        reward += f" ({len(run.iterations)} of {run.planned})"
    return {"reward": reward, "logdiff": format_brief(run.logdiff), "cost": format_factor(run.cost)}
