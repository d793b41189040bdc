"""What slime calls in its rollout process. Needs no Megatron."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugin.slime.batch import convert, rewards_and_advantages
from slime_plugin.slime.recording import record_evaluation, record_rollouts, replayed_groups
from slime_plugin.slime.samples import Sample, reward_of, rollout_output, rollout_service


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """``--custom-generate-function-path``. How to sample is in the configuration, not in ``sampling_params``."""
    return await rollout_service(args).generate(sample, evaluation)


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """``--custom-rm-path``"""
    return reward_of(sample)


def reward_post_process(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """``--custom-reward-post-process-path``. slime does not call it as long as ours converts samples."""
    return rewards_and_advantages(args, samples)


def convert_samples(args: Namespace, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """``--custom-convert-samples-to-train-data-path``"""
    return convert(args, samples)


def rollout_log(
    rollout_id: int,
    args: Namespace,
    samples: Sequence[Sample],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """``--custom-rollout-log-function-path``. False: slime logs its own statistics too, with ours among them."""
    record_rollouts(rollout_id, args, samples, rollout_extra_metrics)
    return False


def evaluation_log(
    rollout_id: int, args: Namespace, data: Mapping[str, Mapping[str, Any]], extra_metrics: dict[str, Any] | None
) -> bool:
    """``--custom-eval-rollout-log-function-path``. False: slime logs its own statistics."""
    record_evaluation(rollout_id, args, data, extra_metrics)
    return False


def replay(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """``--rollout-function-path`` of a job that trains on recorded rollouts."""
    return rollout_output(replayed_groups(rollout_id, args, data_source))
