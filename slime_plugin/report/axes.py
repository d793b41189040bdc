"""Axes of charts: which round numbers a person would write beside them, and how."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """Values on one side of a box, mapped to its pixels.

    >>> Axis.over([3, 97], 0, 100).ticks()
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    >>> Axis.over([3e-7, 0.6], 0, 100, log=True).labels()
    ['10⁻⁷', '10⁻⁵', '10⁻³', '10⁻¹']
    >>> Axis.over([0.2, 0.6], 0, 100, log=True).labels()
    ['10⁻¹', '2·10⁻¹', '5·10⁻¹', '10⁰']
    """

    low: float
    high: float
    start: float
    """Pixel of ``low``."""
    stop: float
    """Pixel of ``high``."""
    log: bool = False
    whole: bool = False
    """Only whole numbers are values: iterations, steps."""
    wanted: int = 5
    """About as many ticks."""

    @classmethod
    def over(
        cls,
        values: Iterable[float | None],
        start: float,
        stop: float,
        *,
        log: bool = False,
        whole: bool = False,
        wanted: int = 5,
        tight: bool = False,
    ) -> Axis:
        """Around some values, from one round number to another; ``tight`` ends where they end."""
        finite = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (1.0, 1.0) if log else (0.0, 1.0)
        if log:
            low, high = 10.0 ** math.floor(_log10(low)), 10.0 ** math.ceil(_log10(high))
            return cls(low, high if high > low else low * 10, start, stop, log, wanted=wanted)
        if low == high:
            low, high = (low - 0.5, high + 0.5) if whole or low == 0 else (low - abs(low) / 2, high + abs(low) / 2)
        if not tight:
            step = _round_step((high - low) / wanted)
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(low, high, start, stop, log, whole, wanted)

    def __call__(self, value: float) -> float:
        low, high, at = (_log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(_log10(self.low)), round(_log10(self.high))
            if last - first <= 2:  # a decade or two would leave the reader with two or three numbers
                return [n * 10.0**power for power in range(first, last) for n in (1, 2, 5)] + [self.high]
            return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / self.wanted)))]
        step = _round_step((self.high - self.low) / self.wanted)
        step = max(1.0, round(step)) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def labels(self) -> list[str]:
        ticks = self.ticks()
        if self.log:
            return [_power(tick) for tick in ticks]
        step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) if ticks else 1.0
        return [_rounded(tick, step) for tick in ticks]


def _log10(value: float) -> float:
    """Without the last digit's error, which would move the decade that a power of ten opens."""
    return round(math.log10(value), 12)


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... tenths and so on that is not below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))


def _power(value: float) -> str:
    power = math.floor(_log10(value))
    first = round(value / 10.0**power)
    return f"{first}·" * (first > 1) + f"10{str(power).translate(_SUPERSCRIPT)}"


def _rounded(tick: float, step: float) -> str:
    """With as many digits as it takes to tell neighbours apart."""
    if tick == 0 or abs(tick) < step * 1e-6:
        return "0"
    if abs(tick) >= 1e5 or step < 1e-4:
        power = math.floor(math.log10(abs(tick)))
        digits = max(0, power - math.floor(math.log10(step) + 1e-9))
        if 1e5 <= abs(tick) < 1e9 and step >= 1000:
            million = abs(tick) >= 1e6 or step >= 1e6
            scaled = tick / (1e6 if million else 1e3)
            return f"{scaled:.{2}f}".rstrip("0").rstrip(".") + ("M" if million else "k")
        return f"{tick:.{digits}e}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{tick:,.{digits}f}"
