"""The flags of slime's parser, each with its number of values: ``flags.txt``, one per line.

The list was read from the parser itself, which includes Megatron's and SGLang's; its first line names their versions.
``tests/slime`` compares it with the parser where slime's source is available, and regenerates it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from importlib.resources import files

from slime_plugin.errors import ConfigError, nearest, refuse
from slime_plugin.slime.refusals import flag_problem

MANY = "+"
"""One value or more."""


@functools.cache
def known_flags() -> dict[str, str]:
    """Name to number of values: 0, 1, 3 or ``MANY``."""
    lines = files("slime_plugin.cluster").joinpath("flags.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def check_flag(name: str, values: Sequence[str], where: str) -> None:
    """Refuse a flag that does not exist or takes another number of values."""
    number = known_flags().get(name)
    if number is None:
        raise ConfigError(f"{where}: slime has no flag {name}; use {nearest(name, list(known_flags()))}")
    if number == MANY and not values:
        raise ConfigError(f"{where}: {name} takes at least 1 value and has 0")
    if number != MANY and len(values) != int(number):
        raise ConfigError(f"{where}: {name} takes {number} value{'s' * (number != '1')} and has {len(values)}")


def check_command_line(words: Iterable[str]) -> None:
    """Raise :class:`ConfigError` with a line for each flag that does not exist or cannot be used."""
    problems = []
    for name, values in _split(words):
        try:
            check_flag(name, values, "command line")
            if (problem := flag_problem(name, values)) is not None:
                problems.append(f"command line: {problem}")
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)


def _split(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    """The flags on a command line, with their values."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise ConfigError(f"command line: {word!r:.60} belongs to no flag")
    return flags
