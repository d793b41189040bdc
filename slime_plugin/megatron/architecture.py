"""The shape of a Hugging Face Qwen3 model, and the Megatron configuration that computes the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from slime_plugin.errors import ConfigError
from slime_plugin.megatron.parallel import Parallelism


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense Qwen3: grouped-query attention with normalised queries and keys, SwiGLU, RMSNorm, RoPE, no biases."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    groups: int
    """Key-value heads."""
    head_size: int
    feed_forward: int
    norm_epsilon: float
    rotary_base: float
    max_positions: int
    tied: bool
    """The output layer is the embedding."""

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """From the ``config.json`` of a Hugging Face checkpoint."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: not found; --model takes the folder of a Hugging Face checkpoint") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: holds no JSON object")
        _refuse_others(path, config)
        try:
            return cls(
                vocabulary=config["vocab_size"],
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                groups=config["num_key_value_heads"],
                head_size=config["head_dim"],
                feed_forward=config["intermediate_size"],
                norm_epsilon=config["rms_norm_eps"],
                rotary_base=_rope(config)["rope_theta"],
                max_positions=config["max_position_embeddings"],
                tied=config["tie_word_embeddings"],
            )
        except KeyError as error:
            raise ConfigError(f"{path}: no {error.args[0]!r}; is this the config.json of a Qwen3 model?") from error

    def padded_vocabulary(self, tp: int) -> int:
        """The vocabulary with as few unused rows as make it divide over the tensor-parallel ranks."""
        return -(-self.vocabulary // tp) * tp

    def to_megatron(
        self, parallel: Parallelism, dtype: torch.dtype = torch.float32, *, recompute: bool = False
    ) -> TransformerConfig:
        """``recompute`` recomputes whole layers in backward instead of keeping their activations."""
        cuda = torch.cuda.is_available()
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.head_size,
            ffn_hidden_size=self.feed_forward,
            layernorm_epsilon=self.norm_epsilon,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            context_parallel_size=parallel.cp,
            sequence_parallel=parallel.sp,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # what variable_seq_lengths asks for, experts or not
            calculate_per_token_loss=True,  # losses are sums with their weights already in them
            use_cpu_initialization=not cuda,
            perform_initialization=False,  # weights are loaded
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=cuda,
            recompute_granularity="full" if recompute else None,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Newer configurations keep RoPE in a table of its own, older ones at the top level."""
    table: dict[str, Any] = config.get("rope_parameters") or config
    return table


def _refuse_others(path: Path, config: dict[str, Any]) -> None:
    """A model that this would load without an error and compute wrongly."""
    if config.get("model_type") != "qwen3":
        raise ConfigError(f"{path}: model_type is {config.get('model_type')!r:.40}; dense Qwen3 models are supported")
    scaling = config.get("rope_scaling") or (config.get("rope_parameters") or {})
    wanted = {
        "attention_bias": (config.get("attention_bias", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "rope_type": (scaling.get("rope_type", scaling.get("type", "default")), "default"),
    }
    for name, (found, supported) in wanted.items():
        if found != supported:
            raise ConfigError(f"{path}: {name} is {found!r:.40}; only {supported!r} is supported")
