"""Combinations that would train something else than what was asked for, refused before any work."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_plugin.config.architecture import check_divides
from slime_plugin.errors import ConfigError


def check_model(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """What no tree can be trained with."""
    for name in ("hidden_dropout", "attention_dropout"):
        rate = getattr(config, name)
        if rate > 0:
            raise ConfigError(
                f"{name} is {rate}: a token that stands on several branches would be dropped on some of them, and "
                f"log-probabilities would not be those of the rollout; set {name}=0"
            )
    if config.mtp_num_layers:
        raise ConfigError(
            f"mtp_num_layers is {config.mtp_num_layers}: multi-token prediction shifts labels along the row, which is "
            "not a path of the tree; train without it"
        )
    if config.multi_latent_attention:
        raise ConfigError(
            "multi_latent_attention is not supported by tree attention; train it with method logittree and its own "
            "model provider"
        )
    variant = getattr(config, "experimental_attention_variant", None)
    if variant is not None or config.window_size is not None:
        what = f"{variant} attention" if variant is not None else f"a sliding window of {config.window_size}"
        raise ConfigError(
            f"{what} does not read exactly the path of a token, so a packed tree is not exact; train it with method "
            "logittree and its own model provider"
        )
    check_divides("num_attention_heads", config.num_attention_heads, "tensor-parallel", groups.tp.size())
    check_divides("num_query_groups", config.num_query_groups, "tensor-parallel", groups.tp.size())
    if config.num_layers_in_first_pipeline_stage is None and config.num_layers_in_last_pipeline_stage is None:
        check_divides("num_layers", config.num_layers, "pipeline-parallel", groups.pp.size())
