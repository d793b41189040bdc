"""``memorywalker config``, and the options of all commands that take a configuration."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import to_yaml
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.reference import reference as reference_of_all_keys
from slime_plugin.errors import ConfigError

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


@contextlib.contextmanager
def prefixed_errors(config: Path) -> Iterator[None]:
    """Prefix errors of the settings with the file of the configuration."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError("\n".join(f"{config}: {line}" for line in str(error).splitlines())) from None


def with_cell(command: Callable[..., None]) -> Callable[..., None]:
    """Add CONFIG, KEY=VALUE and --with, and pass the command their ``cell`` and the path ``config``."""

    @CONFIG
    @OVERRIDES
    @FURTHER
    @functools.wraps(command)
    def loaded(config: Path, overrides: tuple[str, ...], further: tuple[Path, ...], **options: Any) -> None:
        command(cell=load_cell(config, overrides, further), config=config, **options)

    return loaded


@click.group()
def config() -> None:
    """Show the effective configuration, and all keys that exist."""


@config.command()
@with_cell
def show(cell: Cell, config: Path) -> None:
    """Print a configuration with all its defaults.

    KEY=VALUE replaces a setting of the file, such as rollout.turns=12. A word alone chooses the type of a block:
    method=sdcc. The output is a configuration itself.
    """
    click.echo(to_yaml(cell.to_json()), nl=False)


@config.command()
def reference() -> None:
    """Print every key with its default and its documentation.

    The output is the default configuration; configs/reference.yaml holds it.
    """
    click.echo(reference_of_all_keys(), nl=False)
