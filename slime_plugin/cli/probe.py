"""``memorywalker probe``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from slime_plugin.cli.inputs import FILES, MODEL, all_valid_records
from slime_plugin.cli.output import console, write_whole
from slime_plugin.cli.scoring import scores_of
from slime_plugin.config.method import Mask4d, NaiveCompressed, NaiveFull
from slime_plugin.report.pitfalls import Pitfalls, pitfalls_plot, pitfalls_svg, pitfalls_table
from slime_plugin.tree import Trajectory


@click.command()
@FILES
@MODEL
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", help="Also draw the distributions."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(files: tuple[Path, ...], plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure both pitfalls of naive training on a model.

    Scores every sampled token under the context it was sampled in, under the final compressed context and under the
    full trace, and tables the differences per harness: the paper's Q1. Any model will do, trained or not; the logged
    log-probabilities of the rollout are not used.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    if plot is not None and not plot.parent.is_dir():
        raise click.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
    records, damaged = all_valid_records(files)
    conditionings = scores_of(records, (Mask4d(), NaiveCompressed(), NaiveFull()), **options)
    parts: dict[str, list[Pitfalls]] = {}
    for i, record in enumerate(records):
        columns = []
        for scores in conditionings:
            column = np.full(len(record), np.nan)
            column[scores[i].tape] = scores[i].logprobs
            columns.append(column)
        parts.setdefault(record.meta.harness or "unnamed", []).append(Pitfalls.of(Trajectory.of(record), *columns))
    harnesses = {name: Pitfalls.joined(parts[name]) for name in sorted(parts)}
    if as_json:
        click.echo(json.dumps({name: pitfalls.to_json() for name, pitfalls in harnesses.items()}, indent=2))
    else:
        out = console()
        out.print(pitfalls_table(harnesses), "", pitfalls_plot(harnesses, out), sep="\n")
    if plot is not None:
        write_whole(plot, pitfalls_svg(harnesses, f"Both pitfalls on {options['model'].name}"))
        click.echo(f"wrote {plot}", err=True)
    sys.exit(1 if damaged else 0)
