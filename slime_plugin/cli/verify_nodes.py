"""What ``launch/verify.sh`` runs on the first node of its Ray cluster: ``memorywalker verify`` on every node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from slime_plugin.cli.config import prefixed_errors, with_cell
from slime_plugin.cli.main import main
from slime_plugin.cli.output import log_line, write_whole
from slime_plugin.cli.verify import check_names, choose_device, print_table, to_json
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import to_yaml
from slime_plugin.report.verification_page import verification_page
from slime_plugin.verify.nodes import CHECKS, Node, check_together, join_cluster, summary, verify_each
from slime_plugin.verify.settings import Device, Verification


@click.command()
@with_cell
@click.option("--run", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the results.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]))
@click.option("--quick", is_flag=True)
@click.option("--only", "names", callback=check_names, metavar="A,B")
def verify_nodes(
    cell: Cell, config: Path, run: Path, device: Device | None, quick: bool, names: tuple[str, ...]
) -> None:
    """Verify a cell on every node of the Ray cluster in RAY_ADDRESS, and the network between them.

    Options are those of memorywalker verify.
    """
    verification = Verification(cell, choose_device(device), quick)
    with prefixed_errors(config):
        verification.architecture.check_split(verification.parallel)
    run.mkdir(parents=True, exist_ok=True)
    settings = run / "settings.yaml"
    write_whole(settings, to_yaml(cell.to_json()))
    words = [str(settings), "--device", verification.device, "--only", ",".join(names), *(["--quick"] if quick else [])]
    nodes = join_cluster()
    results = []
    for result in check_together(verification, nodes, run):
        log_line(f"{result.check}: {result.verdict} in {result.seconds:.0f} s")
        results.append(result)

    def show_end(node: Node, code: int) -> None:
        log_line(f"{node.address}: {'passed' if code == 0 else 'failed'}; {run / node.address}.html has all of it")

    log_line(f"verifying on {len(nodes)} node{'s' * (len(nodes) > 1)}; {run}/HOST.log shows how far each is")
    found = verify_each(nodes, words, run, cell.cluster.gpus, show_end)
    results += [summary(node, found[node.address]) for node in nodes]
    about = {**CHECKS, **{node.address: "memorywalker verify on this node" for node in nodes}}
    value = to_json(verification, config, results, about)
    measured = found[nodes[0].address].get("measured")
    if measured is not None:  # a plan gets what the head has measured by itself, and what all have together
        value["measured"] = {**measured, "values": {**measured["values"], **value["measured"]["values"]}}
    print_table(results, about)
    click.echo(f"\n{value['verdict']}")
    for path, text in (
        (run / "verify.json", json.dumps(value, indent=1, allow_nan=False) + "\n"),
        (run / "verify.html", verification_page(value)),
    ):
        write_whole(path, text)
        log_line(f"wrote {path}")
    sys.exit(0 if value["ok"] else 1)


if __name__ == "__main__":
    main(command=verify_nodes)
