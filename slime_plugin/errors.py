"""Errors that a user can act on. Each message names the place, both numbers and the remedy.

The command line prints every :class:`MemoryWalkerError` without a traceback; any other exception is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class MemoryWalkerError(Exception):
    """Base of all errors caused by the input."""


class ConfigError(MemoryWalkerError):
    """An invalid configuration file or command-line setting."""


class LayoutError(MemoryWalkerError):
    """A valid record that the chosen method cannot lay out as asked."""


class StoreError(MemoryWalkerError):
    """A store file that cannot be opened, written or read to its end."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One broken invariant of one record.

    >>> str(Defect("generated", "11 flags for 12 tokens; every tape position needs exactly one"))
    'generated: 11 flags for 12 tokens; every tape position needs exactly one'
    """

    field: str
    """Where: a field, with the position inside it, such as ``views[2][1]`` or ``logprobs[412]``."""
    message: str
    """What is wrong, with both numbers, and what to do about it."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class RecordError(MemoryWalkerError):
    """A record that breaks its contract. It is refused whole; nothing in it is padded, clipped or repaired."""

    def __init__(self, where: str, defects: Sequence[Defect]) -> None:
        self.where = where
        self.defects = tuple(defects)
        super().__init__("\n".join(self.lines()))

    def __reduce__(self) -> tuple[type[RecordError], tuple[str, tuple[Defect, ...]]]:
        return type(self), (self.where, self.defects)  # picklable, for Ray

    def lines(self) -> list[str]:
        """One line per defect, each naming the record."""
        return [f"{self.where}: {defect}" for defect in self.defects]


def refuse(problems: Iterable[str]) -> None:
    """Raise :class:`ConfigError` with a line for each problem, if there is one."""
    lines = list(problems)
    if lines:
        raise ConfigError("\n".join(lines))


def nearest(word: object, words: Sequence[str]) -> str:
    """The most similar word, or the list of all.

    >>> nearest("popp", ["pop", "fold"]), nearest("x", ["pop", "fold"])
    ("'pop'", 'one of pop, fold')
    """
    close = difflib.get_close_matches(str(word)[:80], words, n=1)
    return repr(close[0]) if close else f"one of {', '.join(words)}"


def printable(value: object, width: int = 80) -> str:
    """Text from a record, safe to show on a terminal.

    >>> printable("\\x1b[2J")
    '\\\\x1b[2J'
    """
    text = str(value)[:width]
    return text if text.isprintable() else repr(text)[1:-1]
