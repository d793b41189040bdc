"""Runs the command line in this process, as ``main`` does."""

from __future__ import annotations

from dataclasses import dataclass

from click.testing import CliRunner

from slime_plugin.cli.main import cli
from slime_plugin.errors import MemoryWalkerError


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, list(arguments))
    if isinstance(result.exception, MemoryWalkerError):
        lines = "".join(f"Error: {line}\n" for line in str(result.exception).splitlines())
        return Result(1, result.stdout, result.stderr + lines)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)
