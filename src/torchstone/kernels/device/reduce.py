"""Reductions and arg-reductions of rows; long rows by several programs, merged by a second launch."""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913
# Triton has no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchstone.kernels.base import Rows, multiprocessors, numbers
from torchstone.kernels.device.common import locate, tiles
from torchstone.kernels.device.softmax import divided
from torchstone.records.tuning import Config


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def identity(KIND: tl.constexpr):
    """What changes nothing."""
    if KIND == "sum":
        value = 0.0
    elif KIND == "prod":
        value = 1.0
    elif KIND == "amin":
        value = float("inf")
    else:
        value = -float("inf")
    return value


@triton.jit
def combine(a, b, KIND: tl.constexpr):
    """Of two values, element by element; NaN stays."""
    if KIND == "sum":
        value = a + b
    elif KIND == "prod":
        value = a * b
    elif KIND == "amin":
        value = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        value = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return value


@triton.jit
def along(value, KIND: tl.constexpr):
    """Of each row of a tile, [ROWS]; NaN stays."""
    if KIND == "sum":
        found = tl.sum(value, 1)
    elif KIND == "prod":
        found = tl.reduce(value, 1, _times)
    else:
        nan = tl.max((value != value).to(tl.int32), 1) > 0
        if KIND == "amin":
            found = tl.min(tl.where(value != value, float("inf"), value), 1)
        else:
            found = tl.max(tl.where(value != value, -float("inf"), value), 1)
        found = tl.where(nan, float("nan"), found)
    return found


@triton.jit(do_not_specialize=["outer"])
def _reduce(
    x, y, outer, n, inner, so, sn, si, yo, each, count,
    KIND: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    lane = tl.arange(0, BLOCK)
    found = tl.full([ROWS, BLOCK], identity(KIND), tl.float32)
    for start in tl.range(split * each, min(n, (split + 1) * each), BLOCK, num_stages=STAGES):
        col = start + lane
        mask = live[:, None] & (col < n)[None, :]
        value = tl.load(x + at[:, None] + col.to(tl.int64)[None, :] * sn, mask, other=identity(KIND))
        found = combine(found, value.to(tl.float32), KIND)
    total = along(found, KIND) / count
    tl.store(y + to + split.to(tl.int64) * inner, total.to(y.dtype.element_ty), live)


@triton.jit
def _best(top, index, ABSENT: tl.constexpr):
    """Largest value of each row, and its first place; NaN is the largest. Lanes without any are
    ABSENT.
    """
    nan = (top != top) & (index != ABSENT)
    any_nan = tl.max(nan.to(tl.int32), 1)[:, None] > 0
    most = tl.max(tl.where(top != top, -float("inf"), top), 1)[:, None]
    candidate = tl.where(any_nan, nan, top == most) & (index != ABSENT)
    first = tl.min(tl.where(candidate, index, ABSENT), 1)[:, None]
    return tl.where(any_nan, float("nan"), most), first


@triton.jit(do_not_specialize=["outer"])
def _arg(
    x, values, places, outer, n, inner, so, sn, si, yo, each,
    SIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    lane = tl.arange(0, BLOCK)
    top = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    index = tl.full([ROWS, BLOCK], 2147483647, tl.int32)
    for start in tl.range(split * each, min(n, (split + 1) * each), BLOCK, num_stages=STAGES):
        col = start + lane
        mask = live[:, None] & (col < n)[None, :]
        value = tl.load(x + at[:, None] + col.to(tl.int64)[None, :] * sn, mask, other=0.0)
        value = value.to(tl.float32) * SIGN
        better = (value > top) | ((value != value) & (top == top)) | (index == 2147483647)
        top = tl.where(mask & better, value, top)
        index = tl.where(mask & better, col[None, :], index)
    most, first = _best(top, index, 2147483647)
    to = to[:, None] + split.to(tl.int64) * inner
    tl.store(values + to, (most * SIGN).to(values.dtype.element_ty), live[:, None])
    tl.store(places + to, first.to(places.dtype.element_ty), live[:, None])


@triton.jit(do_not_specialize=["outer"])
def _arg_merge(
    part_values, part_places, values, places, outer, inner, splits,
    SIGN: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at, live = locate(tile, outer, inner, splits.to(tl.int64) * inner, 1, ROWS, INNER)
    to, live = locate(tile, outer, inner, inner, 1, ROWS, INNER)
    part = tl.arange(0, SPLITS)[None, :]
    mask = live[:, None] & (part < splits)
    here = at[:, None] + part.to(tl.int64) * inner
    top = tl.load(part_values + here, mask, other=0.0) * SIGN
    most, first = _best(top, tl.load(part_places + here, mask, other=2147483647), 2147483647)
    tl.store(values + to[:, None], (most * SIGN).to(values.dtype.element_ty), live[:, None])
    tl.store(places + to[:, None], first.to(places.dtype.element_ty), live[:, None])


def run(config: Config, rows: Rows, y: torch.Tensor, kind: str, count: float) -> None:
    """Write what each row comes to, divided by ``count``, to ``y``: contiguous, outer x inner."""
    x, outer, n, inner, (so, sn, si) = rows
    each, block, warps, stages = numbers(config, "rows", "block", "warps", "stages")
    number, wide = tiles(outer, inner, each), inner > 1
    length, splits = n, 1
    if config["way"] == "split":
        length, splits = divided(n, block, number, multiprocessors(x.device))
    last = splits == 1
    out = y if last else torch.empty((outer, splits, inner), dtype=torch.float32, device=x.device)
    sizes = (outer, n, inner, so, sn, si, splits * inner, length, count if last else 1.0)
    _reduce[(number, splits)](x, out, *sizes, kind, each, block, wide, stages, num_warps=warps)
    if not last:
        few = min(triton.next_power_of_2(splits), 128)
        each = min(each, 64)
        sizes = (outer, splits, inner, splits * inner, inner, 1, inner, splits, count)
        _reduce[(tiles(outer, inner, each),)](out, y, *sizes, kind, each, few, wide, 1, num_warps=4)


def run_arg(config: Config, rows: Rows, values: torch.Tensor, places: torch.Tensor, least: bool) -> None:
    """Write the largest (or least) value of each row and its first place, int64: contiguous, outer x
    inner.
    """
    x, outer, n, inner, (so, sn, si) = rows
    each, block, warps, stages = numbers(config, "rows", "block", "warps", "stages")
    number, wide, sign = tiles(outer, inner, each), inner > 1, -1.0 if least else 1.0
    length, splits = n, 1
    if config["way"] == "split":
        length, splits = divided(n, block, number, multiprocessors(x.device))
    outs = (values, places)
    if splits > 1:
        shape = (outer, splits, inner)
        outs = (
            torch.empty(shape, dtype=torch.float32, device=x.device),
            torch.empty(shape, dtype=torch.int32, device=x.device),
        )
    sizes = (outer, n, inner, so, sn, si, splits * inner, length)
    _arg[(number, splits)](x, *outs, *sizes, sign, each, block, wide, stages, num_warps=warps)
    if splits > 1:
        few = triton.next_power_of_2(splits)
        each = min(each, max(1, 4096 // few))
        grid = (tiles(outer, inner, each),)
        _arg_merge[grid](*outs, values, places, outer, inner, splits, sign, each, wide, few, num_warps=4)
