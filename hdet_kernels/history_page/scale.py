"""Axes: from numbers to places between 0 and 1, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: Values beyond this are drawn at the end of an axis: their differences might overflow.
LARGEST = 1e250

#: From this ratio of the largest to the smallest value on, an axis that may be logarithmic is.
LOG_RATIO = 8.0


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, linear or logarithmic; ``whole``: it has whole numbers only."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def place(self, value: float) -> float:
        """Return where ``value`` lies between the ends, 0 to 1; values beyond them are at the ends."""
        low, high, value = (
            (math.log(v) if v > 0 else -math.inf for v in (self.low, self.high, value))
            if self.log
            else (
                self.low,
                self.high,
                value,
            )
        )
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round values on the axis, and how they are written."""
        if self.log:
            values = _log_ticks(self.low, self.high)
            if len(values) >= 2:
                return [(value, short(value)) for value in values]
        step = _round_step((self.high - self.low) / 5)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        values = [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(value, short(value, step)) for value in values]


def scale_of(values: Iterable[float], *, log: bool = False, zero: bool = False, decades: float = math.inf) -> Scale:
    """Return an axis for some finite values, with a little room at both ends.

    Args:
        values: those to show.
        log: logarithmic, if all are positive and they span a factor of ``LOG_RATIO``.
        zero: whether 0 is on a linear axis.
        decades: the most powers of ten that a logarithmic axis spans, from the highest value down.
    """
    known = [min(max(value, -LARGEST), LARGEST) for value in values if math.isfinite(value)]
    if log and min(known, default=0.0) > 0:
        known = [max(value, 1 / LARGEST) for value in known]
    if log and known and min(known) > 0 and max(known) >= LOG_RATIO * min(known):
        low = max(min(known), max(known) / 10 ** min(decades, 300))
        room = (max(known) / low) ** 0.04
        return Scale(low / room, max(known) * room, log=True)
    known = [value if abs(value) >= 1 / LARGEST else 0.0 for value in known]  # a fifth of a smaller one might be 0
    low, high = min(known, default=0.0), max(known, default=1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.1 * abs(high) or 1.0
        return Scale(low - room, high + room)
    room = 0.05 * (high - low)
    return Scale(low if zero and low == 0 else low - room, high if zero and high == 0 else high + room)


def short(value: float, step: float | None = None) -> str:
    """Return a number in few characters: ``12,000``, ``0.25``, ``3e−5``; ``step`` tells which digits matter."""
    if value == 0:
        return "0"
    size = abs(value)
    if not 1e-3 <= size < 1e6:
        digits, _, exponent = f"{value:.2e}".partition("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    elif step is not None:
        text = f"{value:,.{max(-math.floor(math.log10(step) + 1e-9), 0) + (0 if _is_power(step) else 1)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


def _is_power(step: float) -> bool:
    return not math.isclose(step / 10 ** math.floor(math.log10(step) + 1e-9), 2.5)


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, or finer values where they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max((last - first) // 8, 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**e for e in range(first, last + 1, every) for f in factors]
        inside = [value for value in found if low <= value <= high]
        if len(inside) >= 3:
            break
    return inside
