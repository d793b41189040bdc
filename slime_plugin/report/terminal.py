"""The staircase in a terminal: every token by name where they fit, blocks of tokens where they do not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from slime_plugin.record import Record
from slime_plugin.record.labels import printable
from slime_plugin.report.staircase import SHOWN, Role, Staircase
from slime_plugin.tree import Counts, Trajectory, count

# Each role has a colour and, for terminals and files without colour, a sign of its own. Names are written behind their
# sign; blocks are drawn with it, in ASCII where the terminal knows no other characters.
_SIGNS = {
    Role.ABSENT: (" ", " ", "default", "default"),
    Role.PROMPT: (">", "▒", "black on bright_blue", "bright_blue"),
    Role.CONTEXT: (".", "░", "black on grey70", "grey50"),
    Role.GENERATED: ("+", "█", "black on green", "green"),
    Role.RESTORED: ("^", "▲", "black on magenta", "magenta"),
    Role.EVICTED: ("-", "▚", "white on red", "red"),
    Role.GENERATED_EVICTED: ("x", "▓", "black on yellow", "yellow"),
}


def draw_staircase(record: Record, console: Console) -> None:
    trajectory = Trajectory.of(record)
    staircase = Staircase.of(trajectory)
    gutter = len(f"layer {trajectory.layers - 1} ")
    tails = [staircase.describe(k) for k in range(trajectory.layers)]
    room = max(20, console.width - gutter - max(map(len, tails)) - 1)
    names = [_name(piece) for piece in staircase.pieces[:room]]
    cell = max(map(cell_len, names)) + 2
    by_name = cell * len(record) <= room
    signs = dict.fromkeys(Role, 0 if by_name or console.options.ascii_only else 1)
    console.print(Text(f"{record.label}: {len(record)} tokens, {trajectory.layers} live contexts", style="bold"))
    scale = -(-len(record) // room)
    if not by_name and scale > 1:
        console.print(f"one column is {scale} tokens of the tape", style="bright_black")
    for k, tail in enumerate(tails):
        line = Text(f"layer {k} ".rjust(gutter))
        line.append_text(
            _named(staircase.roles[k], names, cell) if by_name else _blocks(staircase.roles[k], room, signs)
        )
        line.append(" " + tail, style="bright_black")
        console.print(line, no_wrap=True, overflow="crop")
        if k < len(staircase.steps):
            corner = "`" if console.options.ascii_only else "└"
            step = Text(f"{' ' * gutter}{corner} {staircase.steps[k]}", style="dark_orange")
            console.print(step, no_wrap=True, overflow="crop")
    console.print(_legend(signs, by_name))
    console.print(_numbers(count(trajectory)))


def _name(piece: str) -> str:
    """A token's text in one short, printable word."""
    word = printable(piece.replace("\n", "\\n"))
    return word if len(word) <= 10 else word[:8] + ".."


def _named(roles: NDArray[np.uint8], names: list[str], cell: int) -> Text:
    strip = Text()
    for value, name in zip(roles.tolist(), names, strict=True):
        role = Role(value)
        sign = " " if role is Role.CONTEXT else _SIGNS[role][0]
        word = "" if role is Role.ABSENT else sign + name
        strip.append(set_cell_size(word, cell - 1), style=_SIGNS[role][2])
        strip.append(" ")
    return strip


def _blocks(roles: NDArray[np.uint8], room: int, signs: dict[Role, int]) -> Text:
    strip = Text()
    wide = max(1, room // roles.size)  # a short tape fills the room too
    for value in bucket_roles(roles, -(-roles.size // room)):
        role = Role(value)
        strip.append(_SIGNS[role][signs[role]] * wide, style=_SIGNS[role][3])
    return strip


def bucket_roles(roles: NDArray[np.uint8], scale: int) -> list[int]:
    """One role for every ``scale`` tokens: the most frequent, but each run of what one looks for keeps a column.

    >>> bucket_roles(np.array([1, 1, 1, 1, 1, 3, 1, 1, 1], dtype=np.uint8), 3)  # one generated token in nine
    [1, 3, 1]
    """
    columns = np.arange(roles.size) // scale
    shown = np.zeros((len(Role), columns[-1] + 1), dtype=np.int64)
    np.add.at(shown, (roles, columns), 1)
    result: NDArray[np.intp] = shown.argmax(axis=0)
    for role in (Role.GENERATED, Role.RESTORED, Role.EVICTED, Role.GENERATED_EVICTED):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], roles == role, [0]))))
        for start, stop in edges.reshape(-1, 2).tolist():
            if not (result[start // scale : (stop - 1) // scale + 1] == role).any():
                result[(start + stop) // 2 // scale] = role
    return list(result.tolist())


def _legend(signs: dict[Role, int], by_name: bool) -> Text:
    legend = Text("\n")
    for role in SHOWN:
        sign = " " if by_name and role is Role.CONTEXT else _SIGNS[role][signs[role]]
        legend.append(f" {sign} ", style=_SIGNS[role][2 if by_name else 3])
        legend.append(f"{' ' * by_name}{role.meaning}  ")
    return legend


def _numbers(counts: Counts) -> str:
    sizes = str(list(counts.E)) if counts.K <= 8 else f"{sum(counts.E) / counts.K:.0f} on average"
    evicted = f", |E| = {sizes}" if counts.K else ""
    share = f", {counts.trie_ratio:.2f} of it" if counts.trie_ratio is not None else ""
    return (
        f"K = {counts.K} edits{evicted}\nD = {counts.D} diverging leaves, L = {counts.L}, C = {counts.C}\n"
        f"branches {counts.branch_tokens} tokens, prefix tree {counts.trie_tokens}{share}"
    )
