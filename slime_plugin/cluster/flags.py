"""The flags that slime's parser knows, with how many values each takes: ``flags.txt``, one per line.

The list was read off the parser itself, which is slime's, Megatron's and SGLang's in one; its first line names their
versions. ``tests/slime`` compares it with the parser where slime's source is at hand, and writes it anew.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from slime_plugin.errors import ConfigError, nearest
from slime_plugin.seam.refusals import flag_problem

MANY = "+"
"""Takes one value or more."""


@functools.cache
def known_flags() -> dict[str, str]:
    """``--name`` to the number of its values: 0, 1, 3 or ``MANY``."""
    lines = files("slime_plugin.cluster").joinpath("flags.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def check_flag(name: str, values: Sequence[str], where: str) -> None:
    """Refuse a flag that does not exist or takes another number of values."""
    takes = known_flags().get(name)
    if takes is None:
        raise ConfigError(f"{where}: slime has no flag {name}; use {nearest(name, list(known_flags()))}")
    if takes == MANY:
        if not values:
            raise ConfigError(f"{where}: {name} takes at least 1 value and has 0")
    elif len(values) != int(takes):
        raise ConfigError(f"{where}: {name} takes {takes} value{'s' * (takes != '1')} and has {len(values)}")


def check_command_line(words: Iterable[str]) -> None:
    """Every flag among the words of a command line exists and may be used; raises :class:`ConfigError` with a line for
    each that does not."""
    mistakes = []
    for name, values in _split(words):
        try:
            check_flag(name, values, "command line")
        except ConfigError as error:
            mistakes.append(str(error))
            continue
        problem = flag_problem(name, values)
        if problem is not None:
            mistakes.append(f"command line: {problem}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _split(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
        elif name:
            values.append(word)
        else:
            raise ConfigError(f"command line: {word!r:.60} belongs to no flag")
    if name:
        yield name, values
