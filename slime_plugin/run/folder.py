"""The layout of a run's folder. The trainer writes it, commands and reports read it.

::

    RUN/
      run.json                  the resolved configuration
      metrics.jsonl             a line per update and a line per iteration (see docs/training.md)
      rollout-00003.records     the rollouts of iteration 3, sampled by weights of version 3
      weights/v00003/           these weights, as a Hugging Face checkpoint; older versions are removed unless a
                                checkpoint needs them
      checkpoints/00004/        the state before iteration 4: shards per rank, and state.json
      comparison.json           output of ``memorywalker compare``; comparison/ has its numbers per token
      tensorboard/  logs/       event files; logs of the engine and of every rank
      processes.json            the run's processes, while it runs

Iteration i is sampled by version i and ends with version i + 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.files import complete_lines

COMPARISON_VERSION = 1
"""Of ``comparison.json``."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run, and the content of its small files."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def processes(self) -> Path:
        return self.path / "processes.json"

    @property
    def comparison(self) -> Path:
        return self.path / "comparison.json"

    @property
    def comparison_arrays(self) -> Path:
        return self.path / "comparison"

    def rollouts(self, iteration: int) -> Path:
        """Return the store of an iteration."""
        return self.path / f"rollout-{iteration:05d}.records"

    def weights(self, version: int) -> Path:
        return self.path / "weights" / f"v{version:05d}"

    def iterations(self) -> list[int]:
        """Return the iterations that have a store, in order."""
        names = [path.name for path in self.path.glob("rollout-*.records")]
        return sorted(int(name[8:-8]) for name in names if name[8:-8].isdecimal())

    def versions(self) -> list[int]:
        """Return the versions of complete weights, in order."""
        found = self.path.glob("weights/v*/config.json")  # written last
        return sorted(int(path.parent.name[1:]) for path in found)

    def read_settings(self) -> dict[str, Any]:
        """Return the configuration of the run, as :class:`slime_plugin.config.cell.Cell` reads it."""
        try:
            settings: dict[str, Any] = json.loads(self.settings.read_text(encoding="utf-8"))["cell"]
        except FileNotFoundError as error:
            raise MemoryWalkerError(
                f"{self.path}: not a training run, it has no run.json; memorywalker train writes one"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MemoryWalkerError(f"{self.settings}: cannot be read ({type(error).__name__})") from error
        return settings

    def has_cell(self) -> bool:
        """Whether it is a training run: the ``run.json`` of ``memorywalker rollout`` has no cell."""
        try:
            return "cell" in json.loads(self.settings.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:
            raise MemoryWalkerError(f"{self.settings}: cannot be read ({type(error).__name__})") from error

    def read_comparison(self) -> dict[str, Any] | None:
        """Return the output of ``memorywalker compare``; None if nothing has been compared."""
        try:
            value: dict[str, Any] = json.loads(self.comparison.read_text(encoding="utf-8"))
            version = value["version"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MemoryWalkerError(
                f"{self.comparison}: cannot be read ({type(error).__name__}); run memorywalker compare {self.path}"
            ) from error
        if version != COMPARISON_VERSION:
            raise MemoryWalkerError(
                f"{self.comparison}: version {version!r}, this release reads {COMPARISON_VERSION}; "
                f"run memorywalker compare {self.path}"
            )
        return value

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield every complete line; an incomplete last one, left by a crash, is skipped."""
        try:
            lines = complete_lines(self.metrics)
        except FileNotFoundError:
            return
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise MemoryWalkerError(f"{self.metrics}: line {number} is not JSON; is the disk damaged?") from error
            yield value
