"""How much a service is asked: a steady pace, and a bounded number of repetitions with growing pauses.

Time enters through :class:`Timing` alone, so that tests can turn the clock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

FIRST_PAUSE = 0.5  # seconds
LONGEST_PAUSE = 30.0
LONGEST_WISH = 60.0
"""Most seconds a service may ask us to wait; rather than longer, the policy is told that there is no answer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where time comes from."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """Uniform in [0, 1). A source of its own: pauses must not disturb what a run seeds."""


class Pace:
    """Turns are given in the order of asking, at least ``1 / rate`` seconds apart. A cancelled turn costs nothing."""

    def __init__(self, rate: float | None, timing: Timing) -> None:
        self._gap = 0.0 if rate is None else 1.0 / rate
        self._timing = timing
        self._next = timing.now()
        self._line = asyncio.Lock()  # first come, first served

    async def turn(self) -> None:
        """Return when it is one's turn."""
        if not self._gap:
            return
        async with self._line:
            wait = self._next - self._timing.now()
            if wait > 0:
                await self._timing.sleep(wait)
            self._next = max(self._next, self._timing.now()) + self._gap


def pause(failures: int, timing: Timing) -> float:
    """Seconds to wait after so many failures: doubling, and jittered downwards by up to a half.

    >>> [pause(n, Timing(jitter=lambda: 0.0)) for n in (1, 2, 3, 9)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1)) * (1 - timing.jitter() / 2)


def wish(retry_after: str | None, timing: Timing) -> float | None:
    """Seconds a service asks us to wait: its ``Retry-After``, as a number or a date. None if it says nothing usable.

    >>> wish("7", Timing()), wish("Thu, 01 Jan 1970 00:01:00 GMT", Timing(wall=lambda: 50.0)), wish("soon", Timing())
    (7.0, 10.0, None)
    """
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - timing.wall())
    except (ValueError, OverflowError):
        return None
