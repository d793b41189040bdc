"""The engine interface: token ids in; sampled ids with their log-probabilities out."""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record.checks import LARGEST_LOGPROB

Finish = Literal["stop", "length", "abort"]


class EngineError(MemoryWalkerError):
    """The engine gave no usable answer, retries included."""


class RefusedError(EngineError):
    """The engine refuses to sample this turn."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to sample."""

    prompt: Sequence[int]
    """Token ids of the live context."""
    max_tokens: int
    rollout: str
    """Id of the rollout: its turns go to the engine that has their prefix cached."""
    seed: int | None = None
    timeout: float | None = None
    """Seconds after which the turn is aborted and returns what was sampled by then."""
    stop: asyncio.Event | None = None
    """Aborts the turn once it is set."""

    @property
    def session(self) -> str:
        """Name of :attr:`rollout` in 0.6, until 0.8."""
        warnings.warn("Request.session is now Request.rollout; the old name is removed in 0.8", FutureWarning, 2)
        return self.rollout


@dataclass(frozen=True, slots=True)
class Generation:
    """What the policy sampled under the prompt of a request."""

    tokens: tuple[int, ...]
    """Including the stop token, if it was sampled."""
    logprobs: tuple[float, ...]
    """One per token, at decode time."""
    finish: Finish
    """``stop``: at a stop token. ``length``: at ``max_tokens``. ``abort``: by the client or the engine."""
    weights: tuple[tuple[str, int], ...] = ()
    """(weight version, number of tokens it sampled), in order; empty if the engine does not report versions."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens):
            raise EngineError(f"{len(self.logprobs)} log-probabilities for {len(self.tokens)} sampled tokens")
        bad = [logprob for logprob in self.logprobs if not -math.inf < logprob <= LARGEST_LOGPROB]  # NaN is neither
        if bad:
            raise EngineError(
                f"{bad[0]:g} is not a log-probability; {len(bad)} of {len(self.tokens)} tokens have such a value"
            )

    @property
    def straddles(self) -> bool:
        """Whether the weights changed during the turn."""
        return len(self.weights) > 1


class Engine(Protocol):
    """Samples turns of many rollouts at once."""

    async def generate(self, request: Request) -> Generation:
        """Sample a turn, or raise :class:`EngineError`. Cancelling the call aborts the request on the engine."""
        ...
