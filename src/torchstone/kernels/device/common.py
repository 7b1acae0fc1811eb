"""Where the elements of a tile are."""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913
# Triton has no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(tile, outer, inner, so, si, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Offsets of a tile's rows, int64, and which of the rows exist.

    With INNER the rows of a tile are neighbours in memory, else they follow each other by ``so``.
    """
    lane = tl.arange(0, ROWS)
    if INNER:
        tiles = tl.cdiv(inner, ROWS)
        at = (tile % tiles) * ROWS + lane
        live = at < inner
        offset = (tile // tiles).to(tl.int64) * so + at.to(tl.int64) * si
    else:
        at = tile.to(tl.int64) * ROWS + lane
        live = at < outer
        offset = at * so
    return offset, live


def tiles(outer: int, inner: int, rows: int) -> int:
    """How many tiles :func:`locate` can tell apart."""
    return outer * -(-inner // rows) if inner > 1 else -(-outer // rows)


@triton.jit
def activate(value, ACT: tl.constexpr):
    """An activation of float32 values, by the name that PyTorch has for it."""
    if ACT == "relu":
        value = tl.where(value < 0, 0.0, value)
    elif ACT == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACT == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif ACT == "sigmoid":
        value = 1.0 / (1.0 + tl.exp(-value))
    elif ACT == "tanh":
        value = 2.0 / (1.0 + tl.exp(-2.0 * value)) - 1.0
    else:
        tl.static_assert(ACT == "none")
    return value
