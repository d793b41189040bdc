"""The flags of slime's own parser, as ``slime_plugin/cluster/flags.txt`` has them.

SLIME_SRC=... MEGATRON_SRC=... python -m tests.slime.record_flags       # write them down anew
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import slime_plugin.cluster.flags
from tests.slime.sources import slime_imports, versions

FILE = Path(slime_plugin.cluster.flags.__file__).with_name("flags.txt")


def flags() -> str:
    """The content of the file. slime's parser has three parts, which are all asked in one call of it."""
    slime_imports()
    from slime.utils import arguments

    parsers: list[argparse.ArgumentParser] = []
    real = argparse.ArgumentParser.parse_known_args

    def note(parser: argparse.ArgumentParser, *given: Any, **settings: Any) -> Any:
        parsers.append(parser)
        return real(parser, ["--rollout-batch-size", "1"], *given[1:], **settings)

    argparse.ArgumentParser.parse_known_args = note  # type: ignore[method-assign,assignment]  # for this call
    try:
        arguments.parse_args()
    except (AssertionError, ValueError, TypeError, FileNotFoundError):
        pass  # once all have been asked, slime validates what there is not
    finally:
        argparse.ArgumentParser.parse_known_args = real  # type: ignore[method-assign]  # as it was
    found = {
        name: _takes(action)
        for parser in parsers
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    head = f"# {', '.join(f'{name} {version}' for name, version in versions().items())}\n"
    return head + "".join(f"{name} {takes}\n" for name, takes in sorted(found.items()))


def _takes(action: argparse.Action) -> str:
    if action.nargs is None:
        return "1"
    return str(action.nargs) if isinstance(action.nargs, int) else "+"


if __name__ == "__main__":
    FILE.write_text(flags(), encoding="utf-8")
