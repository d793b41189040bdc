"""The entry point: finds the command, and turns errors a user can act on into lines without a traceback."""

from __future__ import annotations

import importlib
import io
import os
import sys

import click

from slime_plugin import __version__
from slime_plugin.errors import MemoryWalkerError

COMMANDS = {
    "train": ("slime_plugin.cli.train:train", "Train a policy on this machine: rollouts, updates, checkpoints."),
    "slime-args": ("slime_plugin.cli.slime_args:slime_args", "Turn a configuration into slime's command line."),
    "plan": ("slime_plugin.cli.plan:plan", "Work out memory, tokens and time per GPU of a job, on paper."),
    "record": ("slime_plugin.cli.record:record", "Check, draw and summarise the records of rollouts."),
    "layout": ("slime_plugin.cli.layout:layout", "Show what a method would train on, given a record."),
    "score": ("slime_plugin.cli.score:score", "Compare the trainer's log-probabilities with those of the rollout."),
    "compare": ("slime_plugin.cli.compare:compare", "Put the same recorded rollouts under several methods."),
    "matrix": ("slime_plugin.cli.matrix:matrix", "Train every method under every harness, one run after the other."),
    "report": ("slime_plugin.cli.report:report", "Write a page about training runs: plots, and every rollout."),
    "probe": ("slime_plugin.cli.probe:probe", "Measure both pitfalls of naive training on a model."),
    "rollout": ("slime_plugin.cli.rollout:rollout", "Run a harness: questions in, records out."),
    "tap": ("slime_plugin.cli.tap:tap", "Serve agents as they are, such as Claude Code, and record what they do."),
    "engine": ("slime_plugin.cli.engine:engine", "Serve a model with SGLang, on GPUs or on a CPU."),
    "config": ("slime_plugin.cli.config:config", "Show what a configuration comes to, and which keys there are."),
    "doctor": ("slime_plugin.cli.doctor:doctor", "Say what is missing on this machine, and how to get it."),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module only when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memorywalker")
def cli() -> None:
    """MemoryWalker: train agents on the contexts they really saw.

    Agent harnesses rewrite the context during a rollout. A record keeps what the policy saw at every step; these
    commands read records, show what each training method makes of them, and measure it on a model.
    """


def main(arguments: list[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets its escape instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = cli.main(arguments, prog_name="memorywalker", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except MemoryWalkerError as error:
        for line in str(error).splitlines():
            click.echo(f"Error: {line}", err=True)
        status = 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted", err=True)
        status = 130
    except OSError as error:  # files that are read and written report their own; this is standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would fail again at exit
        if not isinstance(error, BrokenPipeError):
            where = "cannot write the output" if error.filename is None else error.filename
            click.echo(f"Error: {where}: {error.strerror}", err=True)
        status = 1
    sys.exit(status if isinstance(status, int) else 0)
