"""The clock that measurement code is handed, so that tests can hand it another."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]

# time.sleep wakes up late by up to this much; the rest of a wait is spent spinning.
_SPIN_S = 0.001


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes backwards."""

    def sleep(self, seconds: float) -> None:
        """Return ``seconds`` later, or at once if that is not positive."""


class MonotonicClock:
    """The machine's highest-resolution monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Sleep for most of the wait and spin for its last millisecond, so as to wake up on time."""
        end = time.perf_counter() + seconds
        if seconds > _SPIN_S:
            time.sleep(seconds - _SPIN_S)
        while time.perf_counter() < end:
            pass
