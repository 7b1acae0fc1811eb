"""Verification inputs as descriptions: which sizes, values, layouts and protocols to try.

:func:`cases` is pure and loads no torch, so the main process can list what will be tried.
:func:`materialize` makes the tensors, the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from torchstone.records import Arrival, Case, Dim, ScalarSpec, TensorSpec, WorkloadSpec

if TYPE_CHECKING:
    from torchstone.workload import Workload

__all__ = ["BEYOND", "cases", "largest", "materialize"]

BEYOND = ("large", "mixed")
"""Ways to fill floats that leave the example's magnitudes, where no range is stated."""

_TRAFFIC_CAP = 4
_SEEDS_PER_CASE = 1000
Sizes = dict[str, int]


def cases(spec: WorkloadSpec, seed: int) -> tuple[Case, ...]:
    """Every verification case of a workload: about 13 without dims, 25 with two.

    The example comes first. Names are unique, sizes lie in the dims' ranges and respect ``multiple``.
    The costly case, every dim at its largest, is there once. What changes module state comes last.

    :param seed: seed of the run; each case gets its own, derived from it.
    """
    listed = [
        Case(name="example", kind="example", sizes=spec.example_sizes, values="example"),
        *_traffic_cases(spec),
        *_dims_cases(spec),
        *_values_cases(spec),
        *_handling_cases(spec),
    ]
    base = seed * _SEEDS_PER_CASE
    return tuple(
        Case(
            name=c.name,
            kind=c.kind,
            sizes=c.sizes,
            values=c.values,
            layout=c.layout,
            protocol=c.protocol,
            scalars=c.scalars,
            seed=base + position,
        )
        for position, c in enumerate(listed)
    )


def largest(spec: WorkloadSpec) -> Case:
    """The costly case: every dim at its largest."""
    return Case(
        name="dims-high",
        kind="dims",
        sizes={d.name: _high(d) for d in spec.dims},
        scalars={s.name: s.high for s in _scalars(spec)},
    )


def materialize(workload: Workload, case: Case) -> tuple[Any, ...]:
    """Make a case's inputs, positional; the same values in every process.

    The ``example`` case is the workload's example itself. Everything else comes from the workload's
    ``generate``, if given, else from the spec: floats with the example's mean and deviation, integers
    uniform in their range; masks (booleans, and numbers that are 0 or 1) keep the example's pattern
    unless the case probes values, for a random mask often leaves a row with nothing to attend to.

    :raises WorkloadError: where the user's functions fail.
    """
    from torchstone.verify import tensors

    return tensors.make(workload, tensors.Source(workload.spec(), workload.example()), case)


def _traffic_cases(spec: WorkloadSpec) -> Iterator[Case]:
    for position, arrival in enumerate(_distinct(spec)):
        yield Case(
            name=f"traffic-{position}",
            kind="traffic",
            sizes=arrival.sizes,
            scalars=arrival.scalars,
        )


def _distinct(spec: WorkloadSpec) -> list[Arrival]:
    """The largest recorded shape and a few others, spread over what was recorded; not the example's."""
    seen: dict[tuple[object, ...], Arrival] = {}
    for arrival in spec.traffic:
        key = (*sorted(arrival.sizes.items()), *sorted(arrival.scalars.items()))
        if arrival.sizes != spec.example_sizes or arrival.scalars:
            seen.setdefault(key, arrival)
    ordered = sorted(seen.values(), key=lambda a: math.prod(a.sizes.values()))
    if len(ordered) <= _TRAFFIC_CAP:
        return ordered
    step = (len(ordered) - 1) / (_TRAFFIC_CAP - 1)
    return [ordered[round(i * step)] for i in range(_TRAFFIC_CAP)]


