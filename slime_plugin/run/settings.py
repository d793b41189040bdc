"""``run.json``: the settings that a run was started with, and which of them may change when it is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.errors import ConfigError
from slime_plugin.files import write_atomically
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import locked

MAY_CHANGE_TRAINING = (
    *("trainer.iterations", "trainer.save_every", "trainer.keep", "trainer.batch_tokens", "trainer.recompute"),
    *("rollout.concurrency", "rollout.seconds", "rollout.tool_seconds", "rollout.max_tool_failures"),
    *("engine", "tracking", "evaluation"),
)
"""Settings of ``memorywalker train`` that change neither what is sampled nor what is learnt, only when a run ends."""
MAY_CHANGE_ROLLOUT = (
    *("rollout.samples", "rollout.concurrency", "rollout.seconds", "rollout.tool_seconds"),
    "rollout.max_tool_failures",
)
"""Settings of ``memorywalker rollout`` that do not change what a rollout is."""


@contextlib.contextmanager
def opened(folder: RunFolder, cell: Cell, *, resume: bool, recorded: RunFolder | None = None) -> Iterator[None]:
    """Create or resume a training run in a folder, and hold its lock."""
    with contextlib.ExitStack() as stack:
        try:
            if resume:
                folder.read_settings()  # raises if there is no run
            else:
                folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            if resume:
                _check_resumed(folder, cell, recorded)
            elif folder.settings.exists():
                raise ConfigError(
                    f"{folder.path}: holds a run already; continue it with --resume, or choose another folder"
                )
            for path in (folder.logs, folder.checkpoints, folder.weights(0).parent):
                path.mkdir(exist_ok=True)
            _write(folder.settings, {"cell": cell.to_json(), "replay": _replayed(recorded)})
        except OSError as error:
            raise ConfigError(f"{folder.path}: cannot be written: {error.strerror}; choose another folder") from error
        yield


def changes(folder: RunFolder, cell: Cell) -> Iterator[str]:
    """Yield the settings that keep a training run from being resumed with a cell: ``trainer.tp = 1, not 2``."""
    before = parse_config(folder.read_settings(), Cell, str(folder.settings)).to_json()  # with keys that came later
    yield from _changes(before, cell.to_json(), MAY_CHANGE_TRAINING)


def check_rollout_settings(folder: Path, cell: Cell, *, has_rollouts: bool) -> None:
    """Check that the rollouts in a folder have the settings of a cell; without rollouts, write them."""
    path, settings = folder / "run.json", _rollout_settings(cell)
    if not has_rollouts:
        _write(path, {"settings": settings})
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}); choose another folder") from error
    for change in _changes(before, settings, MAY_CHANGE_ROLLOUT):
        raise ConfigError(
            f"{folder}: holds rollouts with {change}; choose another folder, or the configuration it was started with"
        )


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key, as on the command line."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from flat(part, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], may_change: tuple[str, ...]) -> Iterator[str]:
    before, now = dict(flat(before)), dict(flat(now))
    for key in sorted({*before, *now}, key=lambda key: (not key.endswith(".type"), key)):  # types first
        if before.get(key) != now.get(key) and not any(f"{key}.".startswith(f"{may}.") for may in may_change):
            yield f"{key} = {before.get(key)!r:.60}, not {now.get(key)!r:.60}"


def _check_resumed(folder: RunFolder, cell: Cell, recorded: RunFolder | None) -> None:
    remedy = "keep that, or choose another folder for a new run"
    for change in changes(folder, cell):
        raise ConfigError(f"{folder.path}: was started with {change}; {remedy}")
    before, now = json.loads(folder.settings.read_text(encoding="utf-8")).get("replay"), _replayed(recorded)
    if before != now:
        raise ConfigError(f"{folder.path}: was started on {_source(before)}, not on {_source(now)}; {remedy}")


def _rollout_settings(cell: Cell) -> dict[str, Any]:
    """The settings that determine a rollout. Tools and reward are digests: the user's own may hold a key."""
    settings = dict(flat(cell.model_dump(mode="json", include={"model", "harness", "rollout"})))
    for key in ("tools", "reward"):
        text = json.dumps(cell.model_dump(mode="json", include={key}), sort_keys=True)
        settings[key] = f"digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return settings


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps({"version": 1, **settings}, indent=1) + "\n")


def _source(replayed: str | None) -> str:
    return "rollouts of its own" if replayed is None else f"the rollouts of --replay {replayed}"


def _replayed(recorded: RunFolder | None) -> str | None:
    return None if recorded is None else str(recorded.path.resolve())
