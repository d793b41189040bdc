"""Our hooks for slime's own contract tests, which call a hook with arguments and samples that have nothing in them.

Each gives them what a job has by then, a cell and records, calls the hook, and leaves the traces that slime's tests
look for, which are those of slime's examples.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.hooks import rollout
from slime_plugin.record import Edit, Meta, Record
from slime_plugin.slime.args import KEY
from slime_plugin.slime.samples import put_record


def rollout_log(
    rollout_id: int, args: Any, samples: Sequence[Any], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    skip = rollout.rollout_log(rollout_id, _job(args), _rolled_out(samples), rollout_extra_metrics, rollout_time)
    args.logged_rollout_id = rollout_id
    return skip


def evaluation_log(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    for found in data.values():
        _rolled_out(found["samples"])
    skip = rollout.evaluation_log(rollout_id, _job(args), data, extra_metrics)
    args.logged_eval_rollout_id = rollout_id
    return skip


def reward_post_process(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    return rollout.reward_post_process(_job(args), _rolled_out(samples))


def convert_samples(args: Any, samples: Sequence[Any]) -> dict[str, list[Any]]:
    return rollout.convert_samples(_job(args), _rolled_out(samples))


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    _rolled_out([sample])
    return await rollout.reward(_job(args), sample, **kwargs)


def _job(args: Any) -> Namespace:
    return Namespace(**{KEY: Cell().to_json()})


def _rolled_out(samples: Sequence[Any]) -> Sequence[Any]:
    for sample in samples:
        judged = 0.5 if sample.reward is None else float(sample.reward)
        put_record(
            sample,
            Record(
                tokens=[7, 8, 9, 5],
                generated=[0, 1, 0, 1],
                logprobs=[None, -0.5, None, -0.25],
                views=[[(0, 2)], [(0, 1), (2, 4)]],
                edits=[Edit("pop", "policy")],
                meta=Meta(id=f"r{sample.index}", harness="contract", group=1, reward=judged),
            ),
        )
    return samples
