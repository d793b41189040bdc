"""Checkpoints of a run: the state of every rank, tensors as safetensors, everything else as JSON. None of it is code.

A checkpoint is a folder with two files per rank and ``state.json``. It is written under another name and renamed once
it is complete, so a folder with its name is a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.run.folder import RunFolder

_TENSOR = "tensor"


def save_state(state: Any, folder: Path, rank: int) -> None:
    """Write any nesting of dictionaries, lists, numbers, strings and tensors."""
    tensors: dict[str, Tensor] = {}
    skeleton = _without_tensors(state, "", tensors)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f"rank-{rank:05d}.safetensors")
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps(skeleton), encoding="utf-8")


def load_state(folder: Path, rank: int) -> Any:
    """Read what :func:`save_state` wrote."""
    path = folder / f"rank-{rank:05d}"
    try:
        skeleton = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
        return _with_tensors(skeleton, tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MemoryWalkerError(
            f"{path}: cannot be read ({error}); remove {folder} to resume from the checkpoint before it"
        ) from error


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, dict):
        pairs = [[key, _without_tensors(part, f"{name}.{key}", tensors)] for key, part in value.items()]
        return {"dict": pairs}  # JSON would turn numbers that are keys into strings
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_without_tensors(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state {name} is a {type(value).__name__}, which cannot be saved in a checkpoint")


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == "dict":
        return {key: _with_tensors(part, tensors) for key, part in content}
    parts = [_with_tensors(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def draft_of(folder: RunFolder, iteration: int) -> Path:
    """Return where the ranks write a checkpoint before it is complete, after removing an old draft."""
    path = folder.checkpoints / f"{iteration:05d}.part"
    if path.exists():
        shutil.rmtree(path)
    return path


def finish(folder: RunFolder, iteration: int, state: dict[str, Any], keep: int) -> None:
    """Turn the draft into a checkpoint, synced to disk, and remove all but the last ``keep``."""
    draft = folder.checkpoints / f"{iteration:05d}.part"
    with writing(draft):
        (draft / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            _sync(path)
        draft.rename(folder.checkpoints / f"{iteration:05d}")
        _sync(folder.checkpoints)
    for old in checkpoints(folder)[:-keep]:  # renamed first: a folder with parts missing is not a checkpoint
        (folder.checkpoints / f"{old:05d}").rename(folder.checkpoints / f"{old:05d}.part")
    for path in folder.checkpoints.glob("*.part"):
        shutil.rmtree(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a message that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise MemoryWalkerError(
            f"{path}: cannot be written: {why}; free some space or make the folder writable, and continue with --resume"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: RunFolder) -> list[int]:
    """Return the iterations that a run can resume from, in order."""
    return sorted(int(path.name) for path in folder.checkpoints.glob("*") if path.name.isdecimal())


def drop_weights(folder: RunFolder, needed: Sequence[int]) -> None:
    """Remove exported weights that are not needed any more. Version 0 is a link to the model and stays."""
    for version in folder.versions():
        if version and version not in needed:
            shutil.rmtree(folder.weights(version))


def rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
