"""Sizes where programs break, and running a model and what was made of it on them.

Nothing here judges: :mod:`~torchstone.capture.shapes.contract` compares a program with the model,
:mod:`~torchstone.capture.shapes.ladder` a compiled one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from torchstone.capture import export
from torchstone.compat import shapes
from torchstone.records import Case, Dim, WorkloadSpec
from torchstone.verify import tensors
from torchstone.workload import Workload

__all__ = [
    "TOLERANCE",
    "Bench",
    "Inquiry",
    "Ran",
    "Sizes",
    "difference",
    "kept",
    "moving",
    "settled",
    "sweep",
]

Sizes = dict[str, int]
"""Size of every named dim."""
TOLERANCE = 1e-3
"""Of the largest magnitude of an output: what runs are the model's own operations (see ``ends``)."""


@dataclass(frozen=True)
class Ran:
    """What one call gave."""

    leaves: list[Any] | None
    """The outputs, flat; None where it raised."""
    error: BaseException | None = None
    """What it raised."""


@dataclass(frozen=True)
class Bench:
    """Makes inputs of given sizes and runs functions on them, undoing what they change."""

    workload: Workload
    """The workload."""
    source: tensors.Source
    """Its example, made once."""

    @classmethod
    def of(cls, workload: Workload) -> Bench:
        """For this workload."""
        return cls(workload, tensors.Source(workload.spec(), workload.example()))

    def inputs(self, sizes: Sizes) -> tuple[Any, ...]:
        """Inputs of these sizes, contiguous."""
        case = Case(name="shapes", kind="dims", sizes=sizes)
        made = tensors.make(self.workload, self.source, case)
        return tuple(v.contiguous() if isinstance(v, torch.Tensor) else v for v in made)

    def run(
        self,
        function: Any,
        args: tuple[Any, ...],
        *,
        prepare: Callable[[tuple[Any, ...]], None] | None = None,
        owner: nn.Module | None = None,
    ) -> Ran:
        """Call it on copies; buffers are put back, and random numbers are the same each time.

        :param prepare: is given the copies first, to mark sizes.
        :param owner: whose buffers it changes, where it is no module itself.
        """
        given = tensors.copies(args)
        if prepare is not None:
            prepare(given)
        state = function if isinstance(function, nn.Module) else owner
        try:
            with kept(state), torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return Ran(list(_pytree.tree_leaves(function(*given))))
        except shapes.call_errors() as error:
            return Ran(None, error)


@contextlib.contextmanager
def kept(module: nn.Module | None) -> Iterator[None]:
    """Put the module's buffers back afterwards, in place."""
    buffers = {} if module is None else dict(module.named_buffers())
    before = {name: value.clone() for name, value in buffers.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                buffers[name].copy_(value)


class Inquiry:
    """What a contract and a ladder have in common: a subject, and a time that ends."""

    bench: Bench
    deadline: float
    not_tried: list[str]

    @property
    def spec(self) -> WorkloadSpec:
        """The workload's description."""
        return self.bench.workload.spec()

    @property
    def dims(self) -> list[Dim]:
        """Its dims that vary."""
        return moving(self.spec)

    def late(self, what: str) -> bool:
        """Whether the time is over; then ``what`` is listed as not tried."""
        over = time.perf_counter() > self.deadline
        if over:
            self.not_tried.append(what)
        return over


def difference(expected: list[Any], found: list[Any]) -> float:
    """Largest absolute difference over the largest magnitude, of the worst output.

    Infinite where shapes, dtypes, or what is finite differ, and for any difference of integers.
    """
    if len(expected) != len(found):
        return math.inf
    return max((_apart(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)


def _apart(a: Any, b: Any) -> float:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return 0.0 if type(a) is type(b) and bool(a == b) else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.is_floating_point() and not a.is_complex():
        return 0.0 if torch.equal(a, b) else math.inf
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    worst = float((a[finite] - b[finite]).abs().max())
    return worst / (float(a[finite].abs().max()) or 1.0)


def moving(spec: WorkloadSpec) -> list[Dim]:
    """The dims that have more than one size."""
    return [dim for dim in spec.dims if dim.high > dim.low]


def settled(bench: Bench, module: nn.Module) -> Sizes:
    """Sizes to start from, that the model takes: 2 or more, and distinct where it takes such.

    Dims that the model ties are equal in the example, and it takes no others.
    """
    spec = bench.workload.spec()
    inner = export.inner_sizes(spec)
    for sizes in (
        inner,
        spec.example_sizes,
        {**inner, **dict.fromkeys(inner, max(inner.values(), default=0))},
    ):
        inside = all(_has(dim, sizes[dim.name]) for dim in spec.dims)
        traceable = all(sizes[dim.name] > 1 for dim in moving(spec) if dim.high > 1)
        if inside and traceable and bench.run(module, bench.inputs(sizes)).leaves is not None:
            return sizes
    return inner


def sweep(spec: WorkloadSpec, base: Sizes, edges: dict[str, list[int]] | None = None) -> Iterator[Sizes]:
    """Sizes where programs break: around ``base``, one dim at a time, pairs of equal ones, then traffic.

    :param edges: sizes to try first of each dim, such as both sides of a bound that a guard states.
    """
    seen: list[Sizes] = []
    for sizes in _ordered(spec, base, edges or {}):
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def _ordered(spec: WorkloadSpec, base: Sizes, edges: dict[str, list[int]]) -> Iterator[Sizes]:
    yield base
    dims = moving(spec)
    telling = [
        [{**base, d.name: n} for n in _telling(d, [*edges.get(d.name, []), *_recorded(spec, d)])]
        for d in dims
    ]
    for turn in itertools.zip_longest(*telling):  # the time may end: every dim has its turns
        yield from (sizes for sizes in turn if sizes is not None)
    for a, b in itertools.combinations(dims, 2):
        for n in (1, base[a.name], base[b.name], min(a.high, b.high)):
            if _has(a, n) and _has(b, n):
                yield {**base, a.name: n, b.name: n}
    yield {d.name: d.low for d in spec.dims}
    yield from (arrival.sizes for arrival in spec.traffic)


def _telling(dim: Dim, first: Iterable[int]) -> list[int]:
    """Sizes of one dim, most telling first: ends, 0, 1, 2, odd ones, powers of two with neighbours."""
    middle = (dim.low + dim.high) // 2
    odd = next((n for n in range(max(middle, 3) | 1, dim.high + 1, 2) if n % 3 and n % 5), dim.high)
    usual = [dim.low, 1, 0, dim.high, 2, dim.high - 1, odd, 7, 8, 9, 16, 15, 17, 64, 63, 65, middle]
    usual += [n * dim.multiple for n in (1, 2, 3, 7, 8)] + [dim.high - dim.multiple]
    return [n for n in dict.fromkeys([*first, *usual]) if _has(dim, n)]


def _recorded(spec: WorkloadSpec, dim: Dim) -> list[int]:
    return list(dict.fromkeys(arrival.sizes[dim.name] for arrival in spec.traffic))[:4]


def _has(dim: Dim, size: int) -> bool:
    return dim.low <= size <= dim.high and size % dim.multiple == 0
