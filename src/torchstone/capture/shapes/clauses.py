"""Clauses from guards: what the conditions that a trace recorded mean for the declared dims.

torch's guards are many and odd (``(5*s0) % (8*(s0 // 8)) == 0``). What they say together is found by
asking them about every declared size, and said as simply as it can be: ``S % 8 == 0``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchstone.capture.shapes.sweep import Sizes
from torchstone.compat import shapes
from torchstone.compat.sizenames import Names
from torchstone.records import Clause, Dim, WorkloadSpec, factor_and_dim

__all__ = ["Condition", "from_guards", "sizes_of"]

_ENUMERATED = 4096
_SAID = 3
"""Guards that are quoted where no simple condition says what they say together."""


@dataclass(frozen=True)
class Condition:
    """A clause that can be asked."""

    clause: Clause
    """The clause."""
    holds: Callable[[Sizes], bool]
    """Whether these sizes fulfil it."""


def from_guards(spec: WorkloadSpec, guards: list[shapes.Guard]) -> list[Condition]:
    """Clauses that guards make: those of one line about the same dims together, if a size breaks them.

    Guards of values, and of sizes that are no dims, are left out.
    """
    names = Names(spec)
    groups: dict[tuple[str, int, tuple[str, ...]], list[shapes.Guard]] = {}
    for guard in dict.fromkeys(_Hashable(g) for g in guards):
        dims = _dims_of(guard.guard, names)
        if dims:
            where = guard.guard.where
            place = ("", 0) if where is None else (where.file, where.line)
            key = (place[0], place[1], dims)
            groups.setdefault(key, []).append(guard.guard)
    found = [_group(names, dims, own) for (*_, dims), own in groups.items()]
    return _without_repeats(names, list(itertools.chain.from_iterable(found)))


@dataclass(frozen=True, eq=False)
class _Hashable:
    """A guard as a key: by its condition and line."""

    guard: shapes.Guard

    def _key(self) -> tuple[object, ...]:
        where = self.guard.where
        place = None if where is None else (where.file, where.line)
        return (self.guard.code, *sorted(self.guard.sources.items()), place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _dims_of(guard: shapes.Guard, names: Names) -> tuple[str, ...]:
    """Names of the dims in a guard; none where it also speaks of something else."""
    axes = [names.axis(source) for source in guard.sources.values()]
    if not axes or any(axis is None or axis.dim is None for axis in axes):
        return ()
    return tuple(sorted({factor_and_dim(axis.dim)[1] for axis in axes if axis and axis.dim}))


def _values(guard: shapes.Guard, names: Names, sizes: Sizes) -> dict[str, int]:
    """The guard's symbols at these sizes."""
    values = {}
    for symbol, source in guard.sources.items():
        axis = names.axis(source)
        if axis is not None and axis.dim is not None:
            factor, dim = factor_and_dim(axis.dim)
            values[symbol] = factor * sizes[dim]
    return values


def _group(names: Names, dims: tuple[str, ...], guards: list[shapes.Guard]) -> list[Condition]:
    """Clauses of the guards of one line about the same dims; none where every size fulfils them."""

    def holds(sizes: Sizes) -> bool:
        return all(g.holds(_values(g, names, sizes)) is not False for g in guards)

    known = [dim for dim in map(names.dim, dims) if dim is not None]
    domain = [dict(zip(dims, sizes, strict=True)) for sizes in _grid(known)]
    allowed = [sizes for sizes in domain if holds(sizes)]
    if len(allowed) == len(domain):
        return []
    parts: list[tuple[str, Callable[[Sizes], bool]]] = []
    if len(dims) == 1:
        dim = known[0]
        parts = _parts(dim, [s[dim.name] for s in allowed], [s[dim.name] for s in domain])
    if not parts:
        breaking = [g for g in guards if any(g.holds(_values(g, names, s)) is False for s in domain)]
        said = {_stripped(names.plain(g.code, g.sources)[0]) for g in breaking}
        parts = [(" and ".join(sorted(said, key=len)[:_SAID]), holds)]
    where = guards[0].where
    return [
        Condition(Clause(text=text, dims=dims, where=where, proof="guard", model=False), part)
        for text, part in parts
    ]


def sizes_of(dim: Dim) -> list[int]:
    """Every size of a dim; of more than 4096, those at both ends."""
    whole = range(dim.low, dim.high + 1, dim.multiple)
    half = _ENUMERATED // 2
    return [*whole] if len(whole) <= _ENUMERATED else [*whole[:half], *whole[-half:]]


def _grid(dims: list[Dim]) -> Iterable[tuple[int, ...]]:
    """Every size of one dim; some of several, crossed."""
    if len(dims) == 1:
        return [(size,) for size in sizes_of(dims[0])]
    count = max(2, round(_ENUMERATED ** (1 / len(dims)) / 4))
    some = [sizes_of(dim) for dim in dims]
    return itertools.product(*(sizes[:: max(1, len(sizes) // count)] for sizes in some))


def _stripped(text: str) -> str:
    """``(C) == (B)`` as ``B == C``."""
    while text.startswith("(") and text.endswith(")") and "(" not in text[1:-1]:
        text = text[1:-1]
    left, equal, right = text.partition(" == ")
    tie = equal and left.isidentifier() and right.isidentifier()
    return " == ".join(sorted((left, right))) if tie else text


def _parts(dim: Dim, allowed: list[int], domain: list[int]) -> list[tuple[str, Callable[[Sizes], bool]]]:
    """The allowed sizes as simple conditions; none where they are not simple."""
    name = dim.name
    if len(allowed) == 1:
        only = allowed[0]
        return [(f"{name} == {only}", lambda sizes: sizes[name] == only)]
    if not allowed:
        return []
    low, high = allowed[0], allowed[-1]
    step = math.gcd(*(n - low for n in allowed[1:]))
    if [n for n in domain if low <= n <= high and (n - low) % step == 0] != allowed:
        refused = sorted(set(domain) - set(allowed))
        if len(refused) > 1:
            return []
        return [(f"{name} != {refused[0]}", lambda sizes: sizes[name] != refused[0])]
    parts: list[tuple[str, Callable[[Sizes], bool]]] = []
    if low - step >= domain[0]:
        parts.append((f"{name} >= {low}", lambda sizes: sizes[name] >= low))
    if high + step <= domain[-1]:
        parts.append((f"{name} <= {high}", lambda sizes: sizes[name] <= high))
    if step > dim.multiple:
        text = f"{name} % {step} == {low % step}"
        parts.append((text, lambda sizes: (sizes[name] - low) % step == 0))
    return parts


def _without_repeats(names: Names, conditions: list[Condition]) -> list[Condition]:
    """Without those that earlier ones imply: what one line needs, the lines after it need, too."""
    kept: list[Condition] = []
    for condition in conditions:
        dims = condition.clause.dims
        same = [k for k in kept if k.clause.dims == dims]
        known = [dim for dim in map(names.dim, dims) if dim is not None]
        sizes = (dict(zip(dims, grid, strict=True)) for grid in _grid(known))
        if any(not condition.holds(s) and all(k.holds(s) for k in same) for s in sizes):
            kept.append(condition)
    return kept
