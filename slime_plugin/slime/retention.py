"""Retention of slime's checkpoints: slime never removes one itself, and one is several times as large as the model."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron writes it once a checkpoint is complete."""


def latest_checkpoint(folder: Path) -> int | None:
    """Return the number of the last complete checkpoint, that of its last trained rollout; None if there is none."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None


def outdated(folder: Path, keep: int) -> list[Path]:
    """Return all complete checkpoints but the newest ``keep``. What is newer than the last one is being written."""
    latest = latest_checkpoint(folder)
    if latest is None:
        return []
    numbers = {int(path.name[5:]): path for path in folder.glob("iter_*") if path.name[5:].isdecimal()}
    complete = sorted(number for number in numbers if number <= latest)
    return [numbers[number] for number in complete[:-keep] if not numbers[number].is_symlink()]


def remove_outdated(folder: Path, keep: int) -> threading.Thread | None:
    """Remove outdated checkpoints in the background, because it takes a while."""
    paths = outdated(folder, keep)
    if not paths:
        return None

    def remove() -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)  # the rest is removed at the next step

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    return thread
