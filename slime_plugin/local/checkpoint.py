"""The state of a rank on disk: tensors as safetensors, everything else as JSON. Nothing in it is ever executed.

A checkpoint is a folder with two files per rank and ``state.json``. It is written under another name and renamed once
it is whole, so a folder that has its name is a checkpoint, whatever happened while it was written.
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
from slime_plugin.report.folder import RunFolder

_TENSOR = "tensor"


def save_state(state: Any, folder: Path, rank: int) -> None:
    """Any nesting of dictionaries, lists, numbers, texts and tensors."""
    tensors: dict[str, Tensor] = {}
    skeleton = _take_out(state, "", tensors)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f"rank-{rank:05d}.safetensors")
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps(skeleton), encoding="utf-8")


def load_state(folder: Path, rank: int) -> Any:
    """What :func:`save_state` was given."""
    path = folder / f"rank-{rank:05d}"
    try:
        skeleton = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
        return _put_back(skeleton, tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MemoryWalkerError(
            f"{path}: cannot be read ({error}); remove {folder} to go on from the checkpoint before it"
        ) from error


def _take_out(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, dict):
        pairs = [[key, _take_out(part, f"{name}.{key}", tensors)] for key, part in value.items()]
        return {"dict": pairs}  # JSON would turn numbers that are keys into texts
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_take_out(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state {name} is a {type(value).__name__}, which has no place in a checkpoint")


def _put_back(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == "dict":
        return {key: _put_back(part, tensors) for key, part in content}
    parts = [_put_back(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def draft_of(folder: RunFolder, iteration: int) -> Path:
    """Where the ranks write a checkpoint that is not whole yet."""
    path = folder.checkpoints / f"{iteration:05d}.part"
    if path.exists():
        shutil.rmtree(path)
    return path


def finish(folder: RunFolder, iteration: int, state: dict[str, Any], keep: int) -> None:
    """Make the draft a checkpoint, on the disk, and remove those that are older than the last ``keep``."""
    draft = folder.checkpoints / f"{iteration:05d}.part"
    with writing(draft):
        (draft / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            _sync(path)
        draft.rename(folder.checkpoints / f"{iteration:05d}")
        _sync(folder.checkpoints)
    for old in checkpoints(folder)[:-keep]:  # no longer a checkpoint from the moment on that parts of it are missing
        (folder.checkpoints / f"{old:05d}").rename(folder.checkpoints / f"{old:05d}.part")
    for path in folder.checkpoints.glob("*.part"):
        shutil.rmtree(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses becomes a line that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise MemoryWalkerError(
            f"{path}: cannot be written: {why}; free some space or mend the folder, and go on with --resume"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: RunFolder) -> list[int]:
    """The iterations that a run can go on from, in order."""
    return sorted(int(path.name) for path in folder.checkpoints.glob("*") if path.name.isdecimal())


def read_state(folder: RunFolder, iteration: int) -> dict[str, Any]:
    path = folder.checkpoints / f"{iteration:05d}" / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemoryWalkerError(f"{path}: cannot be read ({error}); remove its folder to go on from another") from error
    return state


def drop_weights(folder: RunFolder, needed: Sequence[int]) -> None:
    """Remove exported weights that nothing needs any more. Version 0 is the model itself and stays."""
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
