"""A dense GPT on megatron-core whose attention, positions and head follow trees. Plain sequences cost what they did.

Layers, tensor and pipeline parallelism, recompute and checkpoints are Megatron's. Three things are ours, each plugged
in where Megatron allows it: the core attention in the layer spec, the rotary embedding, and the rows that the output
layer gets.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_plugin.architecture import Architecture, check_divides
from slime_plugin.errors import ConfigError
from slime_plugin.train.layers import DepthRotaryEmbedding, RMSNorm, TreeAttention
from slime_plugin.train.tree_sequence import TreeSequence


class TreeGPTModel(GPTModel):  # type: ignore[misc]  # megatron-core is not typed
    """Megatron's GPT for packed rows of trees. Give it ``packed_seq_params=tree_sequence(parent, ...)``."""

    def __init__(self, config: TransformerConfig, *args: Any, rotary_base: float = 10_000.0, **kwargs: Any) -> None:
        super().__init__(config, *args, position_embedding_type="rope", rotary_base=rotary_base, **kwargs)
        self.rotary_pos_emb = DepthRotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=1.0,
            rotary_base=rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sequence = kwargs["packed_seq_params"]
        if self.post_process:
            hidden_states = self._rows_for_head(hidden_states, sequence)
            if not sequence.project:
                return hidden_states
        output: Tensor = super()._postprocess(hidden_states, *args, **kwargs)
        return output

    def _rows_for_head(self, hidden: Tensor, sequence: TreeSequence) -> Tensor:
        """Gather over the groups that split the row, select, and split again where the head expects it split."""
        if sequence.head_rows is None:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        if sequence.cp_group is not None:
            hidden = gather_from_sequence_parallel_region(hidden, group=sequence.cp_group)
        hidden = hidden.index_select(0, sequence.head_rows)
        if self.config.sequence_parallel and sequence.project:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        return hidden


AnyTreeModel = TypeVar("AnyTreeModel", bound=TreeGPTModel)


class _SingleRank:
    """A process group of one. Megatron's layers get it as their context-parallel group: stock code splits sequences in
    zigzag there, ours in contiguous windows, and only ``TreeSequence`` has to know about them."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def build_model(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    architecture: Architecture,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    backend: str | None = None,
    kind: type[AnyTreeModel],
) -> AnyTreeModel:
    """The part of the model that this pipeline stage holds, without weights."""
    check_model(config, groups)
    layer_groups = copy.copy(groups)
    layer_groups.cp = _SingleRank()
    model = kind(
        config,
        transformer_layer_spec=_layer_spec(config, groups, backend, vp_stage),
        vocab_size=architecture.padded_vocabulary(groups.tp.size()),
        max_sequence_length=architecture.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=architecture.tied,
        rotary_base=architecture.rotary_base,
        vp_stage=vp_stage,
        pg_collection=layer_groups,
    )
    _mark_shards(model)
    return model


def check_model(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Refuse what would train something else than was asked for, or what no tree can be trained with."""
    for name in ("hidden_dropout", "attention_dropout"):
        rate = getattr(config, name)
        if rate > 0:
            raise ConfigError(
                f"{name} is {rate}: a token on several branches would be dropped on some of them, and "
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


def _mark_shards(model: torch.nn.Module) -> None:
    """Megatron marks what is split over tensor-parallel ranks when it initialises weights, but here they are loaded.
    Without the mark the norm of a gradient, and so its clipping, would leave out the shards of all but the first rank.
    """
    split = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight, dimension = getattr(module, "weight", None), split.get(type(module))
        if weight is not None and dimension is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)


def _layer_spec(
    config: TransformerConfig, groups: ProcessGroupCollection, backend: str | None, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers on CUDA, the local ones elsewhere, both with tree attention inside."""
    if torch.cuda.is_available():
        return _transformer_engine_spec(config, backend)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=TreeAttention, params={"backend": backend})
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=groups.pp.rank())
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


def _transformer_engine_spec(config: TransformerConfig, backend: str | None) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    tree_attention = ModuleSpec(module=TreeAttention, params={"backend": backend})
    spec.submodules.self_attention.submodules.core_attention = tree_attention
    return spec


def output_weight(model: torch.nn.Module) -> Tensor:
    """[V/tp, h] of a model on the last stage, tied or not."""
    inner = unwrapped(model)
    weight: Tensor = (
        inner.shared_embedding_or_output_weight()
        if inner.share_embeddings_and_output_weights
        else inner.output_layer.weight
    )
    return weight


def unwrapped(model: torch.nn.Module) -> Any:
    """The model inside Megatron's data-parallel wrapper."""
    inner = getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model
