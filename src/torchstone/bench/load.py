"""Open-loop load: serve arrivals that were scheduled in advance, and sum up the latencies.

The sender does not wait for answers. A request's latency runs from its *scheduled* arrival to its
completion, so time that it spent waiting behind slow ones counts (no coordinated omission: Tene, "How
not to measure latency", 2013; Schroeder, Wierman and Harchol-Balter, "Open versus closed: a cautionary
tale", NSDI 2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchstone.bench.clock import Clock
from torchstone.errors import InputError
from torchstone.records import LoadResult, Record

__all__ = ["QUANTILES", "Served", "arrivals", "open_loop", "summarize", "tail_change"]

QUANTILES: tuple[tuple[str, float, int], ...] = (
    ("p50", 0.5, 2),
    ("p90", 0.9, 10),
    ("p95", 0.95, 20),
    ("p99", 0.99, 100),
    ("p999", 0.999, 1000),
)
"""Name, level, and the fewest requests that can show it: one beyond the level is expected by then."""

_TAIL_RESAMPLES = 2000
_TAIL_ENDS = (0.005, 0.995)


class Served(Record, frozen=True, kw_only=True):
    """What one open-loop run did."""

    latencies_s: tuple[float, ...]
    """Seconds from scheduled arrival to completion of each request served, in order of arrival."""
    errors: int
    """Requests that had not been started when the run hit its time limit."""
    elapsed_s: float
    """Seconds from the schedule's start to the last completion."""


def arrivals(rate: float, seconds: float, seed: int) -> tuple[float, ...]:
    """Times of a Poisson process: exponential gaps of mean ``1 / rate``, up to ``seconds``.

    :raises InputError: unless both are positive and finite.
    """
    if not (0 < rate < math.inf and 0 < seconds < math.inf):
        raise InputError(f"rate and seconds must be positive and finite, got {rate!r} and {seconds!r}")
    rng = np.random.default_rng(seed)
    times: list[float] = []
    at = float(rng.exponential(1 / rate))
    while at < seconds:
        times.append(at)
        at += float(rng.exponential(1 / rate))
    return tuple(times)


def open_loop(
    schedule: Sequence[float], serve: Callable[[int], object], clock: Clock, limit_s: float
) -> Served:
    """Serve a schedule first come, first served, one at a time.

    :param schedule: arrival times since the start, seconds, ascending.
    :param serve: answers request ``i``; what it raises passes through.
    :param limit_s: no request is started later than this; those left over count as errors.
    """
    start = clock.now()
    latencies: list[float] = []
    for i, at in enumerate(schedule):
        elapsed = clock.now() - start
        if elapsed < at:
            clock.sleep(at - elapsed)
        elif elapsed > limit_s:
            break
        serve(i)
        latencies.append(clock.now() - start - at)
    return Served(
        latencies_s=tuple(latencies),
        errors=len(schedule) - len(latencies),
        elapsed_s=clock.now() - start,
    )


def summarize(recipe: str, rate: float, served: Served, slo_s: float | None) -> LoadResult:
    """Quantiles, goodput and achieved rate of one run.

    A request that was never served counts as later than all others. A quantile that falls among those,
    or for which there are too few requests (see :data:`QUANTILES`), is None.

    :param rate: requests a second that were offered.
    :param slo_s: latency objective in seconds that goodput counts by, if there is one.
    """
    total = len(served.latencies_s) + served.errors
    ordered = np.concatenate([np.sort(served.latencies_s), np.full(served.errors, np.inf)])
    quantiles: dict[str, float | None] = {}
    for name, level, fewest in QUANTILES:
        # The smallest latency that at least this share of the requests does not exceed.
        value = float(ordered[math.ceil(round(level * total, 9)) - 1]) if total >= fewest else math.inf
        quantiles[name] = value if math.isfinite(value) else None
    goodput = None
    if slo_s is not None:
        within = sum(latency <= slo_s for latency in served.latencies_s)
        goodput = _rate(within, served.elapsed_s)
    return LoadResult(
        recipe=recipe,
        rate=rate,
        requests=total,
        errors=served.errors,
        achieved=_rate(len(served.latencies_s), served.elapsed_s),
        quantiles_s=quantiles,
        slo_s=slo_s,
        goodput=goodput,
        latencies_s=served.latencies_s,
    )


def tail_change(before: Sequence[float], after: Sequence[float], level: float) -> tuple[float, float]:
    """Interval of the log ratio of a latency quantile of two independent runs; above 0 is worse after.

    The moving block bootstrap (Künsch, "The jackknife and the bootstrap for general stationary
    observations", Annals of Statistics 17, 1989): waiting times are correlated, and blocks of a tenth
    of a run hold whole busy periods. 99% two-sided.

    :param before: latencies in order of arrival, seconds, positive.
    :param level: of the quantile: 0.99.
    """
    drawn = [np.log(_replicates(np.array(x), level, i)) for i, x in enumerate((before, after))]
    low, high = np.quantile(drawn[1] - drawn[0], _TAIL_ENDS)
    return float(low), float(high)


def _replicates(latencies: NDArray[np.float64], level: float, seed: int) -> NDArray[np.float64]:
    block = max(1, len(latencies) // 10)
    shape = (_TAIL_RESAMPLES, math.ceil(len(latencies) / block))
    starts = np.random.default_rng(seed).integers(0, len(latencies) - block + 1, shape)
    drawn = latencies[starts[..., None] + np.arange(block)].reshape(_TAIL_RESAMPLES, -1)
    rank = math.ceil(round(level * drawn.shape[1], 9)) - 1
    found: NDArray[np.float64] = np.partition(drawn, rank, axis=1)[:, rank]
    return found


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
