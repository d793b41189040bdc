"""Every command explains itself with an example, and the example is a valid command line."""

from __future__ import annotations

import shlex

import click
import pytest

from slime_plugin.cli.main import COMMANDS, cli
from tests.cli import run
from tests.conftest import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_is_a_valid_command_line(name: str) -> None:
    shown = run(name, "--help")
    assert shown.exit_code == 0
    words = shlex.split(COMMANDS[name][1])
    assert f"Example:\n    memorywalker {name} {COMMANDS[name][1]}\n" in shown.stdout
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    if isinstance(command, click.Group):
        _, command, words = command.resolve_command(click.Context(command), words)
        assert command is not None
    options = [option for parameter in command.params for option in parameter.opts]
    assert {word for word in words if word.startswith("--")} <= set(options)
    for word in words:
        assert not word.startswith(("configs/", "examples/")) or (ROOT / word).exists()
