"""A record as one self-contained HTML page: staircase, edits, numbers, and what each method trains.

No script is needed to read it, and nothing is loaded from anywhere; a few lines of script only zoom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slime_plugin.methods import METHODS, lay_out
from slime_plugin.record import Record
from slime_plugin.record.arrays import equal_spans
from slime_plugin.report.formatting import format_lost
from slime_plugin.report.staircase import Staircase, TokenRole
from slime_plugin.report.templating import render
from slime_plugin.tree import Counts, Trajectory, count

_NAMED_UP_TO = 240
"""Tape tokens up to which every token gets a box with its name."""


def record_page(record: Record) -> str:
    trajectory = Trajectory.of(record)
    staircase = Staircase.of(trajectory)
    counts = count(trajectory)
    length = len(record)
    named = length <= _NAMED_UP_TO
    cell = 9 + 7 * max(1, min(9, max(map(len, staircase.pieces)))) if named else 0  # pixels per token
    steps = [f"edit {k}: {step}" for k, step in enumerate(staircase.steps)]
    return render(
        "record_page.html",
        title=record.label,
        facts=staircase.facts,
        layers=[(staircase.describe(k), step, list(_boxes(staircase, k, cell))) for k, step in enumerate([*steps, ""])],
        width=f"{length * cell}px" if named else "100%",
        edits=list(_edit_rows(staircase)),
        counts=counts,
        methods=list(_method_rows(trajectory, counts)),
    )


@dataclass(frozen=True, slots=True)
class _Box:
    """A token by name, or, on a tape too long for that, tokens of equal role."""

    role: TokenRole
    x: str
    """In percent of the tape where there are no names, so that the drawing follows the zoom."""
    width: str
    middle: float
    name: str
    tip: str


def _boxes(staircase: Staircase, k: int, cell: int) -> Iterator[_Box]:
    roles, length = staircase.roles[k], staircase.roles.shape[1]
    for start, stop in pairwise(range(length + 1)) if cell else equal_spans(roles):
        role = TokenRole(roles[start])
        if role is TokenRole.ABSENT and not (
            cell and staircase.trajectory.born[start] < k
        ):  # it was live before, if it is named
            continue
        if cell:
            x, width, name = f"{start * cell + 1}", f"{cell - 2}", _short(staircase.pieces[start])
        else:
            x, width, name = f"{100 * start / length:.4f}%", f"{100 * (stop - start) / length:.4f}%", ""
        yield _Box(role, x, width, (start + 0.5) * cell, name, _tip(staircase, k, start, stop, role))


def _tip(staircase: Staircase, k: int, start: int, stop: int, role: TokenRole) -> str:
    tokens = f"token {start}" if stop == start + 1 else f"tokens {start} to {stop - 1} ({stop - start})"
    text = " ".join(staircase.pieces[start : min(stop, start + 24)]) + (" ..." if stop - start > 24 else "")
    tip = f"layer {k}, {tokens}: {role.meaning}\n{text}"
    if role not in (TokenRole.SAMPLED, TokenRole.SAMPLED_EVICTED):
        return tip
    return f"{tip}\nmean log-probability {staircase.trajectory.record.logprobs[start:stop].mean():.3f}"


def _edit_rows(staircase: Staircase) -> Iterator[tuple[object, ...]]:
    for k, step in enumerate(staircase.steps):
        positions = np.sort(step.evicted)
        runs = equal_spans(positions - np.arange(positions.size))  # consecutive positions
        spans = [f"[{positions[start]}, {positions[stop - 1] + 1})" for start, stop in runs]
        shown = ", ".join(spans[:12]) + (", ..." if len(spans) > 12 else "")
        yield k, step.kind, step.author or "", step.junction, step.evicted.size, step.restored.size, shown


def _method_rows(trajectory: Trajectory, counts: Counts) -> Iterator[tuple[object, ...]]:
    for name, method in METHODS.items():
        layout = lay_out(trajectory, method)
        trained, lost = f"{layout.trained} of {counts.sampled}", format_lost(layout.lost)
        yield name, len(layout.rows), layout.tokens, layout.teacher_tokens, trained, layout.off_context, lost


def _short(piece: str) -> str:
    piece = piece.replace("\n", "⏎")
    return piece if len(piece) <= 9 else piece[:8] + "…"
