"""With which flags SGLang serves a model, on a CPU and on GPUs.

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
"""Any of them in a model's folder is a tokenizer."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What of SGLang's many settings matters here; the rest is in ``extra``, as SGLang spells it."""

    model: Path
    device: Device
    dtype: str | None = None
    """What to compute in. By default float32 on a CPU, where the log-probabilities then agree with a trainer's to 1e-6,
    and what the checkpoint says on a GPU."""
    tp: int = 1
    max_total_tokens: int | None = None
    """Tokens that the KV cache holds, of all requests together. By default 65,536 on a CPU; a GPU is filled."""
    context_length: int | None = None
    """Most tokens of one request; by default what the checkpoint says."""
    seeded: bool | None = None
    """Whether ``sampling_seed`` of a request decides what it samples, whatever else is in the batch. By default only on
    a CPU: on a GPU it takes slower, batch-invariant kernels. **Requests without a seed then all have the same one.**"""
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device == "cpu" and self.tp != 1:
            raise ConfigError(f"{self.tp} tensor-parallel ranks need as many GPUs; on a CPU there is 1")

    @property
    def deterministic(self) -> bool:
        return self.device == "cpu" if self.seeded is None else self.seeded

    def command(self, host: str, port: int) -> list[str]:
        """The server's command line. What is in ``extra`` comes last and wins."""
        module = "slime_plugin.bridge.server.cpu" if self.device == "cpu" else "sglang.launch_server"
        flags = ["--model-path", str(self.model), "--host", host, "--port", str(port), "--device", self.device]
        dtype, tokens = self.dtype, self.max_total_tokens
        if self.device == "cpu":
            dtype, tokens = dtype or "float32", tokens or 65536
            # The backends made of torch alone; without overlap, which needs streams; no grammars, which need kernels.
            flags += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            flags += ["--disable-overlap-schedule", "--grammar-backend", "none", "--mem-fraction-static", "0.2"]
            flags += ["--sleep-on-idle"]  # or an idle scheduler takes a whole core
        else:
            flags += ["--tp-size", str(self.tp)]
            if self.deterministic:
                flags += ["--attention-backend", "triton"]  # with SGLang's own choice the prefix cache may be off
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

    def environment(self) -> Mapping[str, str]:
        offline = {"HF_HUB_OFFLINE": "1"}  # the model is a folder; nothing is to be fetched
        if self.device == "cuda":
            return offline
        # One thread is fastest for small models, and leaves the other cores to whoever trains; and what is compiled for
        # speed elsewhere is a minute of a C++ compiler here.
        return {**offline, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

    def check(self) -> None:
        """Raises :class:`ConfigError` for what would only come out after a minute of starting."""
        if not (self.model / "config.json").is_file():
            what = "has no config.json" if self.model.is_dir() else "is not a folder"
            raise ConfigError(f"{self.model}: {what}; a model is a folder as Hugging Face writes them")
        missing = [name for name in ("torch", "sglang") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"the engine needs {' and '.join(missing)}: run launch/setup.sh, or pip install sglang")
        if self.device == "cuda" and self.tp > (number := gpus()):
            raise ConfigError(f"device cuda with tp {self.tp} needs {self.tp} GPUs, this machine has {number}")


def gpus() -> int:
    """How many GPUs torch can use here."""
    import torch  # takes seconds, and only this needs it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """``auto`` is a GPU if there is one."""
    if wanted != "auto":
        return wanted
    return "cuda" if importlib.util.find_spec("torch") is not None and gpus() else "cpu"
