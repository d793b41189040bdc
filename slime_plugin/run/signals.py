"""What a process does when it is told to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Self

from slime_plugin.run.supervisor import STOP_SIGNALS

SIGNAL_DEBOUNCE_S = 1.0
"""Signals within this time count as one: a terminal and its supervisor may both send one."""

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP inside a block.

    One that the process ignored before, as under nohup, stays ignored unless it is among ``always``.
    """

    def __init__(self, handler: Handler, always: Collection[int] = ()) -> None:
        self._handler, self._always = handler, always
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # signals reach no other
            found = {number: signal.getsignal(number) for number in STOP_SIGNALS}
            self._before = {n: old for n, old in found.items() if n in self._always or old is not signal.SIG_IGN}
        self.handle()
        return self

    def handle(self) -> None:
        """Install the handler, again if other code has replaced it."""
        self._set(self._handler)

    def ignore(self) -> None:
        self._set(signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _set(self, handler: Handler) -> None:
        for number in self._before:
            signal.signal(number, handler)


class Interrupt:
    """A handler that raises KeyboardInterrupt once per :data:`SIGNAL_DEBOUNCE_S`."""

    def __init__(self) -> None:
        self._last = -SIGNAL_DEBOUNCE_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        since, self._last = time.monotonic() - self._last, time.monotonic()
        if since > SIGNAL_DEBOUNCE_S:
            raise KeyboardInterrupt
