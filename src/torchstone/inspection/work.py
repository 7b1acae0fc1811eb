"""Adding up what was traced: by operation, by module, over sizes. Pure arithmetic on counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torchstone.bench import roofline
from torchstone.inspection.trace import Place, Trace
from torchstone.records.inventory import Bounds, Peaks, Work

__all__ = [
    "Least",
    "Weighted",
    "bounds",
    "by_module",
    "by_op",
    "fused_s",
    "least",
    "operations_s",
    "running",
    "seconds_by",
    "tally",
    "total",
]


class Weighted(NamedTuple):
    """A trace, and how many requests it stands for."""

    trace: Trace
    requests: int


class Least(NamedTuple):
    """The least seconds that a call could take."""

    operations_s: float
    """Operation by operation."""
    fused_s: float
    """With perfect fusion."""


Keys = Callable[[Place], Iterable[str]]
"""What a call is counted under."""


def by_op(place: Place) -> tuple[str]:
    """Its operation."""
    return (place.op,)


def by_module(place: Place) -> tuple[str]:
    """The innermost module that was running; the model itself (``""``) where none was."""
    return (place.stack[-1] if place.stack else "",)


def running(place: Place) -> set[str]:
    """Every module that was running, the model itself always."""
    return {"", *place.stack}


def total(_place: Place) -> tuple[str]:
    """All under one."""
    return ("",)


def tally(traces: Sequence[Weighted], keys: Keys) -> dict[str, Work]:
    """Mean work a request, by key."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * 4)
    requests = sum(w.requests for w in traces)
    for trace, weight in traces:
        for (place, cost), calls in trace.calls.items():
            for key in keys(place):
                found = sums[key]
                for i, amount in enumerate((1, cost.flops, cost.other, cost.bytes)):
                    found[i] += amount * calls * weight  # whole numbers: sums over modules are exact
    return {
        key: Work(
            calls=calls / requests,
            flops=flops / requests,
            other_flops=other / requests,
            bytes=bytes_ / requests,
        )
        for key, (calls, flops, other, bytes_) in sums.items()
    }


def seconds_by(seconds: Mapping[Place, float], keys: Keys) -> dict[str, float]:
    """Seconds of a call, by key."""
    sums: dict[str, float] = defaultdict(float)
    for place, amount in seconds.items():
        for key in keys(place):
            sums[key] += amount
    return dict(sums)


def operations_s(trace: Trace, peaks: Peaks, keys: Keys = total) -> dict[str, float]:
    """Least seconds of a call's operations one by one, by key."""
    sums: dict[str, float] = defaultdict(float)
    for (place, cost), calls in trace.calls.items():
        least = calls * roofline.least_s(peaks, cost.flops + cost.other, cost.bytes, cost.dtype)
        for key in keys(place):
            sums[key] += least
    return dict(sums)


def fused_s(trace: Trace, peaks: Peaks) -> float:
    """Least seconds of a call if nothing but inputs, outputs and used weights had to move."""
    computing = sum(
        calls * roofline.least_s(peaks, cost.flops + cost.other, 0, cost.dtype)
        for (_, cost), calls in trace.calls.items()
    )
    return max(computing, roofline.least_s(peaks, 0, trace.least_bytes, ""))


def least(trace: Trace, peaks: Peaks) -> Least:
    """Both bounds of a call.

    What fused code has to move, code that runs one operation after the other has to move too: the sum
    over operations, each of which may find its inputs in a cache, is never taken for less.
    """
    fused = fused_s(trace, peaks)
    return Least(max(operations_s(trace, peaks).get("", 0.0), fused), fused)


def bounds(eager_s: float, operations: float, fused: float) -> Bounds:
    """Eager next to what the machine allows; all in seconds a call."""
    return Bounds(
        eager_s=eager_s,
        operations_s=operations,
        fused_s=fused,
        eager_over_operations=eager_s / operations if operations > 0 else None,
        eager_over_fused=eager_s / fused if fused > 0 else None,
    )
