"""Charts as plotly figures: lines, dots on a common axis, and stacked bars.

Series colours are legible on a light and a dark page; text, grid and background take the page's colours when it draws
them. A number that does not exist leaves a gap, never a zero. Names are escaped: plotly reads markup in them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from slime_plugin.errors import MemoryWalkerError

if TYPE_CHECKING:
    import plotly.graph_objects as go

Point = tuple[float, float | None]
PALETTE = (
    *("#3b7ce8", "#d97706", "#0d9488", "#dc4a64", "#8b5cf6", "#5f9a0c", "#0891b2", "#c04ad0", "#a16b2f", "#64748b"),
    *("#e0538f", "#178a4c"),
)
"""Each has a contrast of at least 3 with a white and with a dark page."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_HEIGHT, _SMALL = 270, 210  # pixels


class Colours:
    """A colour per name, in the order in which names are first asked for."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = list(dict.fromkeys(names))

    def index(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def __getitem__(self, name: str) -> str:
        """
        >>> colours = Colours(["a", "b"])
        >>> colours["b"] == PALETTE[1], colours["new"] == PALETTE[2], colours["b"] == PALETTE[1]
        (True, True, True)
        """
        index = self.index(name)
        return PALETTE[index] if index < len(PALETTE) else f"hsl({index * 137 % 360}, 55%, 50%)"

    def dash(self, name: str) -> str:
        """A dash per name, so that lines that lie on each other stay visible."""
        return DASHES[self.index(name) % len(DASHES)]


@dataclass(frozen=True, slots=True)
class Series:
    """A named series of a line chart."""

    name: str
    points: Sequence[Point]
    colour: str = PALETTE[0]
    dash: str = "solid"
    dots: bool = False
    """Without a line: values with gaps between them."""
    background: bool = False
    """Faint, and not in the legend."""

    def trace(self, log: bool) -> dict[str, Any]:
        dense = len(self.points) > 30  # small dots even then: a point between two gaps has no line
        return {
            "name": _text(self.name),
            "x": [at for at, _ in self.points],
            "y": [_or_gap(value, log) for _, value in self.points],
            "mode": "markers" if self.dots else "lines" if self.background else "lines+markers",
            "line": {"dash": self.dash, "width": 1 if self.background else 2},
            "marker": {"color": self.colour, "size": 6 if self.dots else 2.5 if dense else 5},
            **({"opacity": 0.35, "hoverinfo": "skip", "showlegend": False} if self.background else {}),
        }


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    figure: dict[str, Any]
    """In plotly's JSON form."""
    note: str = ""


def check_plotly() -> None:
    if importlib.util.find_spec("plotly") is None:
        raise MemoryWalkerError("charts need plotly: pip install 'memorywalker[report]'")


def plotly_script() -> str:
    """The JavaScript library that draws the figures."""
    check_plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log: bool = False,
    zero: bool = False,
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
    small: bool = False,
) -> list[Chart]:
    """Series over whole numbers; no chart if there is no number to draw.

    ``levels`` are named horizontal lines, ``marks`` vertical ones. ``zero``: the y axis includes 0.
    """
    drawn = [one for one in series if any(_drawable(value, log) for _, value in one.points)]
    if not drawn:
        return []
    figure = _figure([one.trace(log) for one in drawn], x, y, height=_SMALL if small else _HEIGHT)
    figure.update_layout(showlegend=sum(not one.background for one in drawn) > 1)
    _whole_numbers(figure, [at for one in drawn for at, _ in one.points])
    figure.update_yaxes(type="log" if log else "linear", rangemode="tozero" if zero and not log else "normal")
    if not log and max(value or 0 for one in drawn for _, value in one.points) >= 1000:
        figure.update_yaxes(tickformat="~s")
    for name, level in (levels or {}).items():
        if _drawable(level, log):
            figure.add_hline(level, line={"dash": "dot", "width": 1.2})
            at = math.log10(level) if log else level  # plotly takes an annotation's logarithm, but a shape's value
            anchor = {"x": 1, "xref": "x domain", "xanchor": "right", "y": at, "yanchor": "bottom"}
            figure.add_annotation(anchor, text=_text(name), showarrow=False)
    for name, mark in (marks or {}).items():
        figure.add_vline(mark, line={"dash": "dash", "width": 1.2}, annotation_text=_text(name))
    return [Chart(title, figure.to_plotly_json())]


