"""A dense GPT on megatron-core whose attention, positions and head follow trees. Plain sequences cost what they did.

Layers, tensor and pipeline parallelism, recompute and checkpoints are Megatron's. Three things are ours, each plugged
in where Megatron allows it: the core attention in the layer spec, the rotary embedding, and the rows that the output
layer gets.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_plugin.config.architecture import Architecture
from slime_plugin.errors import LayoutError
from slime_plugin.megatron.attention import attend_masked, choose_backend
from slime_plugin.megatron.norm import RMSNorm
from slime_plugin.megatron.refusals import check_model
from slime_plugin.megatron.rotary import DepthRotaryEmbedding
from slime_plugin.megatron.sequence import TreeSequence


class TreeAttention(MegatronModule):  # type: ignore[misc]  # megatron-core is not typed
    """Core attention along the plan of a :class:`TreeSequence`. It has no parameters and no state.

    Queries stay where they are; under context parallelism keys and values are gathered over the group, and their
    gradients come back by reduce-scatter.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, backend: str | None = None, **stock: Any) -> None:
        super().__init__(config=config)
        self.attend = choose_backend(backend)
        self.scale = stock.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[window, heads, d] from query [window, heads, d], key and value [window, groups, d]."""
        if not isinstance(packed_seq_params, TreeSequence):
            raise LayoutError(
                f"tree attention got {type(packed_seq_params).__name__} instead of a TreeSequence; "
                "pass packed_seq_params=tree_sequence(parent, ...) to the model"
            )
        sequence = packed_seq_params
        if sequence.cp_group is not None:
            both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=sequence.cp_group)
            key, value = both.chunk(2, dim=-1)
        if sequence.visible is not None:
            return attend_masked(query, key, value, sequence.visible, self.scale)
        return self.attend(query, key, value, sequence.plan, self.scale)


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


class _Alone:
    """Stands for a process group of one. Megatron's layers are given it as their context-parallel group: stock code
    splits sequences in zigzag there, ours in contiguous windows, and only ``TreeSequence`` has to know about them."""

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
    kind: type[TreeGPTModel] = TreeGPTModel,
) -> TreeGPTModel:
    """The part of the model that this pipeline stage holds, without weights."""
    check_model(config, groups)
    layer_groups = copy.copy(groups)
    layer_groups.cp = _Alone()
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
    tree_attention = ModuleSpec(module=TreeAttention, params={"backend": backend})
    if torch.cuda.is_available():
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        spec.submodules.self_attention.submodules.core_attention = tree_attention
        return spec
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = tree_attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=groups.pp.rank())
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


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