def _dims_cases(spec: WorkloadSpec) -> Iterator[Case]:
    low = Case(
        name="dims-low",
        kind="dims",
        sizes={d.name: _low(d) for d in spec.dims},
        scalars={s.name: s.low for s in _scalars(spec)},
    )
    high = largest(spec)
    if low.sizes or low.scalars != high.scalars:
        yield low
    seen = [low.sizes, high.sizes]
    for name, sizes in _between(spec, low.sizes, high.sizes):
        if sizes not in seen:
            seen.append(sizes)
            yield Case(name=f"dims-{name}", kind="dims", sizes=sizes)
    if (low.sizes, low.scalars) != (high.sizes, high.scalars):
        yield high


def _between(spec: WorkloadSpec, low: Sizes, high: Sizes) -> Iterator[tuple[str, Sizes]]:
    dims = spec.dims
    for dim in dims:
        yield f"{dim.name}-low", {**high, dim.name: low[dim.name]}
    for dim in dims:
        for size, word in ((0, "zero"), (1, "one")):
            if _has(dim, size):
                yield f"{dim.name}-{word}", {**spec.example_sizes, dim.name: size}
    yield "odd", {d.name: _prime(d, (1, 2)[i % 2] / 3) for i, d in enumerate(dims)}
    yield "odd-again", {d.name: _prime(d, (2, 1)[i % 2] / 3) for i, d in enumerate(dims)}
    yield "inside", {d.name: _inside(d, from_high=i % 2 == 0) for i, d in enumerate(dims)}


def _values_cases(spec: WorkloadSpec) -> Iterator[Case]:
    floats = [i for i in spec.inputs if isinstance(i, TensorSpec) and not _integral(i.dtype)]
    modes = ["random", "random-again", "zeros", "ties", "tiny"]
    if any(i.low is not None for i in floats):
        modes += ["low", "high"]
    if not floats or any(i.low is None for i in floats):
        modes += BEYOND
    for mode in modes:
        yield Case(
            name=f"values-{mode}",
            kind="values",
            sizes=spec.example_sizes,
            values=mode.removesuffix("-again"),
        )


def _handling_cases(spec: WorkloadSpec) -> Iterator[Case]:
    """How inputs lie in memory, and how the callable is driven, on the example's values."""
    layouts: tuple[Literal["strided", "offset"], ...] = ("strided", "offset")
    for layout in layouts:
        yield Case(
            name=f"layout-{layout}",
            kind="layout",
            sizes=spec.example_sizes,
            values="example",
            layout=layout,
        )
    protocols: tuple[Literal["repeat", "hold", "mutate", "perturb"], ...] = ("repeat", "hold", "mutate")
    for protocol in (*protocols, "perturb") if spec.perturbs else protocols:
        yield Case(
            name=f"protocol-{protocol}",
            kind="protocol",
            sizes=spec.example_sizes,
            values="example",
            protocol=protocol,
        )


def _scalars(spec: WorkloadSpec) -> Iterable[ScalarSpec]:
    return (i for i in spec.inputs if isinstance(i, ScalarSpec))


def _integral(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def _low(dim: Dim) -> int:
    """The smallest size that is a multiple."""
    return -(-dim.low // dim.multiple) * dim.multiple


def _high(dim: Dim) -> int:
    return dim.high // dim.multiple * dim.multiple


def _has(dim: Dim, size: int) -> bool:
    return _low(dim) <= size <= _high(dim) and size % dim.multiple == 0


def _prime(dim: Dim, fraction: float) -> int:
    """A prime number of multiples near a point of the range, in the logarithm; the top where none is."""
    first, last = _low(dim) // dim.multiple, _high(dim) // dim.multiple
    target = round(max(first, 1) * (max(last, 1) / max(first, 1)) ** fraction)
    outwards = (target + sign * step for step in range(last - first + 1) for sign in (-1, 1))
    odd = (n for n in outwards if max(first, 3) <= n <= last and _is_prime(n))
    return next(odd, last) * dim.multiple


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def _inside(dim: Dim, *, from_high: bool) -> int:
    """One step inside an end, where kernels that special-case the end, or a power of two, differ."""
    size = _high(dim) - dim.multiple if from_high else _low(dim) + dim.multiple
    return size if _has(dim, size) else _low(dim)
