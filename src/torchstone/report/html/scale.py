"""Logarithmic scales in per cent of a lane's width, so that a drawing needs no fixed size; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

__all__ = ["Scale", "decades", "nice"]

_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


class Scale(msgspec.Struct, frozen=True):
    """From a positive value to its place, 0 to 100, on a logarithmic axis."""

    low: float
    """Value at the left edge."""
    high: float
    """Value at the right edge."""
    ticks: tuple[float, ...]
    """Values to mark, rising."""

    def at(self, value: float) -> float:
        """Place of ``value``; what lies outside is put on the edge."""
        if value <= self.low:
            return 0.0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(100 * min(1.0, share), 2)


def nice(values: Iterable[float], most: int = 6, always: float | None = None) -> Scale:
    """A scale that holds all ``values`` with some room to spare.

    :param values: positive; at least one, or ``always``.
    :param most: about how many ticks, at round numbers.
    :param always: a value to hold and tick in any case.
    """
    found = [*values, *([] if always is None else [always])]
    low, high = min(found), max(found)
    room = max(high / low, 1.3) ** 0.08
    low, high = low / room, high * room
    return Scale(low, high, _thinned(low, high, most, always))


def _thinned(low: float, high: float, most: int, always: float | None) -> tuple[float, ...]:
    decades_between = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [s * 10.0**d for d in decades_between for s in _STEPS if low <= s * 10.0**d <= high]
    gap = math.log(high / low) / most
    ticks = [] if always is None else [always]
    # round numbers first: 1, then 2 and 5, then the rest
    for tick in sorted(inside, key=_roughness):
        if all(abs(math.log(tick / other)) >= gap for other in ticks):
            ticks.append(tick)
    return tuple(sorted(ticks))


def _roughness(tick: float) -> int:
    mantissa = round(tick / 10.0 ** math.floor(math.log10(tick) + 1e-9), 6)
    return {1.0: 0, 2.0: 1, 5.0: 1, 3.0: 2, 1.5: 2}.get(mantissa, 3)


def decades(values: Iterable[float], reach: int = 6) -> Scale:
    """A scale around 1 for errors over their bounds, cut ``reach`` decades away on either side."""
    found = [math.log10(v) for v in values if v > 0]
    low = max(-reach, math.floor(min([-1.2, *found])))
    high = min(reach, math.ceil(max([1.0, *found])))
    step = max(1, math.ceil((high - low) / 5))
    ticks = [d for d in range(-reach, reach + 1) if d % step == 0 and low <= d <= high]
    return Scale(10.0 ** (low - 0.2), 10.0 ** (high + 0.2), tuple(10.0**d for d in ticks))
