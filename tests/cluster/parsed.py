"""What slime's parser makes of a command line, as far as the plugin looks at it: our description of slime's defaults.

``tests/slime`` compares it with slime's own parser, where that is at hand.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from slime_plugin.cluster.arguments import plugin_yaml, slime_flags
from slime_plugin.cluster.flags import known_flags
from slime_plugin.config.cell import Cell

DEFAULTS: dict[str, Any] = {
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "normalize_advantages": False,
    "kl_coef": 0.0,
    "custom_advantage_function_path": None,
    "compute_advantages_and_returns": True,
    "use_opd": False,
    "use_tis": False,
    "use_opsm": False,
    "use_unbiased_kl": False,
    "eps_clip_c": None,
    "custom_pg_loss_reducer_function_path": None,
    "enable_mtp_training": False,
    "mtp_num_layers": None,
    "num_experts": None,
    "multi_latent_attention": False,
    "spec": None,
    "use_routing_replay": False,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "group_rm": False,
    "reward_key": None,
    "apply_chat_template": False,
    "multimodal_keys": None,
    "allgather_cp": False,
    "overlap_moe_expert_parallel_comm": False,
    "log_passrate": False,
    "sequence_parallel": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "virtual_pipeline_model_parallel_size": None,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "loss_type": "policy_loss",
}


def parsed(cell: Cell, run: Path, more: Sequence[str] = ()) -> Namespace:
    """The arguments of a job; a flag that is given twice counts the second time."""
    words = [*(word for flag in slime_flags(cell, run) for word in flag.words), *more]
    values, i = dict(DEFAULTS), 0
    while i < len(words):
        name, i = words[i], i + 1
        given = []
        while i < len(words) and not words[i].startswith("--"):
            given.append(yaml.safe_load(words[i]))
            i += 1
        key = name[2:].replace("-", "_")
        takes = known_flags()[name]
        values[key] = True if takes == "0" else given[0] if takes == "1" else given
    for key in ("lr", "kl_loss_coef", "norm_epsilon"):
        values[key] = float(values[key])  # YAML 1.1 has 1e-06 as a text
    divisor = values["make_vocab_size_divisible_by"] * values["tensor_model_parallel_size"]
    values["padded_vocab_size"] = -(-values["vocab_size"] // divisor) * divisor
    ranks = [values[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context")]
    values["data_parallel_size"] = values["actor_num_nodes"] * values["actor_num_gpus_per_node"] // math.prod(ranks)
    values["virtual_pipeline_model_parallel_size"] = values.get("num_virtual_stages_per_pipeline_rank")
    return Namespace(**values, **yaml.safe_load(plugin_yaml(cell)))
