"""``memorywalker slime-args``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from rich.table import Table

from slime_plugin.cli.config import with_cell
from slime_plugin.cli.output import console, write_whole
from slime_plugin.cluster.arguments import PLUGIN_FILE, plugin_yaml, slime_flags
from slime_plugin.cluster.job_problems import check_job, missing_here
from slime_plugin.config.cell import Cell


@click.command("slime-args")
@with_cell
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the run.  [default: runs/NAME_OF_CONFIG]"
)
@click.option("--evaluate", is_flag=True, help="Evaluate the run's last checkpoint instead of training.")
@click.option("--explain", is_flag=True, help="Print a table of all flags and the setting that each comes from.")
@click.option("--lines", is_flag=True, help="One word per line, for scripts.")
@click.option(
    "--write",
    is_flag=True,
    help=f"Write {PLUGIN_FILE} into the folder; fail if a file, key or program that the job needs is missing.",
)
def slime_args(
    cell: Cell, config: Path, out: Path | None, evaluate: bool, explain: bool, lines: bool, write: bool
) -> None:
    """Convert a configuration into the command line of slime's train.py.

    Harness, method and all other settings of the plugin are in the file that --custom-config-path names and --write
    writes. Flags are checked against slime's parser; settings that slime would accept and train wrongly are refused.
    """
    run = out or Path("runs") / config.stem
    missing = list(missing_here(cell))
    check_job(cell, str(config), missing if write else ())
    for note in missing:
        click.echo(f"Missing: {note}", err=True)
    flags = slime_flags(cell, run, "evaluate" if evaluate else "train")
    if write:
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / PLUGIN_FILE, plugin_yaml(cell))
    words = [word for flag in flags for word in flag.words]
    if explain:
        table = Table("flag", "value", "from", box=None, pad_edge=False)
        for flag in flags:
            table.add_row(flag.name, shlex.join(flag.values), flag.why)
        console().print(table)
    else:
        click.echo("\n".join(words) if lines else shlex.join(words))
