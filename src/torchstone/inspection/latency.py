"""How long eager takes, and how much memory: one call at a time on the same inputs."""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from torchstone.bench import sample
from torchstone.bench.clock import Clock
from torchstone.records.inventory import CallTimes

__all__ = ["finishing", "peak_during", "resident_bytes", "times"]

_WARMUP_MOST = 30
_WARMUP_USUAL = 3
_WARMUP_SHARE = 0.3
_FEWEST = 5
_OVERDRAWN = 3
_PASS_S = 0.01
_BLOCKS = 6
_MOST = 200
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def times(run: Callable[[], object], clock: Clock, budget_s: float) -> CallTimes:
    """Warm up until times stop falling, then time calls: 5 to 200, fewer only if these would take long.

    Warm-up is judged by :func:`torchstone.bench.sample.steady`, on passes of as many calls as take
    10 ms, and cut at 30 passes or 30% of the time.

    :param run: one call, which has finished its work when it returns.
    :param budget_s: seconds for all.
    """
    start = clock.now()
    warmup = _warm_up(run, clock, _WARMUP_SHARE * budget_s)
    seconds: list[float] = []
    while len(seconds) < _MOST:
        seconds.append(_timed(run, clock))
        spent = clock.now() - start
        if spent > _OVERDRAWN * budget_s or (spent > budget_s and len(seconds) >= _FEWEST):
            break
    ordered = sorted(seconds)
    return CallTimes(
        calls=len(seconds),
        warmup_calls=warmup,
        median_s=statistics.median(seconds),
        p90_s=ordered[math.ceil(0.9 * len(ordered)) - 1],
        steady=sample.steady(_blocks(seconds)),
    )


def _warm_up(run: Callable[[], object], clock: Clock, budget_s: float) -> int:
    """Calls until steady."""
    start, passes, calls = clock.now(), [_timed(run, clock)], 1
    a_pass = max(1, min(_MOST, int(_PASS_S / max(passes[0], 1e-9))))
    while len(passes) < _WARMUP_MOST:
        spent = clock.now() - start + passes[-1] > budget_s
        # the first call stands alone, and is no pass like the others
        if spent or (len(passes) > _WARMUP_USUAL and sample.steady(passes[1:])):
            break
        passes.append(sum(_timed(run, clock) for _ in range(a_pass)))
        calls += a_pass
    return calls


def _blocks(seconds: list[float]) -> list[float]:
    """Mean seconds of a call in each sixth of the calls, fewer where there are not as many calls."""
    count = min(_BLOCKS, len(seconds))
    ends = [len(seconds) * i // count for i in range(count + 1)]
    return [statistics.fmean(seconds[a:b]) for a, b in pairwise(ends)]


def finishing(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same, waiting for the device."""
    if device.type != "cuda":
        return run

    def finished() -> object:
        result = run()
        torch.cuda.synchronize(device)
        return result

    return finished


def resident_bytes() -> int:
    """What this process has in memory now; the most that it had where the system does not say."""
    return _status("VmRSS") or _high_water()


def peak_during(run: Callable[[], object]) -> int:
    """Most bytes that this process was resident while ``run`` ran.

    Where the kernel cannot forget the process's earlier peak, that is the least it can say.
    """
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")  # proc(5): resets VmHWM
    run()
    return _status("VmHWM") or _high_water()


def _timed(run: Callable[[], object], clock: Clock) -> float:
    start = clock.now()
    run()
    return clock.now() - start


def _status(field: str) -> int:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.startswith(f"{field}:"))
    return next((int(words[1]) * 1024 for words in found if len(words) > 1), 0)


def _high_water() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
