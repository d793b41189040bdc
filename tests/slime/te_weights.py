"""What slime makes of the parameters that a GPU gets, in processes that ``te_reference.run_calls`` starts."""
# ruff: noqa: E402  # Megatron looks for Transformer Engine when it is imported

from __future__ import annotations

from tests.slime.sources import slime_imports
from tests.train import te_reference

te_reference.install()
slime_imports()

from argparse import Namespace
from pathlib import Path

import torch
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.update_weight.common import all_gather_param, named_params_and_buffers

from slime_plugin.architecture import Architecture
from slime_plugin.config.parallel import Parallelism
from slime_plugin.train.hf_weights import load_weights
from slime_plugin.train.process_groups import is_first_stage, is_last_stage, start_groups
from slime_plugin.train.ranks import OnProgress
from slime_plugin.train.transformer_config import transformer_config
from slime_plugin.train.tree_model import TreeGPTModel, build_model
from tests.train.jobs import use_transformer_engine


class _Wrapped(torch.nn.Module):
    """Stands where slime has Megatron's wrappers."""

    def __init__(self, model: TreeGPTModel) -> None:
        super().__init__()
        self.module, self.config = model, model.config


def converted(on_progress: OnProgress, folder: Path, parallel: Parallelism) -> dict[str, torch.Tensor]:
    """The tensors of this rank's stage by slime's own table."""
    groups, architecture = start_groups(parallel), Architecture.read(folder)
    config = transformer_config(architecture, parallel)
    use_transformer_engine(config)
    first, last = is_first_stage(groups), is_last_stage(groups)
    model = build_model(config, groups, architecture, pre_process=first, post_process=last, kind=TreeGPTModel)
    load_weights([model], architecture, folder, groups)
    args = Namespace(
        vocab_size=architecture.vocabulary,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.groups,
        kv_channels=architecture.head_size,
        num_experts=None,
        q_lora_rank=None,
    )
    found: dict[str, torch.Tensor] = {}
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)  # as Megatron's get_model does
    for name, parameter in named_params_and_buffers(args, [_Wrapped(model)]):
        found.update(convert_to_hf(args, "qwen3", name, all_gather_param(name, parameter)))
    return {name: x.detach().clone() for name, x in found.items()}
