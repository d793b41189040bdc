"""Positions as the model applies them: queries and keys before and behind its rotation, against float64.

They are caught between the norm and the attention of a layer while the model computes, so it does not matter which
kernel rotates, fused or not. Position ids are random numbers up to the longest context of the cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_plugin.train.process_groups import context_group
from slime_plugin.train.tree_model import unwrapped
from slime_plugin.train.tree_sequence import tree_sequence
from slime_plugin.verify import oracles, world
from slime_plugin.verify.generated import random_tree
from slime_plugin.verify.measurement import Measurement, worst
from slime_plugin.verify.settings import Verification

TOKENS, SEGMENTS = 512, 24
_TABLE = (
    "the angle of a token is not that of its number of ancestors: compare rope_theta in the model's config.json, and "
    "the versions of Megatron and Transformer Engine with docker/versions.env"
)
_DEPTH = "position ids are not the number of ancestors; this is a bug of this package: report it with the JSON output"


def check(verification: Verification) -> Iterator[Measurement]:
    found = world.run_on_ranks(verification.parallel.ranks, measure, verification)
    wrong = sum(rank["depths"] for rank in found)
    yield Measurement.at_most(f"depths of {TOKENS} tokens that are wrong", wrong, 0.0, _DEPTH)
    rotation = worst(rank["rotation"] for rank in found)
    what = f"queries and keys at positions up to {verification.positions:,}"
    yield Measurement.at_most(what, rotation, verification.rope_limit, _TABLE)


def measure(verification: Verification) -> dict[str, float]:
    """Return the wrong depths and the relative difference of rotated queries and keys on this rank."""
    rank = world.open_rank(verification)
    generator = np.random.default_rng(verification.seed)
    multiple = 2 * verification.parallel.tp * verification.parallel.cp
    parent = random_tree(-(-TOKENS // multiple) * multiple, SEGMENTS, generator)
    sequence = tree_sequence(parent, device=world.device(), cp_group=context_group(rank.groups))
    low, high = sequence.plan.window
    depths = oracles.path_sets(parent).sum(axis=1) - 1
    wrong = int((sequence.position.cpu().numpy() != depths[low:high]).sum())
    positions = generator.integers(0, verification.positions, len(parent))
    positions[0] = verification.positions - 1
    here = torch.from_numpy(positions[low:high]).to(world.device())
    sequence.position = here.to(sequence.position.dtype)
    caught = _Caught(rank.models)
    tokens = generator.integers(0, verification.architecture.vocabulary, len(parent)).astype(np.int32)
    world.run_model(rank, tokens, sequence)
    base = verification.architecture.rotary_base
    differences = [
        oracles.relative(behind, oracles.rotated(before.reshape(behind.shape), here, base))
        for before, behind in caught.pairs()
    ]
    return {"depths": float(wrong), "rotation": worst(differences)}


class _Caught:
    """Queries and keys of the first layer of each part of the model on this rank, before and behind the rotation."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._before: list[Tensor] = []
        self._behind: list[Tensor] = []
        for model in models:
            attention: Any = unwrapped(model).decoder.layers[0].self_attention
            for norm in (attention.q_layernorm, attention.k_layernorm):
                norm.register_forward_hook(lambda module, inputs, output: self._before.append(output))
            attention.core_attention.register_forward_pre_hook(lambda module, inputs: self._behind.extend(inputs[:2]))

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._before, self._behind, strict=True)
