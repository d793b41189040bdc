"""How many of slime's checkpoints are kept: it never removes one itself, and one is larger than the model by far."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron writes it once a checkpoint is whole."""


def latest_checkpoint(folder: Path) -> int | None:
    """Number of the last whole checkpoint: that of the rollout it was trained on last. None if there is none."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None


def outdated(folder: Path, keep: int) -> list[Path]:
    """Whole checkpoints but for the newest ``keep``. What is newer than the last whole one is being written."""
    latest = latest_checkpoint(folder)
    if latest is None:
        return []
    numbers = {int(path.name[5:]): path for path in folder.glob("iter_*") if path.name[5:].isdecimal()}
    whole = sorted(number for number in numbers if number <= latest)
    return [numbers[number] for number in whole[:-keep] if not numbers[number].is_symlink()]


def remove_outdated(folder: Path, keep: int) -> threading.Thread | None:
    """In the background: it takes a while, and nobody waits for it."""
    paths = outdated(folder, keep)
    if not paths:
        return None

    def remove() -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)  # what is left is tried again

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    return thread
