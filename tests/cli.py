"""Runs the command line in this process, through the same entry point as the console script."""

from __future__ import annotations

from dataclasses import dataclass

import click
from click.testing import CliRunner

from slime_plugin.cli.main import main


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
