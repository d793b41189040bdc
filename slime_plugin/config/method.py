"""How a rollout is turned into training input: the ``method:`` switch of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self, cast, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from slime_plugin.config.custom import CUSTOM, Custom, type_of
from slime_plugin.config.frozen import Frozen, models_in

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
    """How branches share a row: every distinct prefix once; side by side; or once per token, which is not exact."""
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
    weight: float = Field(default=0.1, ge=0)
    """Coefficient of the KL after warm-up; 0 is exactly naive_compressed."""
    warmup: float = Field(default=0.2, ge=0, le=1)
    """Share of the update steps over which the weight ramps up from 0."""
    top_k: int | None = Field(default=None, ge=1)
    """Compare only the teacher's k most likely tokens and one bucket for the rest. The whole vocabulary if not set."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Take the teacher from a moving average of the weights with this decay. The current weights if not set."""
    kl_limit: float = Field(default=10.0, gt=0)
    """Mean KL per leaf, in nats, above which a step counts as diverged."""
    entropy_gap_limit: float = Field(default=5.0, gt=0)
    """Mean distance of student and teacher entropy, in nats, above which a step counts as diverged."""
    patience: int = Field(default=3, ge=1)
    """Diverged steps in a row after which the KL is switched off for the rest of the run."""


class CustomMethod(Custom):
    """A subclass of ``slime_plugin.methods.Method`` of your own; ``docs/extend.md`` walks through one."""

    def __hash__(self) -> int:  # its settings may be lists and mappings, which pydantic cannot hash
        return hash(self.model_dump_json())


Method = Annotated[
    Annotated[NaiveCompressed, Tag("naive_compressed")]
    | Annotated[NaiveFull, Tag("naive_full")]
    | Annotated[LogitTree, Tag("logittree")]
    | Annotated[Mask4d, Tag("mask4d")]
    | Annotated[Sdcc, Tag("sdcc")]
    | Annotated[CustomMethod, Tag(CUSTOM)],
    Discriminator(type_of),
]

EVERY_METHOD = cast(
    "tuple[Method, ...]", tuple(model() for model in models_in(Method) if not issubclass(model, Custom))
)
"""All methods with their defaults, in the order in which they are compared."""
