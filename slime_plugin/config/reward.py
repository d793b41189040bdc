"""The reward of a rollout: the ``reward:`` block of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_plugin.config.custom import BY_TYPE, Custom
from slime_plugin.config.frozen import Frozen


class ExactMatch(Frozen):
    """1 for the right answer, whatever its case, articles and punctuation; 0 without an answer."""

    type: Literal["exact_match"] = "exact_match"
    format: float = Field(default=0.2, ge=0, le=1)
    """Reward of a wrong answer between the answer tags."""


class CustomReward(Custom):
    """A function of your own from an ``Outcome`` to a number, or a class whose instances are such functions."""


Reward = Annotated[ExactMatch | CustomReward, BY_TYPE]
