"""How a rollout is turned into training input: the ``method:`` switch of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self, cast, get_args

from pydantic import Field, model_validator

from slime_plugin.config.custom import BY_TYPE, Custom
from slime_plugin.config.frozen import Frozen, models_in, tag_of

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
    """Maximum tokens of one row; a larger tree is split over several rows. Unlimited if not set. Only for the trie."""

    @model_validator(mode="after")
    def _only_a_trie_is_split(self) -> Self:
        if self.budget is not None and self.packing != "trie":
            raise ValueError(f"a budget splits a prefix tree; packing {self.packing} has none - use packing trie")
        return self


class Distillation(Frozen):
    """The KL from a teacher on the live contexts, at the diverging leaves: for any method with teacher rows."""

    weight: float = Field(default=0.1, ge=0)
    """Coefficient of the KL after warm-up; 0 is exactly the method without a teacher."""
    warmup: float = Field(default=0.2, ge=0, le=1)
    """Share of the update steps over which the coefficient ramps up from 0."""
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


class Sdcc(Distillation):
    """Self-distillation for conditioning consistency: naive_compressed plus a KL at the diverging leaves."""

    type: Literal["sdcc"] = "sdcc"


class CustomMethod(Custom):
    """A subclass of ``slime_plugin.methods.Method`` of your own; ``docs/extend.md`` walks through one."""

    def __hash__(self) -> int:  # its settings may be lists and mappings, which pydantic cannot hash
        return hash(self.model_dump_json())


MethodSettings = Annotated[NaiveCompressed | NaiveFull | LogitTree | Mask4d | Sdcc | CustomMethod, BY_TYPE]

METHODS = cast(
    "dict[str, MethodSettings]", {name: model() for model in models_in(MethodSettings) if (name := tag_of(model))}
)
"""The defaults of every method by its name, in the order in which they are compared."""
