"""A record as one self-contained HTML page: staircase, edits, numbers, and what each method makes of it.

No script is needed to read it, and nothing is loaded from anywhere; a few lines of script only zoom. All text that
comes from the record is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from itertools import pairwise
from string import Template

import numpy as np

from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.report.staircase import SHOWN, Role, Staircase
from slime_plugin.report.summary import COMPARED
from slime_plugin.tree import Counts, Trajectory, count

_NAMED_UP_TO = 240
"""Tape tokens up to which every token gets a box with its name."""
_ROW, _BOX, _GAP = 22, 20, 26  # pixels: height of a row's strip, height of a box, room for the line below it


def record_page(record: Record) -> str:
    trajectory = Trajectory.of(record)
    staircase = Staircase.of(trajectory)
    counts = count(trajectory)
    facts = [(key, value) for key, value in record.meta.to_json().items() if isinstance(value, str | int | float)]
    template = Template(read_part("page.html"))
    return template.substitute(
        title=escape(record.label),
        roles=read_part("roles.css"),
        facts="".join(f"<span><b>{escape(str(key))}</b> {escape(str(value))}</span>" for key, value in facts),
        legend="".join(legend()),
        staircase=_svg(staircase),
        edits=table(
            ("edit", "kind", "author", "after tokens", "evicts", "restores", "spans evicted"), _edit_rows(staircase)
        ),
        counts=table(("", "number", "meaning"), _count_rows(counts)),
        methods=table(
            ("method", "rows", "tokens", "without gradient", "trained", "off context", "not trained"),
            _method_rows(trajectory, counts),
        ),
    )


def read_part(name: str) -> str:
    """A file beside this module: a template, a style sheet, a script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _svg(staircase: Staircase) -> str:
    """One strip per layer; a box per token where they are few, a box per run of equal role where they are many."""
    layers, length = staircase.roles.shape
    named = length <= _NAMED_UP_TO
    cell = 9 + 7 * max(1, min(9, max(map(len, staircase.pieces)))) if named else 0  # pixels per token
    boxes = []
    for k in range(layers):
        top = k * (_ROW + _GAP)
        for start, stop in _runs(staircase, k, named):
            boxes.append(_box(staircase, k, start, stop, top, cell))
    height = layers * (_ROW + _GAP) - _GAP + 2
    width = f"{length * cell}px" if named else "100%"
    steps = [f"edit {k}: {step}" for k, step in enumerate(staircase.steps)]
    labels = "".join(
        f'<div style="height:{_ROW + _GAP}px"><b>layer {k}</b> {staircase.describe(k)}<br><i>{escape(step)}</i></div>'
        for k, step in enumerate([*steps, ""])
    )
    # Where a box has no name, x is in percent of the tape, so that the drawing follows the zoom.
    return (
        f'<div class="stairs"><div class="layers">{labels}</div><div class="scroll">'
        f'<svg id="tape" role="img" aria-label="live contexts" style="width:{width}" height="{height}">'
        f"{''.join(boxes)}</svg></div></div>"
    )


def _runs(staircase: Staircase, k: int, named: bool) -> Iterator[tuple[int, int]]:
    length = staircase.roles.shape[1]
    if named:
        yield from ((p, p + 1) for p in range(length))
        return
    edges = [0, *(np.flatnonzero(np.diff(staircase.roles[k])) + 1).tolist(), length]
    yield from pairwise(edges)


def _box(staircase: Staircase, k: int, start: int, stop: int, top: int, cell: int) -> str:
    role = Role(staircase.roles[k, start])
    length = staircase.roles.shape[1]
    name = escape(_short(staircase.pieces[start])) if cell else ""
    if role is Role.ABSENT:
        was_live = staircase.trajectory.born[start] < k
        x = start * cell + cell / 2
        return f'<text class="gone" x="{x:g}" y="{top + 15}">{name}</text>' if name and was_live else ""
    tip = escape(_tip(staircase, k, start, stop, role))
    if cell:
        at = f'x="{start * cell + 1}" width="{cell - 2}"'
        label = f'<text x="{start * cell + cell / 2:g}" y="{top + 15}">{name}</text>'
    else:
        at = f'x="{100 * start / length:.4f}%" width="{100 * (stop - start) / length:.4f}%"'
        label = ""
    return f'<g><rect class="{_css(role)}" {at} y="{top + 1}" height="{_BOX}"/>{label}<title>{tip}</title></g>'


def _css(role: Role) -> str:
    """``generated evicted`` is a class of its own and both of its parts."""
    return role.name.lower().replace("_", " ")


def _tip(staircase: Staircase, k: int, start: int, stop: int, role: Role) -> str:
    tokens = f"token {start}" if stop == start + 1 else f"tokens {start} to {stop - 1} ({stop - start})"
    text = " ".join(staircase.pieces[start : min(stop, start + 24)]) + (" ..." if stop - start > 24 else "")
    tip = f"layer {k}, {tokens}: {role.meaning}\n{text}"
    if role not in (Role.GENERATED, Role.GENERATED_EVICTED):
        return tip
    return f"{tip}\nmean log-probability {staircase.trajectory.record.logprobs[start:stop].mean():.3f}"


def _edit_rows(staircase: Staircase) -> Iterator[tuple[object, ...]]:
    for k, step in enumerate(staircase.steps):
        spans = _spans(np.sort(step.evicted))
        shown = ", ".join(f"[{a}, {b})" for a, b in spans[:12]) + (", ..." if len(spans) > 12 else "")
        yield k, step.kind, step.author or "", step.junction, step.evicted.size, step.restored.size, shown


def _spans(positions: np.ndarray) -> list[tuple[int, int]]:
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if part.size]


def _count_rows(counts: Counts) -> Iterator[tuple[object, ...]]:
    yield "K", counts.K, "edits"
    yield "D", counts.D, "diverging leaves: sampled tokens whose prefix is another one in the final context"
    yield "L", counts.L, "tokens on the tape"
    yield "C", counts.C, "tokens of the final context"
    yield "R", counts.R, f"sampled tokens, of {counts.sampled} in all"
    yield "branches", counts.branch_tokens, "tokens, if every branch is computed on its own"
    yield "prefix tree", counts.trie_tokens, "tokens, if every distinct prefix is computed once"
    yield "evicted", f"{counts.compression:.1%}", "of the tape left the live context at least once"


def _method_rows(trajectory: Trajectory, counts: Counts) -> Iterator[tuple[object, ...]]:
    for name, method in COMPARED.items():
        layout = lay_out(trajectory, method)
        lost = ", ".join(f"{number} {cause}" for cause, number in layout.lost.items()) or "none"
        trained = f"{layout.trained} of {counts.sampled}"
        yield name, len(layout.rows), layout.tokens, layout.teacher_tokens, trained, layout.off_context, lost


def legend() -> Iterator[str]:
    """The roles of a token, each with its box."""
    for role in SHOWN:
        box = f'<rect class="{_css(role)}" x="1" y="1" width="16" height="12"/>'
        yield f'<span><svg width="18" height="14">{box}</svg> {escape(role.meaning)}</span>'


def table(headings: Iterable[str], rows: Iterable[tuple[object, ...]]) -> str:
    """Everything in it is escaped."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _short(piece: str) -> str:
    piece = piece.replace("\n", "⏎")
    return piece if len(piece) <= 9 else piece[:8] + "…"
