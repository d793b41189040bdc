"""Draws the staircase in a terminal: every token by name where they fit, blocks of tokens where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from slime_plugin.errors import printable
from slime_plugin.record import Record
from slime_plugin.record.arrays import true_spans
from slime_plugin.report.staircase import SHOWN, Staircase, TokenRole
from slime_plugin.tree import Counts, Trajectory, count


class _RoleStyle(NamedTuple):
    """A role has a colour and, for terminals and files without colour, a sign of its own."""

    letter: str
    """Prefix of a token's name, and the sign of a block of tokens on a terminal that has only ASCII."""
    block: str
    name_style: str
    block_style: str


_ROLE_STYLES = {
    TokenRole.ABSENT: _RoleStyle(" ", " ", "default", "default"),
    TokenRole.PROMPT: _RoleStyle(">", "▒", "black on bright_blue", "bright_blue"),
    TokenRole.CONTEXT: _RoleStyle(".", "░", "black on grey70", "grey50"),
    TokenRole.SAMPLED: _RoleStyle("+", "█", "black on green", "green"),
    TokenRole.RESTORED: _RoleStyle("^", "▲", "black on magenta", "magenta"),
    TokenRole.EVICTED: _RoleStyle("-", "▚", "white on red", "red"),
    TokenRole.SAMPLED_EVICTED: _RoleStyle("x", "▓", "black on yellow", "yellow"),
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
    ascii_only = console.options.ascii_only
    console.print(Text(f"{record.label}: {len(record)} tokens, {trajectory.layers} live contexts", style="bold"))
    scale = -(-len(record) // room)
    if not by_name and scale > 1:
        console.print(f"one column is {scale} tokens of the tape", style="bright_black")
    for k, tail in enumerate(tails):
        line = Text(f"layer {k} ".rjust(gutter))
        line.append_text(
            _named(staircase.roles[k], names, cell) if by_name else _blocks(staircase.roles[k], room, ascii_only)
        )
        line.append(" " + tail, style="bright_black")
        console.print(line, no_wrap=True, overflow="crop")
        if k < len(staircase.steps):
            corner = "`" if ascii_only else "└"
            step = Text(f"{' ' * gutter}{corner} {staircase.steps[k]}", style="dark_orange")
            console.print(step, no_wrap=True, overflow="crop")
    for line in _legend(console.width, by_name, ascii_only):
        console.print(line)
    console.print(_numbers(count(trajectory)))
    for reported in _report_lines(record):
        console.print(reported)


def _name(piece: str) -> str:
    """A token's text in one short, printable word."""
    word = printable(piece.replace("\n", "\\n"))
    return word if len(word) <= 10 else word[:8] + ".."


def _named(roles: NDArray[np.uint8], names: list[str], cell: int) -> Text:
    strip = Text()
    for value, name in zip(roles.tolist(), names, strict=True):
        role = TokenRole(value)
        word = "" if role is TokenRole.ABSENT else _letter(role) + name
        strip.append(set_cell_size(word, cell - 1), style=_ROLE_STYLES[role].name_style)
        strip.append(" ")
    return strip


def _blocks(roles: NDArray[np.uint8], room: int, ascii_only: bool) -> Text:
    strip = Text()
    wide = max(1, room // roles.size)  # a short tape fills the room too
    for value in bucket_roles(roles, -(-roles.size // room)):
        style = _ROLE_STYLES[TokenRole(value)]
        strip.append((style.letter if ascii_only else style.block) * wide, style=style.block_style)
    return strip


def bucket_roles(roles: NDArray[np.uint8], scale: int) -> list[int]:
    """One role for every ``scale`` tokens: the most frequent, but each run of what one looks for keeps a column.

    >>> bucket_roles(np.array([1, 1, 1, 1, 1, 3, 1, 1, 1], dtype=np.uint8), 3)  # one sampled token in nine
    [1, 3, 1]
    """
    columns = np.arange(roles.size) // scale
    shown = np.zeros((len(TokenRole), columns[-1] + 1), dtype=np.int64)
    np.add.at(shown, (roles, columns), 1)
    result: NDArray[np.intp] = shown.argmax(axis=0)
    for role in (TokenRole.SAMPLED, TokenRole.RESTORED, TokenRole.EVICTED, TokenRole.SAMPLED_EVICTED):
        for start, stop in true_spans(roles == role):
            if not (result[start // scale : (stop - 1) // scale + 1] == role).any():
                result[(start + stop) // 2 // scale] = role
    return list(result.tolist())


def _letter(role: TokenRole) -> str:
    """The sign before a name; plain context has none."""
    return " " if role is TokenRole.CONTEXT else _ROLE_STYLES[role].letter


def _legend(width: int, by_name: bool, ascii_only: bool) -> list[Text]:
    """What the signs mean, in as many lines as it takes to keep each sign with its meaning."""
    lines = [Text(), Text()]
    for role in SHOWN:
        style = _ROLE_STYLES[role]
        sign = _letter(role) if by_name else style.letter if ascii_only else style.block
        entry = Text(f" {sign} ", style=style.name_style if by_name else style.block_style)
        entry.append(f"{' ' * by_name}{role.meaning}  ", style="default on default")
        if lines[-1].cell_len + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append_text(entry)
    return lines


def _numbers(counts: Counts) -> str:
    sizes = str(list(counts.E)) if counts.K <= 8 else f"{sum(counts.E) / counts.K:.0f} on average"
    evicted = f", |E| = {sizes}" if counts.K else ""
    share = f" ({counts.trie_ratio:.2f} of that)" if counts.trie_ratio is not None else ""
    return (
        f"K = {counts.K} edits{evicted}, D = {counts.D} diverging leaves\n"
        f"L = {counts.L} tokens on the tape, C = {counts.C} in the final context\n"
        f"branches {counts.branch_tokens} tokens, prefix tree {counts.trie_tokens}{share}"
    )


def _report_lines(record: Record) -> Iterator[str]:
    """Conversations, where there are several, and tokens that are not trained under any method."""
    conversations = record.meta.report.conversations
    if len(conversations) > 1:
        yield "conversations: " + ", ".join(
            f"{printable(one.name, 40)} ({_plural(one.turns, 'turn')}, {_plural(one.contexts, 'context')})"
            for one in conversations
        )
    if record.untrained:
        yield "not trained: " + ", ".join(f"{number} {printable(cause)}" for cause, number in record.untrained.items())


def _plural(number: object, what: str) -> str:
    return f"{printable(number, 20)} {what}{'s' * (number != 1)}"
