"""``memorywalker score``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from slime_plugin.cli.inputs import FILES, METHOD, MODEL, all_sound_records, chosen_method
from slime_plugin.cli.output import console
from slime_plugin.cli.scoring import scores_of
from slime_plugin.config.method import Method
from slime_plugin.record.arrays import to_json_floats
from slime_plugin.report.numbers import shown


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
    records, damaged = all_sound_records(files)
    (scores,) = scores_of(records, (method,), **options)
    from slime_plugin.megatron.score import summarise_scores

    summary = summarise_scores(records, scores)
    if as_json:
        tokens = [
            {"record": record.meta.id, "tape": tape, "train_logprob": logprob, "rollout_logprob": logged}
            for record, scored in zip(records, scores, strict=True)
            for tape, logprob, logged in zip(
                scored.tape.tolist(),
                scored.logprobs.tolist(),
                to_json_floats(record.logprobs[scored.tape]),
                strict=True,
            )
        ]
        summary = {"model": str(options["model"]), "method": method.model_dump(exclude_none=True), **summary}
        click.echo(json.dumps({"tokens": tokens, "summary": summary}, separators=(",", ":"), allow_nan=False))
    else:
        _print_summary(summary, method, options["model"])
    sys.exit(1 if damaged else 0)


def _print_summary(summary: dict[str, Any], method: Method, model: Path) -> None:
    out = console()
    packing = f", packing {method.packing}" if method.type == "mask4d" else ""
    out.print(f"{method.type}{packing} on {model}: |trainer - rollout| per trained token, in nats\n")
    table = Table(box=None, pad_edge=False)
    for heading in ("", "tokens", "mean", "max"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("all", shown(summary["tokens"]), *(shown(summary["logdiff"][key]) for key in ("mean", "max")))
    for name, place in summary["places"].items():
        table.add_row(_place(name), *(shown(place[key]) for key in ("tokens", "mean", "max")))
    out.print(table)
    lost = ", ".join(f"{number} {cause}" for cause, number in summary["lost"].items()) or "none"
    out.print(f"\ntrained {summary['tokens']} of {summary['sampled']} sampled tokens; not trained: {lost}")
    out.print(
        f"k3 {shown(summary['k3'])}, multiplicative error {shown(summary['multiplicative_error'])}, "
        f"mean of trainer - rollout {shown(summary['signed_logdiff'])}"
    )
    leaves = summary["leaves"]
    if leaves["number"]:
        out.print(
            f"{leaves['number']} diverging leaves: KL(live || compressed) mean {shown(leaves['kl_mean'])}, "
            f"max {shown(leaves['kl_max'])}; total variation at most {shown(leaves['pinsker'])} on average"
        )


def _place(name: str) -> str:
    """What happened last before a token was sampled, in words."""
    kind, _, where = name.partition("/")
    if not where:
        return "before any edit"
    return f"after {kind}, first 16" if where == "near" else f"after {kind}, later"
