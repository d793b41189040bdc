"""Rate limit and backoff for requests to the engine and to remote tools.

Time is injected through :class:`Timing`, so that tests control the clock. No retry library: the engine client stops
waiting on a stop event and at a deadline, tools obey ``Retry-After``, and with tenacity both would need custom classes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

MAX_BACKOFF_S = 30.0
"""Before jitter."""
MAX_RETRY_AFTER_S = 60.0
"""If a service asks to wait longer than this, the request fails instead."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Sources of time and randomness."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """Uniform in [0, 1). A generator of its own, so that a run's seeded random numbers do not depend on retries."""


class RateLimiter:
    """Grants requests in first-come order, at least ``1 / rate`` seconds apart. A cancelled wait uses no slot."""

    def __init__(self, rate: float | None, timing: Timing) -> None:
        self._interval_s = 0.0 if rate is None else 1.0 / rate
        self._timing = timing
        self._next = timing.now()
        self._queue = asyncio.Lock()  # first come, first served

    async def acquire(self) -> None:
        if not self._interval_s:
            return
        async with self._queue:
            wait = self._next - self._timing.now()
            if wait > 0:
                await self._timing.sleep(wait)
            self._next = max(self._next, self._timing.now()) + self._interval_s


def backoff_s(failures: int, first_s: float, jitter: float) -> float:
    """Seconds to wait after that many failures: doubles up to ``MAX_BACKOFF_S``, times ``0.5 + jitter``.

    >>> [backoff_s(failures, 0.5, jitter=0.5) for failures in (1, 2, 3, 7, 5000)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    return min(first_s * 2.0 ** min(failures - 1, 60), MAX_BACKOFF_S) * (0.5 + jitter)


def parse_retry_after(header: str | None, timing: Timing) -> float | None:
    """Seconds from a ``Retry-After`` header, a number or a date; None if there is none or it cannot be parsed.

    >>> clock = Timing(wall=lambda: 50.0)
    >>> [parse_retry_after(text, clock) for text in ("7", "Thu, 01 Jan 1970 00:01:00 GMT", "soon")]
    [7.0, 10.0, None]
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - timing.wall())
    except (ValueError, OverflowError):
        return None
