"""The folder of a training run: what is where. The runtime writes it, commands and reports read it.

::

    RUN/
      run.json                  the configuration, as it was resolved when the run began
      metrics.jsonl             a line per update step and a line per iteration (see docs/training.md)
      rollout-00003.records     the rollouts of iteration 3, sampled by weights of version 3
      weights/v00003/           these weights, as a Hugging Face checkpoint; older ones are removed, but for those that
                                a checkpoint stands on
      checkpoints/00004/        all that is needed to begin iteration 4: shards per rank, and state.json
      comparison.json           what ``memorywalker compare`` measured; comparison/ has its numbers per token
      tensorboard/  logs/       event files; logs of the engine and of every rank
      processes.json            what runs now, by process id

Iteration i is sampled by version i and ends with version i + 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_plugin.errors import MemoryWalkerError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run, and what stands in its small files."""

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
        """The store of an iteration."""
        return self.path / f"rollout-{iteration:05d}.records"

    def weights(self, version: int) -> Path:
        return self.path / "weights" / f"v{version:05d}"

    def iterations(self) -> list[int]:
        """Those with a store, in order."""
        names = [path.name for path in self.path.glob("rollout-*.records")]
        return sorted(int(name[8:-8]) for name in names if name[8:-8].isdecimal())

    def versions(self) -> list[int]:
        """Weights that are there, whole, in order."""
        found = self.path.glob("weights/v*/config.json")  # written last
        return sorted(int(path.parent.name[1:]) for path in found)

    def read_settings(self) -> dict[str, Any]:
        """The configuration of the run, as :class:`slime_plugin.config.cell.Cell` reads it."""
        try:
            settings: dict[str, Any] = json.loads(self.settings.read_text(encoding="utf-8"))["cell"]
        except FileNotFoundError as error:
            raise MemoryWalkerError(
                f"{self.path}: not a training run, it has no run.json; memorywalker train writes one"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MemoryWalkerError(f"{self.settings}: cannot be read ({type(error).__name__})") from error
        return settings

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Every whole line; one that a crash cut short at the end is left out."""
        try:
            lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise MemoryWalkerError(f"{self.metrics}: line {number} is not JSON; is the disk sound?") from error
            yield value
