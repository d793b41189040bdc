"""The staircase in a terminal: every token by name where they fit, blocks of tokens where they do not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from slime_plugin.record import Record
from slime_plugin.report.staircase import Role, Staircase
from slime_plugin.tree import Counts, Trajectory, count

# Each role has a colour and, for terminals and files without colour, a mark and a block of its own.
_STYLES = {
    Role.ABSENT: "bright_black",
    Role.PROMPT: "white on blue",
    Role.CONTEXT: "default on grey27",
    Role.GENERATED: "black on green",
    Role.EVICTED: "white on red",
    Role.RESTORED: "black on magenta",
}
_MARKS = {
    Role.ABSENT: " ",
    Role.PROMPT: ">",
    Role.CONTEXT: " ",
    Role.GENERATED: "+",
    Role.EVICTED: "-",
    Role.RESTORED: "^",
}
_BLOCKS = {
    Role.ABSENT: " ",
    Role.PROMPT: "▒",
    Role.CONTEXT: "░",
    Role.GENERATED: "█",
    Role.EVICTED: "▚",
    Role.RESTORED: "▲",
}
_WEIGHTS = {Role.EVICTED: 4.0, Role.RESTORED: 4.0, Role.GENERATED: 1.5}
"""In a block of many tokens the most frequent role is shown; these count for more, since they are what one looks
for."""


def draw_staircase(record: Record, console: Console) -> None:
    trajectory = Trajectory.of(record)
    staircase = Staircase.of(trajectory)
    gutter = len(f"layer {trajectory.layers - 1} ")
    tail = max(len(_tail(staircase, k)) for k in range(trajectory.layers)) + 1
    room = max(20, console.width - gutter - tail)
    names = [_name(piece) for piece in staircase.pieces[:room]]
    cell = max(map(cell_len, names)) + 2
    by_name = cell * len(record) <= room
    console.print(Text(f"{record.label}: {len(record)} tokens, {trajectory.layers} live contexts", style="bold"))
    if not by_name:
        scale = -(-len(record) // room)
        if scale > 1:
            console.print(f"one column is {scale} tokens of the tape", style="bright_black")
    for k in range(trajectory.layers):
        strip = _named(staircase.roles[k], names, cell) if by_name else _blocks(staircase.roles[k], room)
        line = Text(f"layer {k} ".rjust(gutter))
        line.append_text(strip)
        line.append(" " + _tail(staircase, k), style="bright_black")
        console.print(line, no_wrap=True, overflow="crop")
        if k < trajectory.layers - 1:
            console.print(Text(" " * gutter + f"└ {staircase.steps[k]}", style="yellow"), no_wrap=True, overflow="crop")
    console.print(_legend(_MARKS if by_name else _BLOCKS))
    console.print(_numbers(count(trajectory)))


def _tail(staircase: Staircase, k: int) -> str:
    live, sampled = staircase.trajectory.views[k].size, int(staircase.sampled[k].sum())
    return f"{live} live, {sampled} sampled"


def _name(piece: str) -> str:
    """A token's text in one short, printable word."""
    word = piece.replace("\n", "⏎")
    word = word if word.isprintable() else repr(word)[1:-1]
    return word if len(word) <= 10 else word[:9] + "…"


def _named(roles: NDArray[np.uint8], names: list[str], cell: int) -> Text:
    strip = Text()
    for value, name in zip(roles.tolist(), names, strict=True):
        role = Role(value)
        if role is Role.ABSENT:
            strip.append(" " * cell)
        else:
            strip.append(set_cell_size(_MARKS[role] + name, cell - 1), style=_STYLES[role])
            strip.append(" ")
    return strip


def _blocks(roles: NDArray[np.uint8], room: int) -> Text:
    length = roles.size
    scale = -(-length // room)
    columns = np.arange(length) // scale
    weight = np.zeros((len(Role), columns[-1] + 1))
    for role in Role:
        weight[role] = np.bincount(columns[roles == role], minlength=columns[-1] + 1) * _WEIGHTS.get(role, 1.0)
    strip = Text()
    wide = max(1, room // length)  # a short tape fills the room too
    for value in weight.argmax(axis=0).tolist():
        role = Role(value)
        strip.append(_BLOCKS[role] * wide, style=_STYLES[role].split(" on ")[-1])
    return strip


def _legend(signs: dict[Role, str]) -> Text:
    legend = Text("\n")
    for role in (Role.PROMPT, Role.CONTEXT, Role.GENERATED, Role.EVICTED, Role.RESTORED):
        legend.append(f" {signs[role]} ", style=_STYLES[role])
        legend.append(f" {role.meaning}   ")
    return legend


def _numbers(counts: Counts) -> str:
    sizes = str(list(counts.E)) if counts.K <= 8 else f"{sum(counts.E) / counts.K:.0f} on average"
    evicted = f", |E| = {sizes}" if counts.K else ""
    share = f", {counts.trie_ratio:.2f} of it" if counts.trie_ratio is not None else ""
    return (
        f"K = {counts.K} edits{evicted}, D = {counts.D} diverging leaves, L = {counts.L}, C = {counts.C}\n"
        f"branches {counts.branch_tokens} tokens, prefix tree {counts.trie_tokens}{share}"
    )
