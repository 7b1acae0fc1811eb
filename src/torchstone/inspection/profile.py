"""Where the time of a call goes, by torch.profiler.

Two runs, since marking operations costs time itself. The first, as it is: how much of a call is inside
any operation. The second, with each operation within a range of its own: which module and source line
called what, and how long that took below Python.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from torchstone.inspection.latency import finishing
from torchstone.inspection.trace import ModuleStack, Place, marked

__all__ = ["Profiled", "profile"]

_CALL = "torchstone call"
_PREFIX = "torchstone operation "
_MOST_CALLS = 20
_FEWEST_CALLS = 3  # of those with ranges, where there is time: a median of them is no outlier
_MOST_EVENTS = 20_000


class Profiled(NamedTuple):
    """What the profiler saw."""

    calls: int
    """Calls profiled."""
    seconds: float
    """Median of one."""
    operations_s: float
    """Of which inside operations, by the median share; on a device, what its kernels take."""
    places: dict[Place, float]
    """Median seconds a call by where an operation was called, with ranges around each."""
    counts: dict[Place, int]
    """Operations a call, likewise."""


def profile(
    module: nn.Module, args: tuple[Any, ...], device: torch.device, *, call_s: float, budget_s: float
) -> Profiled:
    """Profile calls of a module on the same inputs.

    :param call_s: about how long a call takes.
    :param budget_s: for both runs together; the profiler's own work comes on top.
    """
    run = finishing(lambda: module(*args), device)
    one = len(_events(run, 1, device))
    calls = int(budget_s / 2 / max(call_s, 1e-6))
    calls = max(1, min(_MOST_CALLS, calls, _MOST_EVENTS // max(1, one)))
    whole = [e for e in _events(run, calls, device) if e.name == _CALL and _on_host(e)]
    shares = [sum(_seconds(c, device) for c in e.cpu_children) / _host_s(e) for e in whole]
    seconds = statistics.median(map(_host_s, whole))
    places, counts = _placed(module, run, device, max(min(calls, _FEWEST_CALLS), calls // 2))
    return Profiled(calls, seconds, min(1.0, statistics.median(shares)) * seconds, places, counts)


def _events(run: Callable[[], object], calls: int, device: torch.device) -> list[FunctionEvent]:
    """What the profiler records, each call within a range."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(calls):
            with record_function(_CALL):
                run()
    return list(found.events() or ())


def _placed(
    module: nn.Module, run: Callable[[], object], device: torch.device, calls: int
) -> tuple[dict[Place, float], dict[Place, int]]:
    known: dict[Place, int] = {}

    def mark(place: Place) -> Any:
        return record_function(f"{_PREFIX}{known.setdefault(place, len(known))}")

    def marked_run() -> object:
        with marked(ModuleStack(module), mark):
            return run()

    events = [e for e in _events(marked_run, calls, device) if _on_host(e)]
    whole = {id(e): i for i, e in enumerate(e for e in events if e.name == _CALL)}
    seconds = {place: [0.0] * len(whole) for place in known}
    counts: Counter[Place] = Counter()
    places = list(known)
    for event in events:
        if event.name.startswith(_PREFIX):
            place = places[int(event.name.removeprefix(_PREFIX))]
            inside = sum(_seconds(child, device) for child in event.cpu_children)
            seconds[place][whole[id(_call_of(event))]] += inside
            counts[place] += 1
    return (
        {place: statistics.median(each) for place, each in seconds.items()},
        {place: round(count / len(whole)) for place, count in counts.items()},
    )


def _call_of(event: FunctionEvent) -> FunctionEvent | None:
    """The call that an event is part of."""
    around: FunctionEvent | None = event
    while around is not None and around.name != _CALL:
        around = around.cpu_parent
    return around


def _seconds(event: FunctionEvent, device: torch.device) -> float:
    """Of an event and all within; of the kernels that it started where there is a device."""
    microseconds = event.device_time_total if device.type == "cuda" else event.cpu_time_total
    return float(microseconds) / 1e6


def _host_s(event: FunctionEvent) -> float:
    return float(event.cpu_time_total) / 1e6


def _on_host(event: FunctionEvent) -> bool:
    return event.device_type.name == "CPU"
