"""What slime calls in its rollout process. Needs no Megatron."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime_plugin.seam.args import cell_of
from slime_plugin.seam.rollout import Sample, record_of, reward_of, sessions_of
from slime_plugin.seam.train_data import as_sampled, convert


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """``--custom-generate-function-path``. How to sample is in the configuration, not in ``sampling_params``."""
    return await sessions_of(args).generate(sample, evaluation)


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """``--custom-rm-path``"""
    return reward_of(sample)


def convert_samples(args: Namespace, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """``--custom-convert-samples-to-train-data-path``"""
    records = [as_sampled(record_of(sample), sample.reward) for sample in samples]
    return convert(records, [sample.index or 0 for sample in samples], cell_of(args))
