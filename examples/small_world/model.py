"""The smallest Qwen3 that can read: three layers whose first heads are built, not found.

Looking something up in a context takes two heads in a row: one that tells each token which token stood before it, and
one that searches for the place where the present token stood before, and copies what came after. Gradient descent finds
them late; here they are there from the start, and training only has to use them.

Plain torch, on tensors under the names that a checkpoint gives them: what is trained is what is saved. Legend: B rows,
T tokens, S tokens with those in the cache, V vocabulary, H hidden size, d head size. Residual stream: [0, 64) what the
token is, [64, 96) what the one before it was, [96, 120) the one before that, 127 always the same.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 432,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
LAYERS, HIDDEN, INNER, HEAD = (CONFIG[n] for n in ("num_hidden_layers", "hidden_size", "intermediate_size", "head_dim"))
HEADS, GROUPS, VOCABULARY = (CONFIG[n] for n in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
IDENTITY, BEFORE, EARLIER, CONSTANT = slice(0, 64), slice(64, 96), slice(96, 120), 127
EMBEDDING = "model.embed_tokens.weight"
FAST = 5
"""Rotary pairs that tell neighbouring positions apart; the others hardly turn within an episode."""

Weights = dict[str, Tensor]
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, groups, S, d]."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Of every tensor of the checkpoint."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
        "self_attn.v_proj": (GROUPS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {EMBEDDING: (VOCABULARY, HIDDEN), **layers, "model.norm.weight": (HIDDEN,)}


def build(seed: int) -> Weights:
    """A model that repeats what it has seen before, and knows nothing."""
    draw = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=draw)
        for name, shape in shapes().items()
    }
    embedding = weights[EMBEDDING]  # [V, H]
    embedding[:, IDENTITY] = 0.15 * torch.randn(VOCABULARY, 64, generator=draw)
    embedding[:, CONSTANT] = 0.3
    _look_back(_attention(weights, 0))
    for layer in range(1, LAYERS):
        _look_up(_attention(weights, layer), draw)
    return weights


def _attention(weights: Weights, layer: int) -> Weights:
    prefix = f"model.layers.{layer}.self_attn."
    return {name[len(prefix) : -len(".weight")]: weights[name] for name in weights if name.startswith(prefix)}


def _look_back(attention: Weights) -> None:
    """Heads 0 and 1 attend to the last token and to the one before. Their keys are the same everywhere, so only the
    distance counts: the query is the key, turned by as much as rotary embedding turns it over that distance."""
    rates = CONFIG["rope_theta"] ** (-torch.arange(FAST) / (HEAD // 2))
    attention["k_proj"][:HEAD] = 0.0
    attention["k_proj"][:FAST, CONSTANT] = 1.0
    for head, distance in ((0, 1), (1, 2)):
        query = attention["q_proj"][head * HEAD : (head + 1) * HEAD]  # [d, H]
        query[:] = 0.0
        query[:FAST, CONSTANT] = torch.cos(distance * rates)
        query[HEAD // 2 : HEAD // 2 + FAST, CONSTANT] = -torch.sin(distance * rates)
    attention["q_norm"][:] = 2.5
    attention["k_norm"][:] = 2.5
    attention["v_proj"][:HEAD] = 0.0
    attention["v_proj"][:HEAD, :HEAD] = torch.eye(HEAD)
    attention["o_proj"][BEFORE, :HEAD] = 0.5 * torch.eye(HEAD)
    attention["o_proj"][EARLIER, HEAD : 2 * HEAD] = 0.5 * torch.eye(HEAD)[: EARLIER.stop - EARLIER.start]


def _look_up(attention: Weights, draw: torch.Generator) -> None:
    """Of each pair of heads that share keys, one searches for what the token is among what stood before others, and
    copies half of the identity found there; the other is free. The search lives in rotary pairs that hardly turn."""
    still = torch.tensor([i for i in range(HEAD) if i % (HEAD // 2) >= FAST])
    search = torch.randn(len(still), HEAD, generator=draw) / math.sqrt(HEAD)
    for group in range(GROUPS):
        head = group * (HEADS // GROUPS)
        half = slice(group * HEAD, (group + 1) * HEAD)
        attention["k_proj"][group * HEAD + still, BEFORE] += search
        attention["q_proj"][head * HEAD + still, :HEAD] += search
        attention["v_proj"][half, half] += torch.eye(HEAD)
        attention["o_proj"][half, head * HEAD : (head + 1) * HEAD] += torch.eye(HEAD)
    attention["q_norm"][:] = 1.8
    attention["k_norm"][:] = 1.8


def forward(
    weights: Weights, tokens: Tensor, positions: Tensor, mask: Tensor | None = None, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """tokens, positions [B, T] -> final hidden states [B, T, H] and the cache with these tokens in it.

    Without a ``mask`` [B, 1, T, S] every token sees those before it, so padding at the end of a row needs none."""
    hidden = functional.embedding(tokens, weights[EMBEDDING])
    rates = CONFIG["rope_theta"] ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    angles = (positions[:, None, :, None] * rates).repeat(1, 1, 1, 2)  # [B, 1, T, d]
    cos, sin = angles.cos(), angles.sin()
    grown: Cache = []
    for layer in range(LAYERS):
        w = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in _LAYER}
        normed = _norm(hidden, w["input_layernorm"])
        query, key, value = (_heads(functional.linear(normed, w[f"self_attn.{x}_proj"])) for x in "qkv")
        query = _turn(_norm(query, w["self_attn.q_norm"]), cos, sin)
        key = _turn(_norm(key, w["self_attn.k_norm"]), cos, sin)
        if cache is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (key, value), strict=True))
        grown.append((key, value))
        seen = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        hidden = hidden + functional.linear(seen.transpose(1, 2).flatten(2), w["self_attn.o_proj"])
        normed = _norm(hidden, w["post_attention_layernorm"])
        gate = functional.silu(functional.linear(normed, w["mlp.gate_proj"]))
        hidden = hidden + functional.linear(gate * functional.linear(normed, w["mlp.up_proj"]), w["mlp.down_proj"])
    return _norm(hidden, weights["model.norm.weight"]), grown


_LAYER = [name[len("model.layers.0.") : -len(".weight")] for name in shapes() if name.startswith("model.layers.0.")]


def _heads(x: Tensor) -> Tensor:
    """[B, T, n d] -> [B, n, T, d]."""
    return x.view(*x.shape[:2], -1, HEAD).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, CONFIG["rms_norm_eps"])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, with pairs (i, i + d/2)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def logits_of(weights: Weights, hidden: Tensor) -> Tensor:
    """[..., H] -> [..., V]; the embedding is tied."""
    return functional.linear(hidden, weights[EMBEDDING])


def save(weights: Weights, folder: Path, stop: int, pad: int) -> None:
    """In bf16, as checkpoints are."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    ids = {"eos_token_id": stop, "pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ids}, indent=2) + "\n", encoding="utf-8")
    generation = {**ids, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> Weights:
    return {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
