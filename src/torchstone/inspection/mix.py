"""The mix of the recorded traffic: sizes, scalars, padding, arrival rate. Pure; loads no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchstone.records import Arrival, ScalarSpec, TensorSpec, WorkloadSpec, factor_and_dim
from torchstone.records.inventory import DimMix, ScalarMix, ShapeShare, SizeBin, TrafficMix

__all__ = ["Sampled", "elements", "sampled", "traffic_mix"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_BARS = 16
_FREQUENT = 10


class Sampled(NamedTuple):
    """A request, and how many requests it stands for."""

    arrival: Arrival
    requests: int


def traffic_mix(spec: WorkloadSpec, *, recorded: bool) -> TrafficMix:
    """Describe the traffic.

    :param recorded: whether the workload has traffic, or ``spec.traffic`` is the example alone.
    """
    traffic = spec.traffic
    shapes = _shapes(traffic)
    largest = {d.name: max(a.sizes[d.name] for a in traffic) for d in spec.dims}
    padded = elements(spec, largest) * len(traffic)
    rate, peak = _rates([a.at_s for a in traffic if a.at_s is not None])
    return TrafficMix(
        requests=len(traffic),
        recorded=recorded,
        shapes=len(shapes),
        frequent=tuple(
            ShapeShare(sizes=a.sizes, scalars=a.scalars, requests=n, share=n / len(traffic))
            for a, n in sorted(shapes, key=lambda shape: -shape.requests)[:_FREQUENT]
        ),
        dims=tuple(_dim_mix(d.name, [a.sizes[d.name] for a in traffic]) for d in spec.dims),
        scalars=tuple(
            _scalar_mix(s.name, [a.scalars[s.name] for a in traffic if s.name in a.scalars])
            for s in spec.inputs
            if isinstance(s, ScalarSpec)
        ),
        padding_waste=1 - sum(elements(spec, a.sizes) for a in traffic) / padded if padded else 0.0,
        rate=rate,
        peak_rate=peak,
    )


def sampled(spec: WorkloadSpec, most: int) -> tuple[Sampled, ...]:
    """At most ``most`` distinct requests that stand for all, smallest first.

    All distinct ones where these are few enough. Else the traffic, ordered by input elements, is cut
    into ``most`` parts of as near the same number of requests as may be; the middle request of each
    stands for its part.
    """
    shapes = sorted(_shapes(spec.traffic), key=lambda s: (elements(spec, s.arrival.sizes), _key(s[0])))
    if len(shapes) <= most:
        return tuple(shapes)
    ordered = [s.arrival for s in shapes for _ in range(s.requests)]
    ends = [len(ordered) * i // most for i in range(most + 1)]
    picked: dict[tuple[object, ...], Sampled] = {}
    for first, last in pairwise(ends):
        if first == last:
            continue
        middle = ordered[(first + last) // 2]
        before = picked.get(_key(middle))  # a frequent request may be the middle of several parts
        picked[_key(middle)] = Sampled(middle, last - first + (before.requests if before else 0))
    return tuple(picked.values())


def elements(spec: WorkloadSpec, sizes: Mapping[str, int]) -> int:
    """Elements of all tensor inputs at these sizes."""
    total = 0
    for tensor in spec.inputs:
        if isinstance(tensor, TensorSpec):
            total += math.prod(_size(size, sizes) for size in tensor.shape)
    return total


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    factor, name = factor_and_dim(size)
    return factor * sizes[name]


def _key(arrival: Arrival) -> tuple[object, ...]:
    return (*sorted(arrival.sizes.items()), *sorted(arrival.scalars.items()))


def _shapes(traffic: Iterable[Arrival]) -> list[Sampled]:
    """Distinct requests in the order that they came, each with its count."""
    counts: Counter[tuple[object, ...]] = Counter()
    first: dict[tuple[object, ...], Arrival] = {}
    for arrival in traffic:
        first.setdefault(_key(arrival), arrival)
        counts[_key(arrival)] += 1
    return [Sampled(arrival, counts[key]) for key, arrival in first.items()]


def _dim_mix(name: str, sizes: Sequence[int]) -> DimMix:
    ordered = sorted(sizes)
    mean = sum(sizes) / len(sizes)
    return DimMix(
        name=name,
        quantiles={q: ordered[math.ceil(p * len(ordered)) - 1] for q, p in _QUANTILES.items()},
        mean=mean,
        distinct=len(set(sizes)),
        histogram=_histogram(Counter(sizes)),
        padding_waste=1 - mean / ordered[-1] if ordered[-1] else 0.0,
    )


def _histogram(counts: Mapping[int, int]) -> tuple[SizeBin, ...]:
    """A bar for each size where these are few, else bars of the same width."""
    if len(counts) <= _BARS:
        return tuple(SizeBin(low=n, high=n, requests=counts[n]) for n in sorted(counts))
    low, high = min(counts), max(counts)
    width = math.ceil((high - low + 1) / _BARS)
    bars: Counter[int] = Counter()
    for size, count in counts.items():
        bars[(size - low) // width] += count
    return tuple(
        SizeBin(low=low + i * width, high=min(high, low + (i + 1) * width - 1), requests=bars[i])
        for i in range((high - low) // width + 1)
    )


def _scalar_mix(name: str, values: Sequence[float]) -> ScalarMix:
    counts = Counter(values)
    return ScalarMix(name=name, distinct=len(counts), frequent=tuple(counts.most_common(_FREQUENT)))


def _rates(times: list[float]) -> tuple[float | None, float | None]:
    """Mean arrivals a second, and those in the busiest second that starts at an arrival."""
    if len(times) < 2 or max(times) == min(times):
        return None, None
    ordered = sorted(times)
    peak, first = 0, 0
    for last, at_s in enumerate(ordered):
        while at_s - ordered[first] >= 1:
            first += 1
        peak = max(peak, last - first + 1)
    return (len(ordered) - 1) / (ordered[-1] - ordered[0]), float(peak)
