"""Seconds of one call: wall clock on a CPU; events on a GPU, behind work that hides the launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from torchstone.verify import drive

__all__ = ["Flusher", "Timed"]

_SAMPLE_S = 0.5e-3  # on a CPU shorter calls are repeated, for the sake of the clock
_LAUNCH_S = 20e-6  # of the host, for a sample beside its call
_MOST_FLUSHES = 400


class Flusher:
    """Empties the last-level cache of a GPU, and keeps it busy while launches queue up behind."""

    def __init__(self, device: torch.device) -> None:
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self(2)
        torch.cuda.synchronize()
        started = time.perf_counter()
        self(20)
        torch.cuda.synchronize()
        self._seconds = (time.perf_counter() - started) / 20

    def __call__(self, times: int = 1) -> None:
        """Empty it."""
        for _ in range(times):
            self._buffer.zero_()

    def busy(self, seconds: float) -> None:
        """Keep the device busy for about so long."""
        self(min(math.ceil(seconds / self._seconds), _MOST_FLUSHES))


class Timed:
    """A function on inputs that stay where they are; two calls warm it up.

    :param reset: puts back what the function writes to its inputs; None if it writes to none.
    :param flusher: None on a CPU.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        given: tuple[Any, ...],
        reset: Callable[[], None] | None,
        flusher: Flusher | None,
    ) -> None:
        self.call, self.given, self._reset, self._flusher = call, given, reset, flusher
        self._once()
        self._finish()
        started = time.perf_counter()
        self._once()
        self._host_s = time.perf_counter() - started + _LAUNCH_S
        self._finish()
        self.seconds = time.perf_counter() - started
        """Of one call, roughly."""

    @property
    def last(self) -> list[Any]:
        """Outputs of the latest call."""
        return drive.leaves(self._last)

    def samples(self, count: int, flush: bool) -> list[float]:
        """Seconds of one call, so many times."""
        return (
            self._on_cpu(count) if self._flusher is None else self._on_gpu(self._flusher, count, flush)
        )

    def _once(self) -> None:
        if self._reset is not None:
            self._reset()
        self._last = self.call(*self.given)

    def _finish(self) -> None:
        if self._flusher is not None:
            torch.cuda.synchronize()

    def _on_cpu(self, count: int) -> list[float]:
        repeats = 1 if self._reset else math.ceil(_SAMPLE_S / self.seconds)
        found = []
        for _ in range(count):
            if self._reset is not None:
                self._reset()
            started = time.perf_counter()
            for _ in range(repeats):
                self._last = self.call(*self.given)
            found.append((time.perf_counter() - started) / repeats)
        return found

    def _on_gpu(self, flusher: Flusher, count: int, flush: bool) -> list[float]:
        """All samples are queued while the device is still busy: it never waits for a launch."""
        events = [tuple(_event() for _ in range(2)) for _ in range(count)]
        flusher.busy(1.5 * count * self._host_s)
        if not flush:
            self._once()
        for start, end in events:
            if self._reset is not None:
                self._reset()
            if flush:
                flusher()
            start.record()
            self._last = self.call(*self.given)
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's
