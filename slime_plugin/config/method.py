"""How a rollout is turned into training input: the ``method:`` switch of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from slime_plugin.config.frozen import Frozen

Packing = Literal["trie", "replicated", "union"]
PACKINGS: tuple[str, ...] = get_args(Packing)


class NaiveCompressed(Frozen):
    """One chain over the final compressed context. Not exact: a baseline."""

    type: Literal["naive_compressed"] = "naive_compressed"


class NaiveFull(Frozen):
    """One chain over everything that was ever visible. Not exact: a baseline."""

    type: Literal["naive_full"] = "naive_full"


class LogitTree(Frozen):
    """One chain per branch. Exact, for any model."""

    type: Literal["logittree"] = "logittree"


class Mask4d(Frozen):
    """All branches in one pass. Exact with the packings trie and replicated."""

    type: Literal["mask4d"] = "mask4d"
    packing: Packing = "trie"
    budget: int | None = Field(default=None, ge=1)
    """Most tokens of one row; a larger tree is split over several rows. Unlimited if not set. Only for the trie."""

    @model_validator(mode="after")
    def _only_a_trie_is_split(self) -> Self:
        if self.budget is not None and self.packing != "trie":
            raise ValueError(f"a budget splits a prefix tree; packing {self.packing} has none - use packing trie")
        return self


class Sdcc(Frozen):
    """Self-distillation for conditioning consistency: naive_compressed plus a KL at the diverging leaves."""

    type: Literal["sdcc"] = "sdcc"


Method = Annotated[NaiveCompressed | NaiveFull | LogitTree | Mask4d | Sdcc, Field(discriminator="type")]


EVERY_METHOD: tuple[Method, ...] = (NaiveCompressed(), NaiveFull(), LogitTree(), Mask4d(), Sdcc())
"""All methods with their defaults, in the order in which they are compared."""


class Cell(Frozen):
    """One cell of the matrix of harnesses and methods: what one training run is configured with."""

    method: Method = Mask4d()
    std: bool = True
    """Divide advantages by the standard deviation of their group."""
