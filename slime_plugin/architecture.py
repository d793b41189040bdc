"""The shape of a Hugging Face Qwen3 model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import ConfigError


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
        """Read the ``config.json`` of a Hugging Face checkpoint."""
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
        rope = _table(config, "rope_parameters") or config  # newer configurations keep RoPE in a table of its own
        return cls(
            vocabulary=_whole(path, config, "vocab_size"),
            hidden=_whole(path, config, "hidden_size"),
            layers=_whole(path, config, "num_hidden_layers"),
            heads=_whole(path, config, "num_attention_heads"),
            groups=_whole(path, config, "num_key_value_heads"),
            head_size=_whole(path, config, "head_dim"),
            feed_forward=_whole(path, config, "intermediate_size"),
            norm_epsilon=_positive(path, config, "rms_norm_eps"),
            rotary_base=_positive(path, rope, "rope_theta"),
            max_positions=_whole(path, config, "max_position_embeddings"),
            tied=config.get("tie_word_embeddings") is True,
        )

    @classmethod
    def of(cls, folder: Path) -> Architecture:
        """Read a checkpoint; if it is not on this machine, use the published model that the folder is named after."""
        if folder.is_dir() or folder.name not in PUBLISHED:
            return cls.read(folder)
        return PUBLISHED[folder.name]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.groups) + 2 * self.head_size
        layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def check_split(self, parallel: Parallelism) -> None:
        """Refuse tensor-parallel ranks that do not divide the heads, and more stages than layers."""
        for what, number, ranks, size in (
            ("num_attention_heads", self.heads, "tensor-parallel", parallel.tp),
            ("num_key_value_heads", self.groups, "tensor-parallel", parallel.tp),
            ("intermediate_size", self.feed_forward, "tensor-parallel", parallel.tp),
        ):
            check_divides(what, number, ranks, size)
        if self.layers < parallel.pp:
            raise ConfigError(
                f"num_hidden_layers is {self.layers}, too few for {parallel.pp} pipeline stages; choose at most "
                f"{self.layers}"
            )
        if parallel.vpp > 1:
            check_divides("num_hidden_layers", self.layers, "virtual pipeline", parallel.pp * parallel.vpp)

    def last_stage(self, stages: int) -> int | None:
        """Return the layers of the last pipeline stage if the others have another number of them; else None.

        It has fewer where that is possible, because it computes the head as well: 3 layers are split into 2 and 1.
        """
        if self.layers % stages == 0:
            return None
        rest = self.layers - (stages - 1) * (self.layers // stages + 1)
        return rest if rest > 0 else self.layers - (stages - 1) * (self.layers // stages)

    def padded_vocabulary(self, tp: int) -> int:
        """Return the vocabulary padded to a multiple of the tensor-parallel ranks."""
        return -(-self.vocabulary // tp) * tp


def _published(hidden: int, layers: int, heads: int, feed_forward: int, *, tied: bool) -> Architecture:
    return Architecture(
        vocabulary=151_936,
        hidden=hidden,
        layers=layers,
        heads=heads,
        groups=8,
        head_size=128,
        feed_forward=feed_forward,
        norm_epsilon=1e-6,
        rotary_base=1e6,
        max_positions=40_960,
        tied=tied,
    )


PUBLISHED = {
    "Qwen3-0.6B": _published(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _published(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _published(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _published(4096, 36, 32, 12288, tied=False),
    "Qwen3-14B": _published(5120, 40, 40, 17408, tied=False),
    "Qwen3-32B": _published(5120, 64, 64, 25600, tied=False),
}
"""The dense Qwen3 models, so that a job can be planned where their weights are not."""


def check_divides(what: str, number: int, ranks: str, size: int) -> None:
    if number % size:
        raise ConfigError(f"{what} is {number}, which {size} {ranks} ranks do not divide; choose a divisor of {number}")


def _whole(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {key} is {value!r:.40}, not a positive whole number; is this a Qwen3 model?")
    return value


def _positive(path: Path, config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{path}: {key} is {value!r:.40}, not a positive number; is this a Qwen3 model?")
    return float(value)


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _refuse_others(path: Path, config: dict[str, Any]) -> None:
    """Refuse a model that would load without an error and compute something else."""
    if config.get("model_type") != "qwen3":
        raise ConfigError(f"{path}: model_type is {config.get('model_type')!r:.40}; dense Qwen3 models are supported")
    scaling = _table(config, "rope_scaling") or _table(config, "rope_parameters")
    wanted = {
        "attention_bias": (config.get("attention_bias", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "rope_type": (scaling.get("rope_type", scaling.get("type", "default")), "default"),
    }
    for name, (found, supported) in wanted.items():
        if found != supported:
            raise ConfigError(f"{path}: {name} is {found!r:.40}; only {supported!r} is supported")
