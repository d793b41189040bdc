"""Runs the command line in this process, through the same entry point as the console script."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click
from click.testing import CliRunner

from slime_plugin.cli.main import main

INTERRUPTIBLE = [
    sys.executable,
    "-c",
    # What is started in the background of a script inherits that interrupts are ignored.
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from slime_plugin.cli.main import main; main()",
]
"""The command line in a process of its own, to be followed by arguments."""


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


class _Main(click.Command):
    """``main`` in the shape that click's test runner calls."""

    def main(self, args: list[str], prog_name: str, **settings: object) -> None:  # type: ignore[override]  # all it is given
        main(args)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(_Main("memorywalker"), list(arguments), prog_name="memorywalker")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)
