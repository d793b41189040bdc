"""The Megatron configuration that computes what a Hugging Face Qwen3 model computes."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from slime_plugin.architecture import Architecture
from slime_plugin.config.parallel import Parallelism
from slime_plugin.config.trainer import Dtype

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def torch_dtype(name: Dtype | None) -> torch.dtype:
    """Return the dtype of a configuration; float32 on a CPU and bfloat16 on a GPU if it does not say."""
    return DTYPES[name or ("bfloat16" if torch.cuda.is_available() else "float32")]


def transformer_config(
    architecture: Architecture,
    parallel: Parallelism,
    dtype: torch.dtype = torch.float32,
    *,
    recompute: bool = False,
) -> TransformerConfig:
    """Return the configuration of a model. ``recompute``: layers are computed again in backward, not kept."""
    architecture.check_split(parallel)
    cuda = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.groups,
        kv_channels=architecture.head_size,
        ffn_hidden_size=architecture.feed_forward,
        layernorm_epsilon=architecture.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        num_layers_in_last_pipeline_stage=architecture.last_stage(parallel.pp),
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
        apply_rope_fusion=cuda,  # Transformer Engine's kernel
        persist_layer_norm=cuda,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
