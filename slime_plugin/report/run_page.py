"""Training runs as one self-contained HTML page: what happened in words, plots, the matrix, and every rollout's tree.

Nothing is loaded from anywhere, and a policy in the page's head keeps it so: the only script that may run is the one
that was put there. Text from records and configurations is escaped, or handed to the script as data, which shows it as
text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from string import Template

from slime_plugin.report.folder import RunFolder
from slime_plugin.report.headline import brief, sentences, share, tiles, together
from slime_plugin.report.numbers import shown
from slime_plugin.report.page import legend, read_part, table
from slime_plugin.report.run_charts import Part, parts
from slime_plugin.report.run_data import Run, ends, largest, mean, number, read_runs
from slime_plugin.report.summary import COMPARED
from slime_plugin.report.tree_view import BUDGET, Rollouts, embed_rollouts

_UNFOLDED = 8
"""Charts of one part that are shown at once."""
_MISSING = 2
"""Runs that are told what they lack."""
_CARDS = 3
"""Runs that get a card each; of more, the matrix says the same in less room."""


def run_page(folders: Sequence[RunFolder], *, budget: int = BUDGET) -> str:
    """The page of one or several runs; ``budget`` is how many bytes of rollouts may be embedded."""
    runs = read_runs(folders)
    rollouts = embed_rollouts(runs, budget)
    script = read_part("run_page.js")
    sections = list(parts(runs))
    names = [run.name for run in runs]
    return Template(read_part("run_page.html")).substitute(
        title=escape(f"MemoryWalker: {', '.join(names)}" if len(names) < 4 else f"MemoryWalker: {len(names)} runs"),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=read_part("roles.css") + read_part("run_page.css"),
        heading=_heading(runs),
        links="".join(f'<a href="#{part.id}">{escape(part.title)}</a>' for part in sections),
        tables=_matrix(runs) + _comparison_tables(runs),
        sections="".join(map(_section, sections)),
        embedded=escape(_embedded(rollouts)),
        damaged="".join(f'<p class="missing">{escape(line)}</p>' for line in _damaged(rollouts)),
        legend="".join(legend()),
        data=_as_data(rollouts.to_json(), names),
        script=script,
    )


def _heading(runs: Sequence[Run]) -> str:
    """What happened: of one run with its numbers, of some a card each, of many together."""
    if len(runs) > _CARDS:
        said = "".join(f"<li>{escape(sentence)}</li>" for sentence in together(runs))
        return f"<h1>{len(runs)} runs</h1><ul class=headline>{said}</ul>"
    found = []
    for run in runs:
        facts = [run.cell, f"{len(run.iterations)} of {_planned(run)} iterations", str(run.settings.get("model") or "")]
        said = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(run))
        found.append(
            f"<h1>{escape(run.name)}</h1><p class=facts>{' · '.join(escape(fact) for fact in facts if fact)}</p>"
            f"<ul class=headline>{said}</ul>"
        )
    if len(runs) == 1:
        numbers = "".join(
            f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(remark)}</small></div>'
            for name, value, remark in tiles(runs[0])
        )
        return f"{found[0]}<div class=tiles>{numbers}</div>"
    return f"<div class=runs>{''.join(f'<article>{body}</article>' for body in found)}</div>"


def _planned(run: Run) -> str:
    planned = number(run.settings, "trainer", "iterations")
    return shown(planned) if planned is not None else "n/a"


def _comparison_tables(runs: Sequence[Run]) -> str:
    """Per run, what was measured for every method on the same rollouts."""
    found: list[str] = []
    for run in runs:
        if not run.compared_methods:
            continue
        rows = []
        for name in run.compared_methods:
            numbers = {key: run.compared(name, key) for key in ("tokens", "teacher_tokens", "off_context", "cost")}
            rows.append(
                (
                    f"{name} (trained)" if name == run.method else name,
                    brief(run.compared(name, "logdiff", "mean")),
                    brief(run.compared(name, "logdiff", "max")),
                    share(run.compared(name, "share_trained")),
                    *(shown(numbers[key]) for key in ("off_context", "tokens", "teacher_tokens")),
                    "n/a" if numbers["cost"] is None else f"{numbers['cost']:.2f} x",
                )
            )
        heads = ("method", "drift, mean", "max", "trained", "off context", "tokens", "without gradient", "cost")
        basis = (
            f"{shown(number(run.comparison or {}, 'records'))} rollouts of iterations "
            f"{', '.join(str(i) for i in (run.comparison or {}).get('iterations', []))}; drift in nats per token"
        )
        body = f'<p class="text">{escape(basis)}</p><div class="wide">{table(heads, rows)}</div>'
        first = " open" if not found else ""
        found.append(
            f"<details{first}><summary>{escape(run.name)}</summary>{body}</details>" if len(runs) > 1 else body
        )
    return f"<section><h2>The same rollouts under every method</h2>{''.join(found)}</section>" if found else ""


def _matrix(runs: Sequence[Run]) -> str:
    """Methods by harnesses, with what each cell reached; only for several runs."""
    if len(runs) < 2:
        return ""
    harnesses = list(dict.fromkeys(run.harness for run in runs))
    order = list(COMPARED)
    methods = sorted(
        dict.fromkeys(run.method for run in runs), key=lambda m: order.index(m) if m in order else len(order)
    )
    head = "".join(f"<th>{escape(harness)}</th>" for harness in ("method", *harnesses))
    body = []
    for method in methods:
        cells = []
        for harness in harnesses:
            here = [run for run in runs if (run.method, run.harness) == (method, harness)]
            cells.append(f"<td>{'<hr>'.join(map(_cell, here)) or '<span class=soft>no run</span>'}</td>")
        body.append(f"<tr><th>{escape(method)}</th>{''.join(cells)}</tr>")
    text = (
        "Reward: first tenth of the iterations → last tenth, and the best iteration. Drift: mean over the run and "
        "largest, nats per token, of the trained method with the weights that sampled. Cost: of an update, against "
        "naive_compressed. Depth: share of the tape that compressed rollouts lost."
    )
    return (
        f'<section id="matrix"><h2>Methods by harnesses</h2><p class="text">{text}</p><div class="wide">'
        f'<table class="matrix"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div></section>'
    )


def _cell(run: Run) -> str:
    reward = ends(run.over_iterations("reward"))
    best = largest(run.over_iterations("reward"))
    cost = run.compared(run.method, "cost")
    lines = [
        ("reward", f"{reward[0]:.2f} → {reward[1]:.2f}" if reward else "n/a", f"best {best:.2f}" if best else ""),
        (
            "drift",
            brief(mean(run.over_iterations("logdiff", "mean"))),
            "max " + brief(largest(run.over_iterations("logdiff", "max"))),
        ),
        ("cost", "n/a" if cost is None else f"{cost:.2f} x", ""),
        (
            "depth",
            share(mean(run.over_iterations("depth"))),
            f"frequency {share(mean(run.over_iterations('frequency')))}",
        ),
    ]
    return "".join(
        f"<div><span>{name}</span><b>{escape(value)}</b><small>{escape(remark)}</small></div>"
        for name, value, remark in lines
    )


def _section(part: Part) -> str:
    """Many charts of several runs or harnesses are folded away, but for the first group."""
    text = f'<p class="text">{escape(part.text)}</p>' if part.text and part.groups else ""
    missing = "".join(f'<p class="missing">{escape(line)}</p>' for line in part.missing[:_MISSING])
    if len(part.missing) > _MISSING:
        missing += f'<p class="missing">And the same for {len(part.missing) - _MISSING} other runs.</p>'
    kind = "small charts" if part.small else "charts"
    groups = {name: charts for name, charts in part.groups.items() if charts}
    if len(groups) == 1 or sum(map(len, groups.values())) <= _UNFOLDED:
        together = "".join(chart for charts in groups.values() for chart in charts)
        grid = f'<div class="{kind}">{together}</div>' if together else ""
    else:
        grid = "".join(
            f"<details{' open' if i == 0 else ''}><summary>{escape(name)}</summary>"
            f'<div class="{kind}">{"".join(charts)}</div></details>'
            for i, (name, charts) in enumerate(groups.items())
        )
    return f'<section id="{part.id}"><h2>{escape(part.title)}</h2>{text}{grid}{missing}</section>'


def _embedded(rollouts: Rollouts) -> str:
    trees, every = len(rollouts.trees), len(rollouts.rows)
    if trees == every:
        return f"All {every:,} rollouts; click one for its tree."
    return (
        f"{every:,} rollouts, {trees:,} of them with their tree in this page: those that were compared, then the "
        "latest. memorywalker record show draws any other."
    )


def _damaged(rollouts: Rollouts) -> list[str]:
    return [f"Some records of {path} cannot be read; memorywalker record check says why." for path in rollouts.damaged]


def _as_data(rollouts: str, names: Sequence[str]) -> str:
    """JSON inside a script element, which only ``</script`` and ``<!--`` could end or change."""
    both = f'{{"runs":{json.dumps(names)},"rollouts":{rollouts}}}'
    return both.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
