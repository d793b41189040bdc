"""What the server needs of the tap behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from slime_plugin.tap.dialects.conversation import Memory
from slime_plugin.tap.messages import Answer, Payload


@dataclass(frozen=True, slots=True)
class Ask:
    """A request with what came with it."""

    payload: Payload
    digest: str
    """Of the body: a retry has the same."""
    headers: Mapping[str, str]
    """Names in lower case."""


class Served(Protocol):
    """A rollout that is being served."""

    @property
    def memory(self) -> Memory:
        """Of its requests."""
        ...

    async def answer(self, ask: Ask) -> Answer:
        """Raises :class:`~slime_plugin.tap.messages.TapError`. Cancelled if the client hangs up."""
        ...

    async def count(self, payload: Payload) -> int:
        """Tokens of the prompt, exactly as :meth:`answer` would have it. Raises ``TapError``."""
        ...


class Registry(Protocol):
    """The rollouts that are open."""

    @property
    def model(self) -> str:
        """What the policy is called in the list of models."""
        ...

    def session(self, token: str) -> Served | None:
        """The rollout that this token opens; takes the same time for a wrong token as for a right one."""
        ...