def dot_chart(title: str, rows: Mapping[str, Mapping[str, float | None]], colours: Colours, *, x: str) -> list[Chart]:
    """A row per name, a dot per entry on a common logarithmic axis. Entries of equal name have the same colour."""
    traces = [
        {
            "mode": "markers",
            "orientation": "h",
            "name": _text(entry),
            "y": [_text(name) for name in rows],
            "x": [_or_gap(row.get(entry), log=True) for row in rows.values()],
            "marker": {"color": colours[entry], "size": 9},
        }
        for entry in dict.fromkeys(entry for row in rows.values() for entry in row)
    ]
    if not traces:
        return []
    figure = _figure(traces, x, "", height=max(_HEIGHT, 110 + 30 * len(rows)))
    figure.update_layout(hovermode="y unified", showlegend=True, scattermode="group")
    figure.update_xaxes(type="log", showgrid=True)
    figure.update_yaxes(type="category", autorange="reversed")
    return [Chart(title, figure.to_plotly_json())]


def bar_chart(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    colours: Colours,
    *,
    x: str,
    text: Callable[[float], str] = "{:,}".format,
    note: str = "",
) -> list[Chart]:
    """A horizontal bar per name, stacked from its parts; no chart if there is nothing to stack.

    A part has the colour of its name; the only part of bars without parts is "" and has the colour of its bar.
    """
    parts = _parts(bars.values(), colours)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _text(part),
            "y": [_text(name) for name in bars],
            "x": [of.get(part) for of in bars.values()],
            "text": [text(of[part]) if of.get(part) else "" for of in bars.values()],
            "marker": {"color": colours[part] if part else [colours[name] for name in bars]},
        }
        for part in parts
    ]
    if not traces:
        return []
    figure = _figure(traces, x, "", height=100 + 30 * len(bars))
    figure.update_layout(barmode="stack", hovermode="closest", showlegend=parts != [""])
    figure.update_xaxes(showgrid=True)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return [Chart(title, figure.to_plotly_json(), note)]


def column_chart(
    title: str, columns: Mapping[int, Mapping[str, float]], colours: Colours, *, x: str, y: str
) -> list[Chart]:
    """Stacked columns over whole numbers; no chart if there is nothing to stack."""
    traces = [
        {
            "type": "bar",
            "name": _text(part),
            "x": list(columns),
            "y": [of.get(part) for of in columns.values()],
            "marker": {"color": colours[part]},
        }
        for part in _parts(columns.values(), colours)
    ]
    if not traces:
        return []
    figure = _figure(traces, x, y)
    figure.update_layout(barmode="stack", showlegend=True)
    _whole_numbers(figure, list(columns))
    return [Chart(title, figure.to_plotly_json())]


def _parts(bars: Iterable[Mapping[str, float]], colours: Colours) -> list[str]:
    """Names of parts in the order of their colours."""
    return sorted(dict.fromkeys(part for of in bars for part, value in of.items() if value), key=colours.index)


def _figure(traces: Sequence[dict[str, Any]], x: str, y: str, height: int = _HEIGHT) -> go.Figure:
    check_plotly()
    import plotly.graph_objects as go

    figure = go.Figure(traces)
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    margin = {"l": 8, "r": 14, "t": 8, "b": 8}
    figure.update_layout(template=None, height=height, margin=margin, legend=legend, hovermode="x unified")
    figure.update_xaxes(title={"text": x, "standoff": 6}, showgrid=False, hoverformat=",.4~g")
    figure.update_yaxes(title={"text": y, "standoff": 8}, hoverformat=",.3~g")
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(automargin=True, exponentformat="power")
    return figure


def _whole_numbers(figure: go.Figure, values: Sequence[float]) -> None:
    """No tick between two whole numbers."""
    first, last = min(values), max(values)
    figure.update_xaxes(tickformat=",d", dtick=1 if last - first < 6 else None)
    if first == last:
        figure.update_xaxes(range=[first - 0.5, first + 0.5])


def _text(name: str) -> str:
    """Plotly takes some markup in names; here it is text."""
    return escape(name, quote=False)


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _or_gap(value: float | None, log: bool) -> float | None:
    return value if _drawable(value, log) else None
