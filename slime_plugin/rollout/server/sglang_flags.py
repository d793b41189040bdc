"""SGLang's flags for serving a model, on a CPU and on GPUs.

Prefix caching stays on everywhere: the turns of a rollout share their prefix.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_plugin.errors import ConfigError

Device = Literal["cpu", "cuda"]
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A model's folder with any of these files has a tokenizer."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The settings of SGLang that matter here; ``extra`` has further flags as SGLang spells them."""

    model: Path
    device: Device
    dtype: str | None = None
    """By default float32 on a CPU, where log-probabilities then agree with a trainer's to 1e-6, and the checkpoint's
    data type on a GPU."""
    tp: int = 1
    max_total_tokens: int | None = None
    """Size of the KV cache. By default 65,536 on a CPU; a GPU is filled."""
    context_length: int | None = None
    """Maximum tokens of a request; by default the checkpoint's."""
    seeded: bool | None = None
    """Whether ``sampling_seed`` of a request determines its samples, independent of the batch. By default only on a
    CPU: on a GPU it takes slower, batch-invariant kernels. **Requests without a seed then all have the same one.**"""
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device == "cpu" and self.tp != 1:
            raise ConfigError(f"{self.tp} tensor-parallel ranks need as many GPUs; on a CPU there is 1")

    @property
    def deterministic(self) -> bool:
        return self.device == "cpu" if self.seeded is None else self.seeded

    def command(self, host: str, port: int) -> list[str]:
        """Return the server's command line. Flags in ``extra`` come last and win."""
        module = "slime_plugin.rollout.server.sglang_on_cpu" if self.device == "cpu" else "sglang.launch_server"
        flags = ["--model-path", str(self.model), "--host", host, "--port", str(port), "--device", self.device]
        dtype, tokens = self.dtype, self.max_total_tokens
        if self.device == "cpu":
            dtype, tokens = dtype or "float32", tokens or 65536
            # Backends in plain torch; no overlap, which needs CUDA streams; no grammars, which need kernels.
            flags += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            flags += ["--disable-overlap-schedule", "--grammar-backend", "none", "--mem-fraction-static", "0.2"]
            flags += ["--sleep-on-idle"]  # otherwise an idle scheduler uses a whole core
        else:
            flags += ["--tp-size", str(self.tp)]
            if self.deterministic:
                flags += ["--attention-backend", "triton"]  # with SGLang's default the prefix cache may be off
        if self.deterministic:
            flags += ["--enable-deterministic-inference"]
        if not any((self.model / name).exists() for name in TOKENIZERS):
            flags += ["--skip-tokenizer-init"]  # ids in, ids out
        for flag, value in (
            ("--dtype", dtype),
            ("--max-total-tokens", tokens),
            ("--context-length", self.context_length),
        ):
            if value is not None:
                flags += [flag, str(value)]
        return [sys.executable, "-m", module, *flags, *self.extra]

    def env(self) -> Mapping[str, str]:
        offline = {"HF_HUB_OFFLINE": "1"}  # the model is a local folder
        if self.device == "cuda":
            return offline
        # One thread is fastest for small models and leaves the other cores to the trainer; torch.compile would take a
        # minute of a C++ compiler.
        return {**offline, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

    def check(self) -> None:
        """Raise :class:`ConfigError` for what SGLang reports only after a minute of starting."""
        if not (self.model / "config.json").is_file():
            what = "has no config.json" if self.model.is_dir() else "is not a folder"
            raise ConfigError(f"{self.model}: {what}; a model is a folder in the format of Hugging Face")
        missing = [name for name in ("torch", "sglang") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"the engine needs {' and '.join(missing)}: run launch/setup.sh, or pip install sglang")
        if self.device == "cuda" and self.tp > (number := gpus()):
            raise ConfigError(f"device cuda with tp {self.tp} needs {self.tp} GPUs, this machine has {number}")


def gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch  # takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """Resolve ``auto``: a GPU if there is one."""
    if wanted != "auto":
        return wanted
    return "cuda" if importlib.util.find_spec("torch") is not None and gpus() else "cpu"
