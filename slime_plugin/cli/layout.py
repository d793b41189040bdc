"""``memorywalker layout``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from slime_plugin.cli.inputs import FILE, METHOD, RECORD, choose_record, chosen_method
from slime_plugin.cli.output import console
from slime_plugin.methods import Layout, Method, Row, lay_out, method_of
from slime_plugin.record.arrays import to_json_floats
from slime_plugin.report.formatting import format_lost
from slime_plugin.report.tables import number_table
from slime_plugin.tree import Counts, Trajectory, count


@click.command()
@FILE
@METHOD
@RECORD
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def layout(file: Path, wanted: str | None, as_json: bool, **method_options: Any) -> None:
    """Show what a method would train on, given a record.

    A row is a list of tokens, each with the index of the token it follows. Without --json, a summary.
    """
    method = chosen_method(**method_options)
    trajectory = Trajectory.of(choose_record(file, wanted))
    result, counts = lay_out(trajectory, method), count(trajectory)
    if as_json:
        click.echo(json.dumps(layout_json(method_of(method), result, counts), separators=(",", ":")))
    else:
        _print_summary(method_of(method), result, counts)


def layout_json(method: Method[Any], result: Layout, counts: Counts) -> dict[str, Any]:
    """The documented JSON form of a layout."""
    teachers = [
        {
            **_columns(teacher.row),
            "leaves": [
                {"student": student, "teacher": index}
                for student, index in zip(teacher.student.tolist(), teacher.teacher.tolist(), strict=True)
            ],
        }
        for teacher in result.teachers
    ]
    numbers = {
        **counts.to_json(),
        "rows": len(result.rows),
        "tokens": result.tokens,
        "teacher_tokens": result.teacher_tokens,
        # What splitting a tree over a budget costs: tokens beyond those of the whole tree.
        "duplicated": result.tokens - counts.trie_tokens if method.splits else 0,
        "trained": result.trained,
        "off_context": result.off_context,
        "lost": dict(result.lost),
    }
    return {
        "method": result.method,
        "packing": getattr(method.settings, "packing", None),
        "rows": [_trained_columns(row) for row in result.rows],
        "teachers": teachers,
        "counts": numbers,
    }


def _columns(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name).tolist() for name in ("tokens", "tape", "parent", "position")}


def _trained_columns(row: Row) -> dict[str, Any]:
    columns = _columns(row) | {
        "loss_mask": row.loss_mask.astype(int).tolist(),
        "rollout_logprobs": to_json_floats(row.rollout_logprobs),
    }
    return columns if row.visible is None else columns | row.visible.to_json()


def _print_summary(method: Method[Any], result: Layout, counts: Counts) -> None:
    out = console()
    out.print(method.description, soft_wrap=True, markup=False)
    table = number_table(("row", "tokens", "roots", "deepest", "trained"), left=0)
    for i, row in enumerate(result.rows):
        numbers = (i, len(row), int((row.parent < 0).sum()), int(row.position.max()) + 1, int(row.loss_mask.sum()))
        table.add_row(*map(str, numbers))
    for teacher in result.teachers:
        sizes = (len(teacher.row), int((teacher.row.parent < 0).sum()), int(teacher.row.position.max()) + 1)
        table.add_row("teacher", *map(str, sizes), f"{len(teacher.student)} leaves")
    out.print(table)
    trained = f"trained {result.trained} of {counts.sampled} sampled tokens"
    out.print(f"\n{trained}; not trained: {format_lost(result.lost)}")
    if result.off_context is None:
        out.print("not exact: the visible tokens are right, their hidden states are not")
    else:
        out.print(f"trained in a context other than the one they were sampled in: {result.off_context}")
    computed = f"computed {result.tokens} tokens" + (
        f" and {result.teacher_tokens} without gradient" if result.teachers else ""
    )
    out.print(f"{computed}; one chain per branch takes {counts.branch_tokens}, the prefix tree {counts.trie_tokens}")
