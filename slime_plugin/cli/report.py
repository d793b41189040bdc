"""``memorywalker report``."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console

from slime_plugin.cli.output import write_whole
from slime_plugin.report.run_page import run_page
from slime_plugin.run.folder import RunFolder


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="RUN..."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="PAGE",
    help="File to write.  [default: report.html in the run, or in the folder that holds all of them]",
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write a page about training runs.

    One HTML file that needs nothing else: reward, logdiff, cost and lost tokens as plots, methods by harnesses if there
    are several runs, and every rollout's live contexts, token by token.
    """
    with Console(stderr=True).status("reading rollouts"):
        page = run_page([RunFolder(path) for path in runs])
    if out is None:
        folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([path.resolve() for path in runs]))
        out = folder / "report.html"
    write_whole(out, page)
    click.echo(f"wrote {out}")
