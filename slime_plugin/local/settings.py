"""What a run was begun with, and what may change when it goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError
from slime_plugin.local.processes import alone
from slime_plugin.report.folder import RunFolder
from slime_plugin.seam.args import carry

MAY_CHANGE = (
    *("trainer.iterations", "trainer.save_every", "trainer.keep", "trainer.batch_tokens", "trainer.recompute"),
    *("rollout.concurrency", "rollout.seconds", "rollout.tool_seconds", "engine", "tracking"),
)
"""Settings that change neither what is sampled nor what is learnt from it, but for when a run ends."""


@contextlib.contextmanager
def opened(folder: RunFolder, cell: Cell, *, resume: bool, recorded: RunFolder | None = None) -> Iterator[None]:
    """The folder of a run, new or to go on with; nobody else has it meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            if resume:
                folder.read_settings()  # or it is none
            else:
                folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(folder.path))
            if resume:
                go_on(folder, cell, recorded)
            else:
                begin(folder, cell, recorded)
        except OSError as error:
            raise ConfigError(f"{folder.path}: cannot be written: {error.strerror}; choose another folder") from error
        yield


def begin(folder: RunFolder, cell: Cell, recorded: RunFolder | None = None) -> None:
    """Make a new run of an existing folder."""
    if folder.settings.exists():
        raise ConfigError(f"{folder.path}: holds a run already; go on with it by --resume, or choose another folder")
    write(folder, cell, recorded)


def go_on(folder: RunFolder, cell: Cell, recorded: RunFolder | None = None) -> None:
    """Check that a run in that folder can go on with this cell."""
    remedy = "go on with that, or choose another folder for a new run"
    change = next(changes(folder, cell), None)
    if change is not None:
        raise ConfigError(f"{folder.path}: was begun with {change}; {remedy}")
    replayed, replays = json.loads(folder.settings.read_text(encoding="utf-8")).get("replay"), _replayed(recorded)
    if replayed != replays:
        raise ConfigError(f"{folder.path}: was begun on {_source(replayed)}, not on {_source(replays)}; {remedy}")
    write(folder, cell, recorded)


def changes(folder: RunFolder, cell: Cell) -> Iterator[str]:
    """Settings of a run that may not change and would: ``trainer.tp = 1, not 2``."""
    before, now = dict(flat(folder.read_settings())), dict(flat(carry(cell)))
    for key in sorted({*before, *now}, key=lambda key: (not key.endswith(".type"), key)):  # what other keys follow from
        if before.get(key) != now.get(key) and not any(f"{key}.".startswith(f"{may}.") for may in MAY_CHANGE):
            yield f"{key} = {before.get(key)!r:.60}, not {now.get(key)!r:.60}"


def write(folder: RunFolder, cell: Cell, recorded: RunFolder | None = None) -> None:
    for path in (folder.logs, folder.checkpoints, folder.weights(0).parent):
        path.mkdir(exist_ok=True)
    settings = {"version": 1, "cell": carry(cell), "replay": _replayed(recorded)}
    draft = folder.settings.with_suffix(".part")
    draft.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    draft.replace(folder.settings)


def _source(replayed: str | None) -> str:
    return "rollouts of its own" if replayed is None else f"the rollouts of --replay {replayed}"


def _replayed(recorded: RunFolder | None) -> str | None:
    return None if recorded is None else str(recorded.path.resolve())


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with the keys that lead to it, as they are given on a command line."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from flat(part, f"{key}.{name}" if key else name)
    else:
        yield key, value
