"""At which sizes a model is executed. Pure.

An unstated dim may be any size, so the model only has to run at *some*; a stated one has to run at both
ends of its range and in between. Sizes are odd and unlike each other where they may be, so that two dims
that are mixed up do not fit by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchstone.records import Dim
from torchstone.shapecheck.entries import FreeDim

__all__ = ["ends", "generic", "others"]

_LEADING = (5, 7, 11, 13)
_GENERIC = (37, 41, 43, 47, 53, 59)
_OTHERS: tuple[tuple[int, ...], ...] = (
    (32, 48, 80, 96),
    (7, 9, 13, 15),
    (64, 96, 160, 192),
    (32,),
    (224,),
    (128,),
    (16,),
)
"""Sizes that models are made for: multiples of powers of two, short, and square ones."""


_MOST = 4096
"""Sizes of a range that are looked at."""


def generic(dims: Sequence[FreeDim]) -> dict[str, int]:
    """Sizes that tell nothing special: distinct, odd where they may be."""
    leading, inner = iter(_LEADING), iter(_GENERIC)
    taken: set[int] = set()
    sizes = {}
    for dim in dims:
        usual = next(leading, 17) if dim.leading else next(inner, 61)
        wanted = dim.usual or usual
        size = wanted if dim.stated is None else _inside(dim.stated, wanted, taken)
        sizes[dim.name] = size
        taken.add(size)
    return sizes


def others(dims: Sequence[FreeDim]) -> Iterator[dict[str, int]]:
    """Further sizes to try where the generic ones fail: other ones of the unstated dims."""
    free = [dim.name for dim in dims if dim.stated is None and dim.usual is None and not dim.leading]
    if not free:
        return
    first = generic(dims)
    for row in _OTHERS:
        yield {**first, **{name: row[i % len(row)] for i, name in enumerate(free)}}


def ends(dims: Sequence[FreeDim]) -> Iterator[dict[str, int]]:
    """The ends of the stated ranges: all low, all high."""
    stated = {dim.name: dim.stated for dim in dims if dim.stated is not None}
    if not stated:
        return
    first = generic(dims)
    yield {**first, **{name: dim.low for name, dim in stated.items()}}
    yield {**first, **{name: dim.high for name, dim in stated.items()}}


def _inside(dim: Dim, wanted: int, taken: Iterable[int]) -> int:
    """A size in a stated range: the closest to the wanted one that is odd and not taken."""
    step = dim.multiple
    choices = range(dim.low, dim.high + 1, step)
    near = sorted(choices[:_MOST], key=lambda n: abs(n - wanted))
    fresh = [n for n in near if n not in taken and n >= 2]
    odd = [n for n in fresh if n // step % 2]
    return next(iter(odd or fresh or near))
