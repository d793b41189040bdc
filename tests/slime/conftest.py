from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_plugin.architecture import PUBLISHED


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the paths of the cells are: models without weights, and questions."""
    root = tmp_path_factory.mktemp("published")
    for name, shape in PUBLISHED.items():
        folder = root / "models" / name
        folder.mkdir(parents=True)
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.groups,
            "head_dim": shape.head_size,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_theta": shape.rotary_base,
            "max_position_embeddings": shape.max_positions,
            "tie_word_embeddings": shape.tied,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (root / "models" / f"{name}_torch_dist").mkdir()
    (root / "data").mkdir()
    for name in ("train", "dev"):
        (root / "data" / f"{name}.jsonl").write_text('{"question": "Who?", "answers": ["Ada"], "id": "q1"}\n')
    return root
