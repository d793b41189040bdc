"""What a run was begun with, and what may change when it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError
from slime_plugin.report.folder import RunFolder
from slime_plugin.seam.args import carry

MAY_CHANGE = (
    *("trainer.iterations", "trainer.save_every", "trainer.keep", "trainer.batch_tokens", "trainer.recompute"),
    *("rollout.concurrency", "rollout.seconds", "rollout.tool_seconds", "engine", "tracking"),
)
"""Settings that change neither what is sampled nor what is learnt from it, but for when a run ends."""


def begin(folder: RunFolder, cell: Cell) -> None:
    """Make the folder of a new run."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if folder.settings.exists():
            raise ConfigError(
                f"{folder.path}: holds a run already; go on with it by --resume, or choose another folder"
            )
        folder.logs.mkdir(exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        folder.weights(0).parent.mkdir(exist_ok=True)
        write(folder, cell)
    except OSError as error:
        raise ConfigError(f"{folder.path}: cannot be written: {error.strerror}; choose another folder") from error


def go_on(folder: RunFolder, cell: Cell) -> None:
    """Check that a run in that folder can go on with this cell."""
    before, now = dict(_flat(folder.read_settings())), dict(_flat(carry(cell)))
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key) and not any(key == may or key.startswith(f"{may}.") for may in MAY_CHANGE):
            raise ConfigError(
                f"{folder.path}: was begun with {key} = {before.get(key)!r:.60}, not {now.get(key)!r:.60}; go on with "
                "that, or choose another folder for a new run"
            )
    write(folder, cell)


def write(folder: RunFolder, cell: Cell) -> None:
    draft = folder.settings.with_suffix(".part")
    draft.write_text(json.dumps({"version": 1, "cell": carry(cell)}, indent=1) + "\n", encoding="utf-8")
    draft.replace(folder.settings)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else name)
    else:
        yield key, value
