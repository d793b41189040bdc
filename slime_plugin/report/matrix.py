"""Methods by harnesses for a terminal: what every run of a matrix came to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from slime_plugin.config.harness import SearchR1
from slime_plugin.errors import printable
from slime_plugin.report.headline import brief
from slime_plugin.report.run_data import Run, ends, mean, number
from slime_plugin.report.summary import COMPARED

CONTROL = SearchR1().type
"""The harness that edits nothing, so that all methods are the same under it."""
LEGEND = (
    "reward: first -> last iterations; drift: of the method that was trained, with the weights that sampled, in nats "
    "per token; cost: of an update, measured, against naive_compressed on the same rollouts"
)


def matrix_table(runs: Sequence[Run]) -> Table:
    """A row per method, a column per harness that edits; the control is a line of its own: :func:`control_line`."""
    edited = [run for run in runs if run.harness != CONTROL]
    harnesses = list(dict.fromkeys(run.harness for run in edited))
    methods = [method for method in COMPARED if any(run.method == method for run in edited)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("", no_wrap=True)
    for harness in harnesses:
        table.add_column(Text(printable(harness, 40)), justify="right", no_wrap=True)
    for method in methods:
        cells = {run.harness: numbers(run) for run in edited if run.method == method}
        for i, name in enumerate(("reward", "drift", "cost")):
            found = [cells[harness][name] if harness in cells else "no run" * (i == 0) for harness in harnesses]
            table.add_row(method if i == 0 else "", name, *found, end_section=name == "cost")
    return table


def control_line(runs: Sequence[Run]) -> str | None:
    """None if the control was not among them."""
    found = [
        ", ".join(f"{key} {value}" for key, value in numbers(run).items()) for run in runs if run.harness == CONTROL
    ]
    return f"{CONTROL}, where nothing is edited and all methods are the same: {'; '.join(found)}" if found else None


def numbers(run: Run) -> dict[str, str]:
    """Reward, drift and cost of a run, in words if there are none."""
    rewards = run.over_iterations("reward")
    reward = ends(rewards)
    told = f"{reward[0]:.2f} -> {reward[1]:.2f}" if reward else brief(mean(rewards))
    planned, cost = number(run.settings, "trainer", "iterations"), run.compared(run.method, "cost")
    if planned is not None and len(run.iterations) < planned:
        told += f" ({len(run.iterations)} of {planned})"
    return {
        "reward": told,
        "drift": brief(mean(run.over_iterations("logdiff", "mean"))),
        "cost": "n/a" if cost is None else f"{cost:.2f}x",
    }
