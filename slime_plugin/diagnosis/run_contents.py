"""What a diagnosis reads of a run's folder, be it a local run or a job under slime. Nothing in it is expected to be
whole: what cannot be read is a problem of its own."""

from __future__ import annotations

import fcntl
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config, parse_yaml
from slime_plugin.config.method import CustomMethod
from slime_plugin.diagnosis.log_text import LogPart, read_logs, shown_line
from slime_plugin.diagnosis.slime_lines import NEEDLES, Line, slime_lines
from slime_plugin.diagnosis.stores import StoreStatistics, read_store
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.methods import method_of
from slime_plugin.run.evidence import FOLDER, read_starts
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.redaction import key_variables, redact_text, secret_values
from slime_plugin.slime.args import KEY
from slime_plugin.slime.retention import latest_checkpoint

PLUGIN_FILE = "plugin.yaml"
DRIVER_LOG = "logs/driver.log"
MOST_METRICS_BYTES = 256 << 20
_STORE = re.compile(r"rollout-(\d+)\.records")
Kind = Literal["run", "job"]


@dataclass(frozen=True)
class RunContents:
    """The content of a run's folder."""

    folder: RunFolder
    kind: Kind
    """``memorywalker train``, or a job under slime."""
    settings: Mapping[str, Any]
    """The cell as JSON, as far as it could be read."""
    lines: tuple[Line, ...]
    """Of metrics."""
    stores: tuple[StoreStatistics, ...]
    """The first iteration, the last ones, and rollouts that were set aside."""
    logs: tuple[LogPart, ...]
    starts: tuple[Mapping[str, Any], ...]
    """The evidence of each start."""
    problems: tuple[str, ...]
    """Files that could not be read."""
    is_running: bool

    @classmethod
    def read(cls, path: Path) -> RunContents:
        folder, problems = RunFolder(path), list[str]()
        kind = _kind_of(path)
        settings = _settings(folder, kind, problems)
        starts = read_starts(path)
        sizes = starts[-1].get("log_bytes") if starts else None
        before = {name: _bytes(size) for name, size in sizes.items()} if isinstance(sizes, dict) else {}
        logs = list(read_logs(path, before))
        if kind == "run":
            lines = _metrics(folder, problems)
        else:
            steps = _number(settings, "trainer", "steps")
            printed = [line for log in logs if log.name == DRIVER_LOG for line in _printed(log)]
            lines = slime_lines(printed, 1 if steps is None else int(steps))
        stores = [read_store(store, number) for store, number in _stores(path)]
        running = _is_locked(path / "processes.lock")
        return cls(
            folder, kind, settings, tuple(lines), tuple(stores), tuple(logs), tuple(starts), tuple(problems), running
        )

    @cached_property
    def steps(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line["kind"] == "step")

    @cached_property
    def iterations(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line["kind"] == "iteration")

    @property
    def trained(self) -> tuple[StoreStatistics, ...]:
        """The stores of iterations that are trained, with rollouts."""
        return tuple(store for store in self.stores if store.iteration is not None and store.rollouts)

    @cached_property
    def cell(self) -> Cell | None:
        """None if this version cannot read the settings, or there are none."""
        if not self.settings:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # keys of the version before
                return parse_config(dict(self.settings), Cell, str(self.folder.path))
        except ConfigError:
            return None

    def setting(self, *keys: str) -> Any:
        """Return a setting of the cell, with its default; None if there is no such key."""
        value: Any = self.settings if self.cell is None else self.cell.to_json()
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def secrets(self) -> Mapping[str, str]:
        """Values of this process's environment that must not be shown, by variable."""
        return secret_values(os.environ, set(key_variables(self.settings)))

    def shown(self, line: str) -> str:
        """A line of a log or an error, without secrets and safe to show on a terminal."""
        return shown_line(redact_text(line, self.secrets))

    @property
    def planned(self) -> int | None:
        """Configured number of iterations."""
        value = self.setting("trainer", "iterations")
        return value if isinstance(value, int) else None

    @property
    def done(self) -> int:
        """Iterations that are trained."""
        numbers = [int(line["iteration"]) + 1 for line in (self.iterations if self.kind == "run" else self.steps)]
        if self.kind == "job" and (latest := latest_checkpoint(self.folder.checkpoints)) is not None:
            numbers.append(latest + 1)
        return max(numbers, default=0)

    @property
    def end(self) -> Mapping[str, Any] | None:
        """How the last start ended; None if it was killed, or nothing was written down."""
        end = self.starts[-1].get("end") if self.starts else None
        return end if isinstance(end, dict) else None

    @property
    def is_done(self) -> bool:
        planned = self.planned
        return (self.end or {}).get("how") == "finished" or (planned is not None and self.done >= planned)

    @property
    def error(self) -> str | None:
        """The error that the last start ended with."""
        error = (self.end or {}).get("error")
        return error if isinstance(error, str) and error.strip() else None

    @property
    def error_place(self) -> str:
        return f"{FOLDER}/start-{len(self.starts) - 1:05d}.json"

    @property
    def is_exact(self) -> bool:
        """Whether the method conditions every trained token on what it was sampled under. Foreign code is not run."""
        cell = self.cell
        return cell is not None and not isinstance(cell.method, CustomMethod) and method_of(cell.method).exact

    @property
    def is_replay(self) -> bool:
        """Whether the rollouts are those of another run, and so of other weights."""
        if self.kind == "job":
            return self.setting("cluster", "replay") is not None
        return bool(_json(self.folder.settings).get("replay"))

    @property
    def computes_in_bfloat16(self) -> bool:
        """What is not known is taken for bfloat16, whose rounding is the larger one."""
        dtype = self.setting("trainer", "dtype")
        if self.kind == "job" or dtype == "bfloat16":
            return True
        return dtype is None and (not self.starts or bool(self.starts[-1].get("gpus")))

    @property
    def resume(self) -> str:
        """How it is continued."""
        if self.kind == "job":
            return "the same launch command again resumes from the last checkpoint"
        return f"memorywalker train CONFIG --out {self.folder.path} --resume continues from the last checkpoint"


