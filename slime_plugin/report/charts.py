"""Small charts as SVG: lines, dots on a common axis, and bars, with ticks a person would have chosen.

Nothing but text is produced. Colours are names of CSS variables (``--mask4d``, ``--s0``), so that one drawing serves a
light and a dark page; sizes are in the units of the drawing, which the page scales. Numbers that do not exist leave a
gap, never a zero. All names are escaped.

A line chart carries its series and its axes as data (``data-chart``), for a page that wants to point at values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, Literal

from slime_plugin.report.axes import Axis
from slime_plugin.report.numbers import shown

WIDTH, HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 10, 36  # margins of the plotted box
_CHAR = 6.3
"""Width of a character of the charts' 11 px text."""
Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """A named line. ``colour`` is a CSS variable without its dashes."""

    name: str
    points: Sequence[Point]
    colour: str
    dash: str = ""
    """As SVG's ``stroke-dasharray``: lines that lie on each other stay visible if one has gaps."""
    faint: bool = False
    """In the background, without an entry in the legend."""
    kind: Literal["line", "stems", "dots"] = "line"
    """Values that come and go are better seen one by one than as pieces of a line."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log: bool = False,
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
    zero: bool = False,
    note: str = "",
    height: int = HEIGHT,
    width: int = WIDTH,
) -> str:
    """Lines over whole numbers. ``levels`` are named horizontal lines, ``marks`` vertical ones; ``zero`` is shown."""
    drawn = [one for one in series if any(_drawable(v, log) for _, v in one.points)]
    levels = {name: v for name, v in (levels or {}).items() if _drawable(v, log)}
    marks = marks or {}
    xs = [at for one in drawn for at, _ in one.points]
    ys = [v for one in drawn for _, v in one.points] + list(levels.values()) + [0.0] * (zero and not log)
    across = Axis.over(xs, _LEFT, width - _RIGHT, whole=True, wanted=max(3, width // 90), tight=True)
    wanted = height // 25 if log else max(3, height // 45)
    up = Axis.over(ys, height - _BOTTOM, _TOP, log=log, wanted=wanted)
    parts = [*_frame(across, up, x, y, width, height)]
    for name, level in levels.items():
        at = up(level)
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(width - _RIGHT - 3, at - 4 if at > _TOP + 14 else at + 12, name, "end", "level"))
    for name, mark in marks.items():
        at = across(mark)
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        room = at + _CHAR * len(name) < width - _RIGHT
        parts.append(_text(at + (4 if room else -4), _TOP + 11, name, "start" if room else "end", "mark"))
    for one in sorted(drawn, key=lambda one: not one.faint):
        parts += _line(one, across, up, len(one.points) <= 30) if one.kind == "line" else _single(one, across, up)
    named = [one for one in drawn if not one.faint]
    data = {
        "x": x,
        "box": [across.start, across.stop, up.stop, up.start],
        "range": [across.low, across.high],
        "series": [
            {"name": one.name, "colour": one.colour, "points": [[at, v, _pixel(up, v, log)] for at, v in one.points]}
            for one in named
        ],
    }
    legend = (
        [(one.name, one.colour, one.dash if one.kind == "line" else "dot") for one in named] if len(named) > 1 else []
    )
    return _figure(title, parts, (width, height), legend=legend, note=note, data=data)


def dot_chart(
    title: str, rows: Mapping[str, Mapping[str, float | None]], colours: Mapping[str, str], *, x: str, note: str = ""
) -> str:
    """One row per name, one dot per entry on a common logarithmic axis; entries of equal name have equal colour."""
    entries = list(dict.fromkeys(name for row in rows.values() for name in row))
    left = 14 + _CHAR * max(len(name) for name in rows)
    row = max(30, 11 * len(entries))
    height = _TOP + row * len(rows) + _BOTTOM
    values = [value for of in rows.values() for value in of.values()]
    across = Axis.over(values, left, WIDTH - _RIGHT - 8, log=True, wanted=8)
    base = height - _BOTTOM
    parts = []
    for tick, label in zip(across.ticks(), across.labels(), strict=True):
        parts.append(f'<line class="grid" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{_TOP}" y2="{base}"/>')
        parts.append(_text(across(tick), base + 15, label, "middle"))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, height - 5, x, "middle", "axis"))
    for i, (name, of) in enumerate(rows.items()):
        top = _TOP + i * row
        parts.append(_text(left - 10, top + row / 2 + 4, name, "end"))
        parts.append(f'<line class="rule" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{top + row}" y2="{top + row}"/>')
        for j, entry in enumerate(entries):
            value = of.get(entry)
            if value is not None and _drawable(value, True):
                at = top + row * (j + 1) / (len(entries) + 1)
                tip = escape(f"{name}, {entry}: {shown(value)}")
                parts.append(
                    f'<circle cx="{across(value):.1f}" cy="{at:.1f}" r="4" '
                    f'style="fill:var(--{colours[entry]})"><title>{tip}</title></circle>'
                )
    legend = [(entry, colours[entry], "dot") for entry in entries]
    return _figure(title, parts, (WIDTH, height), legend=legend, note=note)


def bar_chart(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    *,
    say: Callable[[float], str] = shown,
    note: str = "",
) -> str:
    """One horizontal bar per name, stacked from its parts, with its sum at its end.

    A part takes the colour of its own name, or of its bar's if it has none. ``say`` puts a number into words.
    """
    sums = {name: sum(parts.values()) for name, parts in bars.items()}
    words = {name: say(value) for name, value in sums.items()}
    left = 14 + _CHAR * max(map(len, bars))
    right = 14 + _CHAR * max(map(len, words.values()))
    row, bar = 26, 16
    height = 6 + row * len(bars)
    across = Axis(0.0, max([*sums.values(), 1e-300]), left, WIDTH - right)
    parts = []
    for i, (name, of) in enumerate(bars.items()):
        top = 6 + i * row
        parts.append(_text(left - 10, top + 12, name, "end"))
        done = 0.0
        for part, value in of.items():
            x, done = across(done), done + value
            colour = colours.get(part) or colours[name]
            tip = escape(f"{name}{f', {part}' if part else ''}: {say(value)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{across(done) - x:.1f}" height="{bar}" '
                f'style="fill:var(--{colour})"><title>{tip}</title></rect>'
            )
        parts.append(_text(across(done) + 6, top + 12, words[name], "start", "value"))
    named = [part for part in dict.fromkeys(part for of in bars.values() for part in of) if part in colours and part]
    legend = [(part, colours[part], "box") for part in named]
    return _figure(title, parts, (WIDTH, height), legend=legend, note=note)


def column_chart(
    title: str,
    columns: Sequence[tuple[int, Mapping[str, float]]],
    colours: Mapping[str, str],
    *,
    x: str,
    y: str,
    note: str = "",
    width: int = WIDTH,
    height: int = HEIGHT,
) -> str:
    """Stacked columns over whole numbers. Where they are more than pixels, neighbours are averaged into one."""
    names = [name for name in colours if any(parts.get(name) for _, parts in columns)]
    columns = _thinned(columns, names, (width - _LEFT - _RIGHT) // 3)
    sums = [sum(parts.get(name, 0.0) for name in names) for _, parts in columns]
    first, last = columns[0][0], columns[-1][0]
    spacing = min((b - a for (a, _), (b, _) in pairwise(columns)), default=1)
    across = Axis(
        first - spacing / 2, last + spacing / 2, _LEFT, width - _RIGHT, whole=True, wanted=max(3, width // 90)
    )
    up = Axis.over([0.0, *sums], height - _BOTTOM, _TOP, wanted=max(3, height // 45))
    wide = across(first + spacing) - across(first)
    gap = min(2.0, wide / 4)
    parts = [*_frame(across, up, x, y, width, height)]
    for (at, of), total in zip(columns, sums, strict=True):
        done = 0.0
        told = ", ".join(f"{name} {shown(of[name])}" for name in names if of.get(name))
        boxes = []
        for name in names:
            value = of.get(name, 0.0)
            if value:
                bottom, done = up(done), done + value
                boxes.append(
                    f'<rect x="{across(at) - wide / 2 + gap / 2:.2f}" y="{up(done):.2f}" width="{wide - gap:.2f}" '
                    f'height="{bottom - up(done):.2f}" style="fill:var(--{colours[name]})"/>'
                )
        parts.append(f"<g>{''.join(boxes)}<title>{escape(f'{x} {at}: {shown(total)} ({told})')}</title></g>")
    return _figure(title, parts, (width, height), legend=[(name, colours[name], "box") for name in names], note=note)


@dataclass(slots=True)
class _Path:
    """Pieces of a line between its gaps."""

    pieces: list[list[str]] = field(default_factory=lambda: [[]])

    def add(self, at: str | None) -> None:
        if at is None:
            self.pieces.append([])
        else:
            self.pieces[-1].append(at)


def _single(one: Series, across: Axis, up: Axis) -> list[str]:
    """A dot for every value, on a stem if the series wants one."""
    parts = []
    for at, value in one.points:
        if value is None or not _drawable(value, up.log) or (value == 0 and one.kind == "stems"):
            continue
        x, y = across(at), up(value)
        if one.kind == "stems":
            stem = f'x1="{x:.1f}" x2="{x:.1f}" y1="{up.start:.1f}" y2="{y:.1f}" style="stroke:var(--{one.colour})"'
            parts.append(f'<line class="stem" {stem}/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" style="fill:var(--{one.colour})"/>')
    return parts


def _line(one: Series, across: Axis, up: Axis, with_dots: bool) -> list[str]:
    path = _Path()
    dots: list[str] = []
    style = f"stroke:var(--{one.colour})" + (f";stroke-dasharray:{one.dash}" if one.dash else "")
    for at, value in one.points:
        if value is None or not _drawable(value, up.log):
            path.add(None)
            continue
        x, y = across(at), up(value)
        path.add(f"{x:.1f},{y:.1f}")
        if with_dots and not one.faint:
            dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" style="fill:var(--{one.colour})"/>')
    kind = ' class="faint"' if one.faint else ""
    lines = [f'<polyline{kind} points="{" ".join(piece)}" style="{style}"/>' for piece in path.pieces if len(piece) > 1]
    if not with_dots:  # a point between two gaps would not be seen
        lonely = (piece[0].split(",") for piece in path.pieces if len(piece) == 1)
        dots = [f'<circle cx="{x}" cy="{y}" r="2" style="fill:var(--{one.colour})"/>' for x, y in lonely]
    return [*lines, *dots]


def _frame(across: Axis, up: Axis, x: str, y: str, width: int, height: int) -> Iterable[str]:
    for tick, label in zip(up.ticks(), up.labels(), strict=True):
        at = up(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 7, at + 4, label, "end")
    base = height - _BOTTOM
    yield f'<line class="base" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{base}" y2="{base}"/>'
    for tick, label in zip(across.ticks(), across.labels(), strict=True):
        yield f'<line class="tick" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{base}" y2="{base + 4}"/>'
        yield _text(across(tick), base + 16, label, "middle")
    yield _text((_LEFT + width - _RIGHT) / 2, height - 4, x, "middle", "axis")
    turned = f'transform="translate(11 {(_TOP + base) / 2:.0f}) rotate(-90)"'
    yield f'<text class="axis" text-anchor="middle" {turned}>{escape(y)}</text>'


def _figure(
    title: str,
    parts: Iterable[str],
    size: tuple[int, float],
    *,
    legend: Sequence[tuple[str, str, str]] = (),
    note: str = "",
    data: Mapping[str, Any] | None = None,
) -> str:
    keys = "".join(_key(*entry) for entry in legend)
    attached = f' data-chart="{escape(json.dumps(data, separators=(",", ":")))}"' if data else ""
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>'
        f"{f'<span class=note>{escape(note)}</span>' if note else ''}</figcaption>"
        f"{f'<div class=keys>{keys}</div>' if keys else ''}"
        f'<svg viewBox="0 0 {size[0]} {size[1]:g}" role="img" aria-label="{escape(title)}"{attached}>'
        f"{''.join(parts)}</svg></figure>"
    )


def _key(name: str, colour: str, kind: str) -> str:
    style = f"var(--{colour})"
    if kind == "box":
        sign = f'<rect x="1" y="1" width="12" height="10" rx="2" style="fill:{style}"/>'
    elif kind == "dot":
        sign = f'<circle cx="7" cy="6" r="4" style="fill:{style}"/>'
    else:
        dash = f";stroke-dasharray:{kind}" if kind else ""
        sign = f'<line x1="0" x2="22" y1="6" y2="6" style="stroke:{style};stroke-width:2.5{dash}"/>'
    width = 14 if kind in ("box", "dot") else 22
    return f'<span><svg width="{width}" height="12" aria-hidden="true">{sign}</svg>{escape(name)}</span>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text{css} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _thinned(
    columns: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str], most: int
) -> Sequence[tuple[int, Mapping[str, float]]]:
    size = -(-len(columns) // most)
    if size == 1:
        return columns
    groups = [columns[i : i + size] for i in range(0, len(columns), size)]
    return [
        (group[0][0], {name: sum(of.get(name, 0.0) for _, of in group) / len(group) for name in names})
        for group in groups
    ]


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _pixel(up: Axis, value: float | None, log: bool) -> float | None:
    return round(up(value), 1) if value is not None and _drawable(value, log) else None
