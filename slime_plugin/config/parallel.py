"""How a model and its data are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Ranks of one replica of the model. Data parallelism uses the remaining ranks."""

    tp: int = 1
    """Tensor parallelism."""
    pp: int = 1
    """Pipeline parallelism."""
    cp: int = 1
    """Context parallelism."""
    sp: bool = False
    """Sequence parallelism, within the tensor-parallel group."""
    vpp: int = 1
    """Virtual pipeline stages of each rank."""

    def __post_init__(self) -> None:
        if self.sp and self.tp == 1:
            raise ConfigError(
                "sp: sequence parallelism splits activations over tensor-parallel ranks; with tp 1 leave it off"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp: {self.vpp} virtual stages interleave pipeline stages; with pp 1 leave it at 1")
        if self.vpp > 1 and self.pp == 2:
            raise ConfigError(
                f"vpp: {self.vpp} virtual stages on pp 2: each rank is both neighbours of the other, and Megatron "
                "mixes up the lengths of what goes forward and what goes back; use pp 3 or more, or vpp 1"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def multiple(self) -> int:
        """The number of tokens of a row has to be a multiple of this."""
        return self.cp * (self.tp if self.sp else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of a step has to be a multiple of this: virtual stages alternate over so many."""
        return self.pp if self.vpp > 1 else 1
