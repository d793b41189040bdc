"""What ``memorywalker verify`` measured in place of what a plan assumes: ``memorywalker plan --measured``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.errors import ConfigError, nearest
from slime_plugin.planner.job import GPU_SPEEDS, MAY_BE_ZERO, Assumptions, Gpu, gpu_named

VERSION = 1
"""Of what ``memorywalker verify --json`` prints."""
MEASURABLE = (*(field.name for field in dataclasses.fields(Assumptions)), *GPU_SPEEDS)
"""What can be measured."""
_HOW = "memorywalker verify CONFIG --out FILE.json writes it"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, on what and of what."""

    path: Path
    values: Mapping[str, float]
    """By name of an assumption."""
    device: str
    """Name of the GPU, or of the processor."""
    of: Mapping[str, Any]
    """The model, method, data type and split that the numbers were measured with."""
    quick: bool

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read what ``memorywalker verify`` wrote. Refuse anything else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON ({error}); {_HOW}") from error
        if not isinstance(content, dict) or not isinstance(content.get("checks"), list):
            raise ConfigError(f"{path}: is not a verification; {_HOW}")
        if content.get("version") != VERSION:
            raise ConfigError(
                f"{path}: is of version {content.get('version')!r:.20}, and this memorywalker reads {VERSION}; "
                "verify again with the one that plans"
            )
        found = content.get("measured")
        if not isinstance(found, dict) or not isinstance(found.get("values"), dict):
            raise ConfigError(f"{path}: is not a verification; {_HOW}")
        values = {key: _number(path, key, value) for key, value in found["values"].items()}
        of = {key: found.get(key) for key in ("model", "method", "dtype", "split")}
        return cls(path, values, str(found.get("device")), of, quick=bool(found.get("quick")))

    def check(self, gpu: Gpu) -> None:
        """Refuse numbers of another device, and none at all."""
        if gpu_named(self.device) != gpu:
            raise ConfigError(
                f"{self.path}: was measured on {self.device}, and the plan is for {gpu.name}; measure on a machine of "
                "the job, or choose the GPU of the plan with --gpu"
            )
        if not self.values:
            raise ConfigError(f"{self.path}: holds nothing that a plan assumes; verify with --only speed,engine")

    def differences(self, cell: Cell) -> Iterator[str]:
        """Yield in what the cell is not what was measured, which changes the numbers somewhat."""
        trainer = cell.trainer
        split = {"tp": trainer.tp, "pp": trainer.pp, "cp": trainer.cp, "sp": trainer.sp}
        planned = {
            "model": cell.require_model().name,
            "method": cell.method.type,
            "dtype": trainer.dtype or "bfloat16",
            "split": split,
        }
        for key, value in planned.items():
            if self.of[key] != value:
                yield f"{self.path}: measured with {key} {_shown(self.of[key])}, and the plan has {_shown(value)}"
        if self.quick:
            yield f"{self.path}: measured on small inputs (--quick), which are slower by the token"


def _number(path: Path, key: str, value: Any) -> float:
    if key not in MEASURABLE:
        raise ConfigError(f"{path}: measured {key!r:.40}, which no plan assumes; is it {nearest(key, MEASURABLE)}?")
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf or (number == 0 and key not in MAY_BE_ZERO):
        raise ConfigError(f"{path}: measured {key} as {value!r:.40}, which is no positive number; verify again")
    return float(number)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return str(value)
