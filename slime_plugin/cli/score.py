"""``memorywalker score``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from slime_plugin.cli.inputs import FILES, METHOD, MODEL, all_valid_records, chosen_method
from slime_plugin.cli.output import console
from slime_plugin.cli.scoring import scores_of
from slime_plugin.config.method import MethodSettings
from slime_plugin.methods import method_of
from slime_plugin.record.arrays import to_json_floats
from slime_plugin.report.formatting import format_lost, format_number, format_place
from slime_plugin.report.tables import number_table


@click.command()
@FILES
@MODEL
@METHOD
@click.option("--json", "as_json", is_flag=True, help="Print every trained token and the summary as JSON.")
def score(files: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Compare the trainer's log-probabilities with those of the rollout.

    Loads the model into Megatron, runs the forward pass of a method on each record and compares its log-probabilities
    of the trained tokens with those that the rollout engine logged. With the weights that sampled the records, an exact
    method is at the rounding error of the two engines; anything above it is the method's own error.

    Damaged records are left out and named on standard error; the exit code is then 1.
    """
    method = chosen_method(**{key: options.pop(key) for key in ("name", "packing", "budget", "config")})
    records, damaged = all_valid_records(files)
    (scores,) = scores_of(records, (method,), **options)
    from slime_plugin.local.score import summarise_scores

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


def _print_summary(summary: dict[str, Any], method: MethodSettings, model: Path) -> None:
    out = console()
    out.print(f"{method_of(method).description} on {model}: |logdiff| per trained token, in nats\n")
    table = number_table(("", "tokens", "mean", "max"))
    rows = {"all": {"tokens": summary["tokens"], **summary["logdiff"]}}
    rows |= {format_place(name, "first 16", "later"): place for name, place in summary["places"].items()}
    for name, numbers in rows.items():
        table.add_row(name, *(format_number(numbers[key]) for key in ("tokens", "mean", "max")))
    out.print(table)
    trained = f"trained {summary['tokens']} of {summary['sampled']} sampled tokens"
    out.print(f"\n{trained}; not trained: {format_lost(summary['lost'])}")
    out.print(
        f"k3 {format_number(summary['k3'])}, multiplicative error {format_number(summary['multiplicative_error'])}, "
        f"mean signed logdiff {format_number(summary['signed_logdiff'])}"
    )
    leaves = summary["leaves"]
    if leaves["number"]:
        mean, most, variation = (format_number(leaves[key]) for key in ("kl_mean", "kl_max", "pinsker"))
        out.print(
            f"{leaves['number']} diverging leaves: KL(live || compressed) mean {mean}, max {most}; "
            f"total variation at most {variation} on average"
        )
