"""What ranks do with the layers that a GPU gets, in processes that :func:`te_reference.run_calls` starts."""
# ruff: noqa: E402  # Megatron looks for Transformer Engine when it is imported

from __future__ import annotations

from tests.train import te_reference

te_reference.install()

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime_plugin.architecture import PUBLISHED, Architecture
from slime_plugin.config.method import MethodSettings
from slime_plugin.config.parallel import Parallelism
from slime_plugin.train.hf_weights import load_weights, save_weights, slots_of
from slime_plugin.train.process_groups import is_first_stage, is_last_stage, start_groups
from slime_plugin.train.ranks import OnProgress
from slime_plugin.train.transformer_config import transformer_config
from slime_plugin.train.tree_model import TreeGPTModel, build_model
from tests.train.jobs import Job, Outcome, use_transformer_engine
from tests.train.jobs import update as update_on_rank


def update(on_progress: OnProgress, job: Job, methods: Sequence[MethodSettings]) -> list[Outcome]:
    return update_on_rank(on_progress, job, methods)


def describe(on_progress: OnProgress, model: str, parallel: Parallelism) -> list[te_reference.Described]:
    """This rank's parameters of a published model, which takes no memory."""
    groups, architecture = start_groups(parallel), PUBLISHED[model]
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]  # a device will do
    built = _build(architecture, parallel, torch.bfloat16, groups)
    return [
        te_reference.Described(
            name,
            tuple(slot.parameter.shape),
            slot.names,
            slot.shapes,
            tuple(slot.cut([torch.empty(shape, device="meta") for shape in slot.shapes], 0, parallel.tp).shape),
            {key: value for key, value in vars(slot.parameter).items() if not key.startswith("_")},
        )
        for (name, _), slot in zip(built.named_parameters(), slots_of([built], architecture), strict=True)
    ]


def pass_through(on_progress: OnProgress, source: Path, parallel: Parallelism, target: Path) -> None:
    """Load a checkpoint and save it again."""
    groups, architecture = start_groups(parallel), Architecture.read(source)
    model = _build(architecture, parallel, torch.float32, groups)
    load_weights([model], architecture, source, groups)
    save_weights([model], architecture, target, groups)


def _build(architecture: Architecture, parallel: Parallelism, dtype: torch.dtype, groups: Any) -> TreeGPTModel:
    config = transformer_config(architecture, parallel, dtype)
    use_transformer_engine(config)
    first, last = is_first_stage(groups), is_last_stage(groups)
    return build_model(config, groups, architecture, pre_process=first, post_process=last, kind=TreeGPTModel)
