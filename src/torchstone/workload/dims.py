"""The grammar of named dims, and what can be said of dims and shapes without running anything."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from typing import NamedTuple

from torchstone.errors import WorkloadError
from torchstone.records import Dim, factor_and_dim

__all__ = ["Problem", "Shape", "did_you_mean", "dims_problem", "parse_dim", "size_problem"]

Shape = tuple[int | str, ...]
"""Fixed sizes, names of dims, and multiples of them: ``"5*b"``."""

DEFAULT_MULTIPLES = 64
"""``"16*k"`` without a range reaches up to 16 times this."""
RESERVED = "at"
"""Names the arrival time in traffic files, so that no dim can have it."""
GRAMMAR = "write '1..64', '16*k', '16*k, 32..512' or one fixed size"

_RANGE = r"(?P<low>-?\d+)\s*\.\.\s*(?P<high>-?\d+)"
_DIM = re.compile(rf"\s*(?:(?P<multiple>\d+)\s*\*\s*k\s*(?:,\s*{_RANGE})?)\s*\Z")
_SIZE = re.compile(r"\s*(?:[1-9]\d*\s*\*\s*)?[^\W\d]\w*\s*\Z")
_PLAIN = re.compile(rf"\s*(?:{_RANGE}|(?P<fixed>-?\d+))\s*\Z")


class Problem(NamedTuple):
    """Something wrong with a workload; whoever raises it knows the file."""

    keys: tuple[str, ...]
    """Where in ``torchstone.toml`` it would be written: ``("inputs", "x", "shape")``."""
    what: str
    """What is wrong."""
    hint: str | None = None
    """What to do about it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest of the known names, or all of them."""
    names = tuple(known)
    folded = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    return f"known are {', '.join(names)}" if names else "none are known here"


def parse_dim(name: str, text: str | int | Dim) -> Dim:
    """Read the range of one named dim.

    :param name: the dim's name, a Python identifier.
    :param text: ``"1..64"`` (both ends included); ``"16*k"``, the multiples of 16 from 16 to 16 * 64;
        ``"16*k, 32..512"``, those within a range; ``64`` or ``"64"``, one fixed size; or a ``Dim``.
    :returns: the dim; with a multiple, its ends are multiples themselves.
    :raises WorkloadError: where the name, the text or the range is no good.
    """
    if not name.isidentifier() or iskeyword(name) or name == RESERVED:
        raise WorkloadError(
            f"dim name {name!r} cannot be used",
            hint=f"a dim's name is a Python identifier, such as B or seq_len, and not {RESERVED!r}",
        )
    if isinstance(text, Dim):
        return _checked(Dim(name=name, low=text.low, high=text.high, multiple=text.multiple), str(text))
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise WorkloadError(f"dim {name} = {text!r} is no range", hint=GRAMMAR)
    if isinstance(text, int):
        return _checked(Dim(name=name, low=text, high=text), str(text))
    match = _DIM.match(text) or _PLAIN.match(text)
    if match is None:
        raise WorkloadError(f"dim {name} = {text!r} is no range", hint=GRAMMAR)
    part = match.groupdict()
    if part.get("fixed") is not None:
        return _checked(Dim(name=name, low=int(part["fixed"]), high=int(part["fixed"])), text)
    multiple = int(part["multiple"]) if part.get("multiple") is not None else 1
    low = int(part["low"]) if part["low"] is not None else multiple
    high = int(part["high"]) if part["high"] is not None else multiple * DEFAULT_MULTIPLES
    return _checked(Dim(name=name, low=low, high=high, multiple=multiple), text)


def _checked(dim: Dim, text: str) -> Dim:
    if dim.multiple < 1:
        raise WorkloadError(f"dim {dim.name} = {text!r}: the multiple must be 1 or more", hint=GRAMMAR)
    if dim.low < 0:
        raise WorkloadError(
            f"dim {dim.name} = {text!r} has a negative size", hint="the smallest size is 0"
        )
    if dim.low > dim.high:
        raise WorkloadError(
            f"dim {dim.name} = {text!r} is empty: {dim.low} is above {dim.high}",
            hint=f"write the smaller size first: '{dim.high}..{dim.low}'",
        )
    low = -(-dim.low // dim.multiple) * dim.multiple
    high = dim.high // dim.multiple * dim.multiple
    if low > high:
        raise WorkloadError(
            f"dim {dim.name} = {text!r} is empty: no multiple of {dim.multiple} in it",
            hint=f"widen the range to hold one, such as {low}",
        )
    return Dim(name=dim.name, low=low, high=high, multiple=dim.multiple)


def size_problem(dim: Dim, size: int) -> str | None:
    """Why a size does not fit a dim, or None where it does."""
    if not dim.low <= size <= dim.high:
        return f"{dim.name} = {size} is outside {dim.low}..{dim.high}"
    if size % dim.multiple:
        return f"{dim.name} = {size} is no multiple of {dim.multiple}"
    return None


def dims_problem(
    dims: tuple[Dim, ...], shapes: Mapping[str, Shape], ranges: Mapping[str, tuple[float, float]]
) -> Problem | None:
    """The first disagreement between dims, shapes and ranges, or None."""
    names = [dim.name for dim in dims]
    used: set[str] = set()
    for argument, shape in shapes.items():
        problem = _shape_problem(argument, shape, names)
        if problem is not None:
            return problem
        used.update(factor_and_dim(size)[1] for size in shape if isinstance(size, str))
    for name in names:
        if names.count(name) > 1:
            return Problem(("dims", name), f"dim {name!r} is declared twice")
        if name not in used:
            hint = "name it in the shape of an input ([inputs.NAME] shape = [...]), or remove it"
            return Problem(("dims", name), f"dim {name!r} is in no input's shape", hint)
    for argument, (low, high) in ranges.items():
        if not low <= high:
            what = f"input {argument!r}: low = {low:g} is above high = {high:g}"
            return Problem(("inputs", argument, "low"), what, "write the smaller value as low")
    return None


def _shape_problem(argument: str, shape: Shape, names: list[str]) -> Problem | None:
    keys = ("inputs", argument, "shape")
    for size in shape:
        if isinstance(size, str) and not _SIZE.match(size):
            what = f"input {argument!r}: {size!r} is no size"
            return Problem(keys, what, "write a dim's name, a multiple of it ('5*b'), or a number")
        if isinstance(size, str) and factor_and_dim(size)[1] not in names:
            name = factor_and_dim(size)[1]
            what = f"input {argument!r}: dim {name!r} is not declared"
            return Problem(keys, what, f"declare it under [dims]; {did_you_mean(name, names)}")
        if not isinstance(size, str) and (isinstance(size, bool) or size < 0):
            what = f"input {argument!r}: {size!r} is no size"
            return Problem(keys, what, "a size is a dim's name or a number from 0 up")
    return None
