"""The entry point: imports the command that is called, and prints errors of the input without a traceback."""

from __future__ import annotations

import importlib
import io
import os
import sys

import click

from slime_plugin import __version__
from slime_plugin.errors import MemoryWalkerError

COMMANDS = {  # summary, and the arguments of an example
    "train": ("Train a policy on this machine: rollouts, updates, checkpoints.", "configs/quickstart.yaml"),
    "slime-args": ("Convert a configuration into slime's command line.", "configs/cells/agentfold-mask4d.yaml"),
    "plan": ("Compute memory, tokens and time per GPU of a cluster job.", "configs/cells/agentfold-mask4d.yaml"),
    "record": ("Check, draw and summarise the records of rollouts.", "show examples/records/running_example.json"),
    "layout": ("Show the rows that a method trains on.", "examples/records/running_example.json --method mask4d"),
    "score": (
        "Compare the trainer's log-probabilities with those of the rollout.",
        "runs/quickstart --model examples/small_world/model --method naive_compressed",
    ),
    "compare": ("Compare methods on the same recorded rollouts.", "runs/quickstart"),
    "matrix": ("Train every method under every harness, one run after the other.", "--out runs/matrix --dry-run"),
    "report": ("Write a page about training runs: plots, and every rollout.", "runs/quickstart"),
    "probe": (
        "Measure both pitfalls of naive training on a model.",
        "runs/quickstart --model examples/small_world/model",
    ),
    "rollout": ("Run a harness on questions and write records.", "configs/quickstart.yaml --out runs/rollouts"),
    "tap": (
        "Serve agents such as Claude Code, and record their rollouts.",
        "run --harness opencode --task 'How many tests are here?' model=models/Qwen3-4B --out runs/task.records",
    ),
    "engine": ("Serve a model with SGLang, on GPUs or on a CPU.", "--model examples/small_world/model"),
    "config": ("Show the effective configuration, and all keys.", "show configs/quickstart.yaml method=sdcc"),
    "verify": ("Check on this machine that a cell computes what it should.", "configs/quickstart.yaml --quick"),
    "doctor": ("Report what is missing on this machine, or wrong with a run, and how to mend it.", "runs/quickstart"),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module only when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"slime_plugin.cli.{name}"), name)
        command.epilog = f"\b\nExample:\n  memorywalker {cmd_name} {COMMANDS[cmd_name][1]}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (summary, _) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memorywalker")
def cli() -> None:
    """MemoryWalker: train agents on the contexts they really saw.

    Agent harnesses rewrite the context during a rollout. A record keeps what the policy saw at every step; these
    commands create records, train on them, and show how each training method uses them.
    """


def main(arguments: list[str] | None = None, command: click.Command = cli) -> None:
    """Run a command, and exit with its status."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character gets its escape instead
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = command.main(arguments, prog_name="memorywalker", standalone_mode=False)
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
