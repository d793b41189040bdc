"""``memorywalker score``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from slime_plugin.cli.inputs import FILES, METHOD, MODEL, chosen_method, sound_records
from slime_plugin.cli.output import console
from slime_plugin.cli.scoring import scores_of
from slime_plugin.errors import MemoryWalkerError


@click.command()
@FILES
@MODEL
@METHOD
@click.option("--json", "as_json", is_flag=True, help="Print every trained token and the summary as JSON.")
def score(files: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Compare the trainer's log-probabilities with those of the rollout.

    Loads the model into Megatron, runs the forward pass of a method on each record and compares what it gives the
    trained tokens with what the rollout engine logged. With the weights that sampled the records, an exact method is at
    the rounding error of the two engines; anything above it is the method's own error.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    method = chosen_method(**{key: options.pop(key) for key in ("name", "packing", "budget", "config")})
    problems: list[str] = []
    records = list(sound_records(files, problems))
    for line in problems:
        click.echo(f"Error: {line}", err=True)
    if not records:
        raise MemoryWalkerError("no sound record to score")
    ((scores, summary),) = scores_of(records, (method,), **options)
    summary = {"model": options["model"].name, "method": method.model_dump(exclude_none=True), **summary}
    if as_json:
        tokens = [
            {"record": record.meta.id, "tape": tape, "train_logprob": logprob, "rollout_logprob": logged}
            for record, scored in zip(records, scores, strict=True)
            for tape, logprob, logged in zip(
                scored.tape.tolist(), scored.logprobs.tolist(), record.logprobs[scored.tape].tolist(), strict=True
            )
        ]
        click.echo(json.dumps({"tokens": tokens, "summary": summary}, separators=(",", ":")))
    else:
        _print_summary(summary)
    sys.exit(1 if problems else 0)


def _print_summary(summary: dict[str, Any]) -> None:
    out = console()
    table = Table(title="|trainer - rollout|, log-probability", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "tokens", "mean", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("all", *map(_shown, (summary["tokens"], summary["logdiff"]["mean"], summary["logdiff"]["max"])))
    for name, place in summary["places"].items():
        what = "before any edit" if name == "start" else f"{name.replace('/', ', ')}"
        table.add_row(what, _shown(place["tokens"]), _shown(place["logdiff"]), "")
    out.print(table)
    lost = ", ".join(f"{number} {cause}" for cause, number in summary["lost"].items()) or "none"
    out.print(f"\ntrained {summary['tokens']} of {summary['sampled']} sampled tokens; not trained: {lost}")
    out.print(
        f"k3 {_shown(summary['k3'])}, multiplicative error {_shown(summary['multiplicative_error'])}, "
        f"mean of trainer - rollout {_shown(summary['signed_logdiff'])}"
    )
    if summary["leaves"]:
        leaves = summary["leaves"]
        out.print(
            f"{leaves['number']} diverging leaves: KL(live || compressed) mean {_shown(leaves['kl'])}, "
            f"max {_shown(leaves['kl_max'])}; total variation at most {_shown(leaves['pinsker'])} on average (Pinsker)"
        )


def _shown(value: float | None) -> str:
    """Three significant digits, counts whole; n/a for what is undefined."""
    if value is None:
        return "n/a"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
