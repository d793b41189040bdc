"""Reward and logdiff of training runs as they go on, as in docs/results.md: ``python -m benchmarks.curves RUN...``"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from slime_plugin.report.formatting import format_number
from slime_plugin.run.folder import RunFolder

PARTS = 6


def parts_of(lines: list[dict[str, Any]], key: str) -> list[str]:
    """Means over equal parts of a run."""
    values = [line[key]["mean"] if key == "logdiff" else line[key] for line in lines]
    size = -(-len(values) // PARTS)
    return [format_number(statistics.mean(values[i : i + size])) for i in range(0, len(values), size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for key, name in (("reward", "mean reward"), ("logdiff", "mean |logdiff|, nats per trained token")):
        print(f"\n{name}")
        for run in parser.parse_args().runs:
            lines = [line for line in RunFolder(run).read_metrics() if line["kind"] == "iteration"]
            cells = " | ".join(f"{cell:>8}" for cell in parts_of(lines, key))
            print(f"| {run.name:<20} | {cells} |")


if __name__ == "__main__":
    main()