def _kind_of(path: Path) -> Kind:
    if (path / "run.json").exists() or (path / "metrics.jsonl").exists():
        return "run"
    if (path / PLUGIN_FILE).exists() or (path / DRIVER_LOG).exists():
        return "job"
    raise MemoryWalkerError(
        f"{path}: not the folder of a run: it has neither run.json nor {PLUGIN_FILE}; name a folder that memorywalker "
        "train or launch/train.sh has written, or a configuration file"
    )


def _settings(folder: RunFolder, kind: Kind, problems: list[str]) -> Mapping[str, Any]:
    path = folder.settings if kind == "run" else folder.path / PLUGIN_FILE
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if kind == "run" else parse_yaml(text, str(path))
        cell = value.get("cell" if kind == "run" else KEY, {}) if isinstance(value, dict) else None
    except (OSError, ValueError, ConfigError) as error:
        problems.append(f"{path.name}: cannot be read ({type(error).__name__})")
        return {}
    if kind == "run" and isinstance(value, dict) and "settings" in value:
        return {}  # of memorywalker rollout, which trains nothing
    if not isinstance(cell, dict) or not cell:
        problems.append(f"{path.name}: holds no configuration")
        return {}
    return cell


def _metrics(folder: RunFolder, problems: list[str]) -> list[Line]:
    """Return the lines that can be read. The last may be incomplete; any other should not be."""
    try:
        with folder.metrics.open("rb") as file:
            texts = file.read(MOST_METRICS_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder.metrics.name}: cannot be read: {error.strerror}")
        return []
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        line = _line(text)
        if line is None:
            problems.append(f"{folder.metrics.name}:{number}: not a line of metrics")
        else:
            lines.append(line)
    return lines


def _line(text: bytes) -> Line | None:
    try:
        value = json.loads(text)
        is_line = isinstance(value["iteration"], int) and isinstance(value[value["kind"]], int)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if is_line and value["kind"] in ("step", "iteration") else None


def _printed(log: LogPart) -> list[str]:
    """Return the lines in which slime prints metrics, also those of earlier starts, in their order."""
    whole = LogPart(log.name, log.text, log.first_byte)
    found = {at: line for needle in NEEDLES for at, line in whole.lines_with(needle)}
    return [found[at] for at in sorted(found)]


def _stores(path: Path) -> list[tuple[Path, int | None]]:
    """The first store, the last two, and the last one that was set aside."""
    found = [(int(match[1]), file) for file in path.glob("rollout-*.records") if (match := _STORE.fullmatch(file.name))]
    chosen = dict(sorted(found)[:1] + sorted(found)[-2:])
    aside = sorted(path.glob("rollout-*.attempt-*.records"))[-1:]
    return [*((file, number) for number, file in chosen.items()), *((file, None) for file in aside)]


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock of the run."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(settings: Mapping[str, Any], *keys: str) -> float | None:
    value: Any = settings
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _bytes(value: Any) -> int:
    return value if isinstance(value, int) else 0
