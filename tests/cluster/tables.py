"""Memory and time of every shipped cell, as ``memorywalker plan`` estimates them; ``tables.txt`` holds what they were.

python -m tests.cluster.tables       # print them
"""

from __future__ import annotations

from collections.abc import Iterator

from slime_plugin.cluster.job_problems import job_problems
from slime_plugin.config.overrides import load_cell
from slime_plugin.planner.job import GPUS
from slime_plugin.planner.memory import GB
from slime_plugin.planner.plan import Plan, plan_job
from tests.conftest import ROOT

CONFIGS = ROOT / "configs"
CELLS = sorted(path.stem for path in (CONFIGS / "cells").glob("*.yaml"))
NODES = (1, 2, 4, 32)
TIMED = ("tc_rag-mask4d", "claude_code-logittree")


def planned(name: str, *overrides: str, nodes: int = 1, gpu: str = "h100") -> Plan:
    cell = load_cell(CONFIGS / "cells" / f"{name}.yaml", overrides, [CONFIGS / "nodes" / f"{nodes}.yaml"])
    assert list(job_problems(cell)) == []
    return plan_job(cell, GPUS[gpu])


def memory_table() -> Iterator[str]:
    yield "| cell | longest row | fits on 1 node | GB on 1 | 2 | 4 | 32 nodes |"
    yield "|---|---|---|---|---|---|---|"
    for name in CELLS:
        plans = [planned(name, nodes=nodes) for nodes in NODES]
        sizes = " | ".join(f"{plan.rank.total / GB:.0f}" for plan in plans)
        yield f"| {name} | {plans[0].job.rows.longest:,} | {plans[0].longest_row:,} | {sizes} |"


def time_table() -> Iterator[str]:
    yield "| cell | nodes | GPU | rollouts | longest one | updates | waiting | all, s | rollouts/hour | tool calls/s |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in TIMED:
        for gpu in GPUS:
            for nodes in NODES:
                plan = planned(name, nodes=nodes, gpu=gpu)
                phases = plan.phases
                seconds = (phases.rollout, phases.tail, phases.training, phases.imbalance, phases.total)
                numbers = " | ".join(f"{number:.0f}" for number in seconds)
                hourly, calls = 3600 * plan.job.rollouts / phases.total, plan.decoding.calls_per_second
                yield f"| {name} | {nodes} | {plan.job.gpu.name} | {numbers} | {hourly:,.0f} | {calls:.0f} |"


def method_table() -> Iterator[str]:
    yield "| cell, H100 | tokens an iteration | PFLOP | updates, s | all on 1 | 2 | 4 | 32 nodes |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in CELLS:
        plans = [planned(name, nodes=nodes) for nodes in NODES]
        one = plans[0]
        tokens = round(one.job.rollouts * (one.job.rows.tokens + one.job.rows.teacher_tokens))
        wholes = " | ".join(f"{plan.phases.total:.0f}" for plan in plans)
        yield f"| {name} | {tokens:,} | {one.flops / 1e15:.0f} | {one.phases.training:.0f} | {wholes} |"


if __name__ == "__main__":
    for table in (memory_table, time_table, method_table):
        print(*table(), "", sep="\n")
