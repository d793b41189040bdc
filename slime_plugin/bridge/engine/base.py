"""What an engine is: token ids in; sampled ids with their log-probabilities out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record.checks import LARGEST_LOGPROB

Finish = Literal["stop", "length", "abort"]


class EngineError(MemoryWalkerError):
    """The engine gave no usable answer, however often it was asked."""


class RefusedError(EngineError):
    """The engine is there, and will not sample this turn."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to sample."""

    prompt: Sequence[int]
    """The live context, exactly."""
    max_tokens: int
    session: str
    """Turns of one session go to the engine that has their prefix cached."""
    seed: int | None = None
    timeout: float | None = None
    """Seconds after which the turn is aborted; what was sampled by then is returned."""
    stop: asyncio.Event | None = None
    """Aborts the turn once it is set; what was sampled by then is returned."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the policy sampled under the prompt of a request."""

    tokens: tuple[int, ...]
    """The stop token included, if it was sampled."""
    logprobs: tuple[float, ...]
    """One for each token, at the moment it was decoded."""
    finish: Finish
    """``stop``: it sampled a stop token. ``length``: it may sample no more. ``abort``: it was cut off."""
    weights: tuple[tuple[str, int], ...] = ()
    """Version of the weights and how many of the tokens it sampled, in order; empty if the engine does not tell."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens):
            raise EngineError(f"{len(self.logprobs)} log-probabilities for {len(self.tokens)} sampled tokens")
        bad = [logprob for logprob in self.logprobs if not -math.inf < logprob <= LARGEST_LOGPROB]  # NaN is neither
        if bad:
            raise EngineError(f"{bad[0]:g} is no log-probability; {len(bad)} of {len(self.tokens)} tokens have such")

    @property
    def straddles(self) -> bool:
        """The weights changed in the middle of it."""
        return len(self.weights) > 1


class Engine(Protocol):
    """Samples turns of many sessions at once."""

    async def generate(self, request: Request) -> Generation:
        """Raises :class:`EngineError`. Cancelling the call aborts the request on the engine."""
        ...


class NoEngine:
    """For what was sampled before and is only read again."""

    async def generate(self, request: Request) -> Generation:
        raise EngineError(f"there is no engine for a turn of {request.session}")
