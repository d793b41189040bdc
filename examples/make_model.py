"""Writes a small Qwen3 with random weights, for trying commands that need a model: python -m examples.make_model FOLDER

Random weights have no opinion about language, but they do depend on their context, which is all that drift needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


def main(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,)}
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (64,),
            f"{prefix}.post_attention_layernorm.weight": (64,),
            f"{prefix}.self_attn.q_norm.weight": (16,),
            f"{prefix}.self_attn.k_norm.weight": (16,),
            f"{prefix}.self_attn.q_proj.weight": (64, 64),
            f"{prefix}.self_attn.k_proj.weight": (32, 64),
            f"{prefix}.self_attn.v_proj.weight": (32, 64),
            f"{prefix}.self_attn.o_proj.weight": (64, 64),
            f"{prefix}.mlp.gate_proj.weight": (128, 64),
            f"{prefix}.mlp.up_proj.weight": (128, 64),
            f"{prefix}.mlp.down_proj.weight": (64, 128),
        }
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.15 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.make_model FOLDER")
    main(Path(sys.argv[1]))
