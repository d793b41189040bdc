"""``memorywalker slime-args``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click
from rich.table import Table

from slime_plugin.cli.config import CONFIG, FURTHER, OVERRIDES
from slime_plugin.cli.output import console, write_whole
from slime_plugin.cluster.arguments import PLUGIN_FILE, Flag, plugin_yaml, slime_flags
from slime_plugin.cluster.problems import job_problems, missing_here
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError


@click.command("slime-args")
@CONFIG
@OVERRIDES
@FURTHER
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the run.  [default: runs/NAME_OF_CONFIG]"
)
@click.option("--evaluate", is_flag=True, help="The command line of an evaluation of the run's last checkpoint.")
@click.option("--explain", is_flag=True, help="Say of each flag where it comes from, instead.")
@click.option("--lines", is_flag=True, help="One word per line, for scripts.")
@click.option("--write", is_flag=True, help=f"Write {PLUGIN_FILE} into the folder, and refuse if a file is missing.")
def slime_args(
    config: Path,
    overrides: tuple[str, ...],
    further: tuple[Path, ...],
    out: Path | None,
    evaluate: bool,
    explain: bool,
    lines: bool,
    write: bool,
) -> None:
    """Turn a cell into slime's command line.

    CONFIG is a cell; settings can be given anew behind it, and --with adds the settings of another file, such as the
    size of a cluster. Printed is what slime's train.py takes; harness, method and all that only the plugin reads are in
    the file that --custom-config-path names, which --write writes.

    Every flag is one that slime's parser has. What slime would accept and train wrongly is refused.
    """
    cell = load_cell(config, overrides, further)
    run = out or Path("runs") / config.stem
    problems, missing = list(job_problems(cell)), list(missing_here(cell))
    if problems or (write and missing):
        raise ConfigError("\n".join(f"{config}: {problem}" for problem in (*problems, *(missing if write else ()))))
    for note in missing:
        click.echo(f"Not here: {note}", err=True)
    flags = slime_flags(cell, run, "evaluate" if evaluate else "train")
    if write:
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / PLUGIN_FILE, plugin_yaml(cell))
    if explain:
        _print_reasons(flags)
    else:
        words = [word for flag in flags for word in flag.words]
        sys.stdout.write("".join(f"{word}\n" for word in words) if lines else f"{shlex.join(words)}\n")


def _print_reasons(flags: list[Flag]) -> None:
    table = Table("flag", "value", "from", box=None, pad_edge=False)
    for flag in flags:
        table.add_row(flag.name, shlex.join(flag.values), flag.why)
    console().print(table)
