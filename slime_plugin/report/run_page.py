"""Training runs as one self-contained HTML page: what happened in words, charts, the matrix, and every rollout's tree.

Nothing is loaded from anywhere, and a policy in the page's head enforces it: only the scripts that were put there may
run. Text from records and configurations is escaped, or passed to the scripts as data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from slime_plugin.report.charts import Chart, plotly_script
from slime_plugin.report.comparison_table import comparison_rows
from slime_plugin.report.formatting import format_brief, format_number, format_share
from slime_plugin.report.headline import sentences, sentences_of_all, tiles
from slime_plugin.report.matrix_table import denominators, methods_of, numbers
from slime_plugin.report.run_data import Run, largest, mean, number, read_runs
from slime_plugin.report.run_sections import Section, sections_of
from slime_plugin.report.templating import read_part, render
from slime_plugin.report.tree_view import BUDGET_BYTES, Rollouts, embed_rollouts
from slime_plugin.run.folder import RunFolder

_UNFOLDED = 8
"""Maximum number of unfolded charts in a section; above it, only those of the first run or harness are unfolded."""
_MISSING = 2
"""Maximum number of runs whose missing measurements are listed."""
_COMPARED = ("method", "mean", "max", "trained", "off context", "tokens", "cost")
"""Columns of a comparison; the page has their headings."""
_CARDS = 3
"""Maximum number of runs with a card each; above it, the matrix shows the same in less space."""


def run_page(folders: Sequence[RunFolder], *, budget: int = BUDGET_BYTES) -> str:
    """The page of one or several runs; ``budget`` is how many bytes of rollouts may be embedded."""
    runs = read_runs(folders)
    rollouts = embed_rollouts(runs, budget)
    sections = list(sections_of(runs))
    names = [run.name for run in runs]
    scripts = [Markup(plotly_script()), read_part("run_page.js")]
    figures = [chart.figure for section in sections for charts in section.groups.values() for chart in charts]
    return render(
        "run_page.html",
        title=f"MemoryWalker: {', '.join(names) if len(names) < 4 else f'{len(names)} runs'}",
        runs=names,
        cards=[_card(run) for run in runs] if len(runs) <= _CARDS else [],
        together=sentences_of_all(runs),
        tiles=tiles(runs[0]) if len(runs) == 1 else [],
        harnesses=list(dict.fromkeys(run.harness for run in runs)),
        matrix=_matrix(runs) if len(runs) > 1 else [],
        denominators=denominators(runs),
        comparisons=[(run.name, _basis(run), _comparison_rows(run)) for run in runs if run.compared_methods],
        sections=[(section, _folds(section), _missing(section)) for section in sections],
        embedded=_embedded(rollouts),
        damaged=rollouts.damaged,
        data=_as_data(names, figures, rollouts),
        scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
    )


def _card(run: Run) -> tuple[str, str, list[str]]:
    """Name, configuration and what happened."""
    progress = f"{len(run.iterations)} of {format_number(run.planned)} iterations"
    facts = [f"{run.method} x {run.harness}", progress, str(run.settings.get("model") or "")]
    return run.name, " · ".join(filter(None, facts)), sentences(run)


def _basis(run: Run) -> str:
    comparison = run.comparison or {}
    iterations = ", ".join(str(i) for i in comparison.get("iterations", []))
    records = format_number(number(comparison, "records"))
    return (
        f"{records} rollouts of iterations {iterations}; logdiff in nats per token; tokens with gradient + without; "
        f"multiples of {run.denominator}"
    )


def _comparison_rows(run: Run) -> list[list[str]]:
    """What was measured for every method on the same rollouts."""
    rows = list(comparison_rows(run.comparison or {}))
    for row in rows:
        row["method"] += " (trained)" * (row["method"] == run.method)
    return [[row[key] for key in _COMPARED] for row in rows]


def _matrix(runs: Sequence[Run]) -> list[tuple[str, list[list[list[tuple[str, str, str]]]]]]:
    """Methods by harnesses: the runs of each cell, with what they reached."""
    harnesses = list(dict.fromkeys(run.harness for run in runs))
    return [
        (
            method,
            [[_cell(run) for run in runs if (run.method, run.harness) == (method, harness)] for harness in harnesses],
        )
        for method in methods_of(runs)
    ]


def _cell(run: Run) -> list[tuple[str, str, str]]:
    shown, best = numbers(run, "→"), largest(run.over_iterations("reward"))
    depth, frequency = (mean(run.over_iterations(key)) for key in ("depth", "frequency"))
    return [
        ("reward", shown["reward"], f"best {best:.2f}" if best else ""),
        ("logdiff", shown["logdiff"], f"max {format_brief(run.largest_logdiff)}"),
        ("cost", shown["cost"], ""),
        ("depth", format_share(depth), f"frequency {format_share(frequency)}"),
    ]


def _folds(section: Section) -> list[tuple[str, list[Chart]]]:
    """Charts of several runs or harnesses by their name, if they are many; otherwise together."""
    groups = [(name, charts) for name, charts in section.groups.items() if charts]
    every = [chart for _, charts in groups for chart in charts]
    if len(groups) > 1 and len(every) > _UNFOLDED:
        return groups
    return [("", every)] if every else []


def _missing(section: Section) -> list[str]:
    others = len(section.missing) - _MISSING
    return [*section.missing[:_MISSING], *([f"And the same for {others} other runs."] if others > 0 else [])]


def _embedded(rollouts: Rollouts) -> str:
    trees, every = len(rollouts.trees), len(rollouts.rows)
    if trees == every:
        return f"All {every:,} rollouts; click one for its tree."
    return (
        f"{every:,} rollouts, {trees:,} of them with their tree in this page: those that were compared, then the "
        "latest. memorywalker record show draws any other."
    )


def _as_data(names: Sequence[str], figures: Sequence[dict[str, Any]], rollouts: Rollouts) -> Markup:
    """JSON inside a script element, which only ``</script`` and ``<!--`` could end or change."""
    charts = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    data = f'{{"runs":{json.dumps(names)},"charts":{charts},"rollouts":{rollouts.to_json()}}}'
    return Markup(data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
