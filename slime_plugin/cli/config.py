"""``memorywalker config``, and what all commands share that take a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from slime_plugin.config.frozen import to_yaml
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.reference import reference as reference_of_all_keys

CONFIG = click.argument("config", type=click.Path(path_type=Path, dir_okay=False), metavar="CONFIG")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
FURTHER = click.option(
    "--with",
    "further",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="A file whose settings replace those of CONFIG, such as configs/nodes/4.yaml; may be repeated.",
)


@click.group()
def config() -> None:
    """Show what a configuration comes to, and which keys there are."""


@config.command()
@CONFIG
@OVERRIDES
@FURTHER
def show(config: Path, overrides: tuple[str, ...], further: tuple[Path, ...]) -> None:
    """Print a configuration with all its defaults.

    Settings on the command line replace those of the file: method=sdcc trainer.tp=2 rollout.turns=12. A word alone
    chooses the type of a block. What is printed is a configuration itself.
    """
    cell = load_cell(config, overrides, further)
    click.echo(to_yaml(cell.model_dump(mode="json")), nl=False)


@config.command()
def reference() -> None:
    """Print every key with its default and what it means.

    What is printed is a configuration itself, the default one; configs/reference.yaml holds it.
    """
    click.echo(reference_of_all_keys(), nl=False)
