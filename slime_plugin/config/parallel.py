"""How a model and its data are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Ranks of one replica of the model. Data parallelism takes the ranks that are left."""

    tp: int = 1
    """Tensor parallelism."""
    pp: int = 1
    """Pipeline parallelism."""
    cp: int = 1
    """Context parallelism."""
    sp: bool = False
    """Sequence parallelism, within the tensor-parallel group."""

    def __post_init__(self) -> None:
        if self.sp and self.tp == 1:
            raise ConfigError(
                "sequence parallelism splits activations over tensor-parallel ranks; with tp 1 leave it off"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def multiple(self) -> int:
        """What the tokens of a row have to be a multiple of."""
        return self.cp * (self.tp if self.sp else 1)
