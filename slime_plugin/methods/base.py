"""What a method is: how the record of a rollout becomes training input, and what that costs.

One file per method. A method declares what it needs; conversion, training, scoring, planning and reports read the
declaration and know no method by name. A custom method is a subclass, named in a configuration by import path
(``method: {type: package.module:Name}``); ``docs/extend.md`` walks through one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from slime_plugin.config.custom import NoSettings
from slime_plugin.config.frozen import Frozen
from slime_plugin.config.method import Distillation
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.row import Layout, Row
from slime_plugin.tree import Trajectory

SettingsType = TypeVar("SettingsType", bound=Frozen)

OWN_COLUMN = "method/"
"""Prefix of a method's own columns in the train data, which keeps them apart from what else travels with a row."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The trained tokens of a micro-batch in the loss, each a torch tensor [M] (methods import no torch)."""

    logged: Any
    """Log-probabilities logged by the rollout engine."""
    old: Any
    """The trainer's log-probabilities before the first update of the iteration; ``old - logged`` is the logdiff."""
    advantage: Any
    """Of the token's rollout."""
    columns: Mapping[str, Any]
    """What :meth:`Method.columns` returned for these tokens."""


class Method(Generic[SettingsType]):
    """How records become rows. Subclasses override :meth:`lay_out`, and whatever else differs from these defaults."""

    Settings: ClassVar[type[Frozen]] = NoSettings
    """The keys that ``method:`` takes beside ``type``."""
    trees: ClassVar[bool] = False
    """Rows may be trees, so the parents of their tokens are part of the train data."""

    def __init__(self, settings: SettingsType, name: str) -> None:
        self.settings = settings
        self.name = name
        """``method.type`` of the configuration."""

    @property
    def exact(self) -> bool:
        """Every trained token is conditioned on exactly what it was sampled under."""
        return False

    @property
    def only_scored(self) -> bool:
        """Rows have an attention mask of their own (``Row.visible``): they can be scored, and not be trained."""
        return False

    @property
    def description(self) -> str:
        """The name, with settings that change the layout; for headings."""
        return self.name

    @property
    def distillation(self) -> Distillation | None:
        """Settings of the KL to the teacher rows of its layouts; None if it has no teacher."""
        return None

    @property
    def budget(self) -> int | None:
        """Maximum tokens of a row, if larger rollouts are split over several rows."""
        return None

    @property
    def splits(self) -> bool:
        """Whether a budget can be set."""
        return False

    def lay_out(self, trajectory: Trajectory) -> Layout:
        """Return the rows of a rollout, its teacher rows, and the number of lost tokens by cause."""
        raise NotImplementedError

    def problems(self, vocabulary: int | None) -> Iterator[str]:
        """Yield why these settings cannot be trained, each with its key and the remedy."""
        if self.only_scored:
            yield f"method: {self.description} is a diagnostic for score; train another one"
        top_k = None if self.distillation is None else self.distillation.top_k
        if vocabulary is not None and (top_k or 0) > vocabulary:
            yield (
                f"method.top_k: {top_k} of a vocabulary of {vocabulary}; leave it out to compare the whole vocabulary"
            )

    def columns(self, trajectory: Trajectory, row: Row) -> Mapping[str, np.ndarray]:
        """Return [N] numbers for the tokens of a row, by name. They travel beside the tokens to :meth:`token_factors`.

        Every row has the same names, including the row without loss of a rollout that has nothing to train.
        """
        return {}

    def token_factors(self, tokens: TrainedTokens) -> Any | None:
        """Return [M] factors of the tokens in the loss, from numbers known only while training; None means 1."""
        return None

    def cost(self, work: Workload, context_tokens: int) -> Computed:
        """Return what is computed of an average rollout. The default is a chain per branch."""
        return Computed.chains(work.branch_tokens, work.live, context_tokens)

    def plan_notes(self, work: Workload, rows: Computed) -> Iterator[str]:
        """Yield what a user should know before a job of this size."""
        yield from ()
