"""Errors a user can act on: each message names the place, both numbers and the remedy. And words for such messages.

Everything raised on purpose derives from :class:`MemoryWalkerError`; the command line prints those without a
traceback. Anything else that escapes is a bug in this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


class MemoryWalkerError(Exception):
    """Base of all errors that are the input's fault, not the program's."""


class ConfigError(MemoryWalkerError):
    """A configuration file or command-line setting that cannot be meant."""


class LayoutError(MemoryWalkerError):
    """A valid record that the chosen method cannot lay out as asked."""


class StoreError(MemoryWalkerError):
    """A store file that cannot be opened, written or read on."""


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
        return type(self), (self.where, self.defects)  # so that it survives the way out of a Ray worker

    def lines(self) -> list[str]:
        """One line per defect, each naming the record."""
        return [f"{self.where}: {defect}" for defect in self.defects]


def nearest(word: object, words: Sequence[str]) -> str:
    """The word that was probably meant, or all there are.

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
