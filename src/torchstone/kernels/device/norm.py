"""Normalization of rows by their mean and variance, or by their mean square.

Variances are about the mean: of whole rows on chip in two steps, of rows in blocks by a running mean
and sum of squares a lane (Welford, 1962), lanes and programs merged as in Chan et al., "Updating
formulae and a pairwise algorithm for computing sample variances", 1979. Nothing is lost by a large mean.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913
# Triton has no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torchstone.kernels.base import multiprocessors, numbers, power
from torchstone.kernels.device.common import activate, locate, tiles
from torchstone.kernels.device.softmax import divided
from torchstone.records.tuning import Config


@triton.jit
def _columns(start, n, sn, plane, sp, BLOCK: tl.constexpr, BS: tl.constexpr):
    """Offsets of a block of a row's elements, int64 [1, BLOCK], which exist, and their places in the
    row.

    With BS a row is ``n`` planes of ``plane`` elements, and a block is BLOCK // BS pieces of planes.
    """
    lane = tl.arange(0, BLOCK)
    if BS:
        across = tl.cdiv(plane, BS)
        tile = start // BLOCK
        one = (tile // across) * (BLOCK // BS) + lane // BS
        col = (tile % across) * BS + lane % BS
        exists = (one < n) & (col < plane)
        offset = one.to(tl.int64) * sn + col.to(tl.int64) * sp
    else:
        col = start + lane
        exists = col < n
        offset = col.to(tl.int64) * sn
    return offset[None, :], exists[None, :], col


@triton.jit
def _none(BLOCK: tl.constexpr, LANES: tl.constexpr):
    """How many values lanes have seen before the first: one number where blocks are whole but for the
    last.
    """
    return tl.zeros([1, BLOCK if LANES else 1], tl.float32)


@triton.jit
def _seen(count, low, high, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """How many values each lane has seen from ``low`` to ``high``, [1, BLOCK]."""
    if LANES:
        found = count
    else:
        found = ((high - low - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK).to(tl.float32)[None, :]
    return found


@triton.jit
def _step(mean, squares, count, value, mask, MEAN: tl.constexpr, LANES: tl.constexpr):
    """One more value a lane, where the mask is set."""
    if MEAN:
        if LANES:
            count += mask.to(tl.float32)
        else:
            count += 1.0
        apart = tl.where(mask, value - mean, 0.0)
        mean += apart / tl.maximum(count, 1.0)
        squares += apart * tl.where(mask, value - mean, 0.0)
    else:
        squares += value * value
    return mean, squares, count


@triton.jit
def _merged(mean, squares, count, total, MEAN: tl.constexpr):
    """Mean and sum of squares about it of rows, [ROWS, 1], from those of their lanes."""
    middle = tl.sum(mean * count, 1)[:, None] / total
    if MEAN:
        apart = tl.where(count > 0, mean - middle, 0.0)
        squares += count * apart * apart
    return middle, tl.sum(squares, 1)[:, None]


@triton.jit
def _affine(
    value, w, b, row, start, col, exists, groups, per, spatial,
    AFFINE: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Weight and bias by a row's place (1), by channel of a group (2), or by row (3).

    A block that lies in one channel (4) has one weight and one bias a row.
    """
    if AFFINE == 1:
        at = tl.where(exists, col[None, :], 0)
    elif AFFINE == 2:
        at = ((row % groups) * per)[:, None] + tl.where(exists, (col // spatial)[None, :], 0)
    elif AFFINE == 4:
        at = ((row % groups) * per)[:, None] + start // spatial
    else:
        at = (row % groups)[:, None]
    if W:
        value *= tl.load(w + at).to(tl.float32)
    if B:
        value += tl.load(b + at).to(tl.float32)
    return value


@triton.jit
def _rows(tile, outer, inner, ROWS: tl.constexpr, INNER: tl.constexpr):
    """Numbers of a tile's rows, int32 [ROWS], 0 for what is no row."""
    lane = tl.arange(0, ROWS)
    if INNER:
        row = (tile % tl.cdiv(inner, ROWS)) * ROWS + lane
        row = tl.where(row < inner, row, 0)
    else:
        row = tile * ROWS + lane
        row = tl.where(row < outer, row, 0)
    return row


@triton.jit(do_not_specialize=["outer", "eps"])
def _chip(
    x, y, w, b, means, variances,
    outer, inner, so, si, yo, n, sn, yn, plane, sp, yp, total, groups, per, spatial, eps,
    MEAN: tl.constexpr, AFFINE: tl.constexpr, W: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    far, exists, col = _columns(0, n, sn, plane, sp, BLOCK, BS)
    mask = live[:, None] & exists
    value = tl.load(x + at[:, None] + far, mask, other=0.0).to(tl.float32)
    if MEAN:
        mean = tl.sum(value, 1)[:, None] / total
        value = tl.where(mask, value - mean, 0.0)
    else:
        mean = tl.zeros([ROWS, 1], tl.float32)
    variance = tl.sum(value * value, 1)[:, None] / total
    row = _rows(tile, outer, inner, ROWS, INNER)
    if KEEP:
        tl.store(means + row[:, None], mean, live[:, None])
        tl.store(variances + row[:, None], variance, live[:, None])
    value = value * tl.rsqrt(variance + eps)
    value = activate(_affine(value, w, b, row, 0, col, exists, groups, per, spatial, AFFINE, W, B), ACT)
    far, exists, col = _columns(0, n, yn, plane, yp, BLOCK, BS)
    tl.store(y + to[:, None] + far, value.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["outer", "eps"])
def _stream(
    x, y, w, b, means, variances,
    outer, inner, so, si, yo, n, sn, yn, plane, sp, yp, total, groups, per, spatial, eps, length,
    MEAN: tl.constexpr, AFFINE: tl.constexpr, W: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr,
    LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    count = _none(BLOCK, LANES)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        far, exists, col = _columns(start, n, sn, plane, sp, BLOCK, BS)
        value = tl.load(x + at[:, None] + far, live[:, None] & exists, other=0.0).to(tl.float32)
        mean, squares, count = _step(mean, squares, count, value, exists, MEAN, LANES)
    count = _seen(count, 0, length, BLOCK, LANES)
    mean, squares = _merged(mean, squares, count, total, MEAN)
    row = _rows(tile, outer, inner, ROWS, INNER)
    if KEEP:
        tl.store(means + row[:, None], mean, live[:, None])
        tl.store(variances + row[:, None], squares / total, live[:, None])
    scale = tl.rsqrt(squares / total + eps)
    last = (length - 1) // BLOCK * BLOCK
    for step in tl.range(0, length, BLOCK, num_stages=STAGES):
        start = last - step  # backwards: what was read last is still in the cache
        far, exists, col = _columns(start, n, sn, plane, sp, BLOCK, BS)
        mask = live[:, None] & exists
        value = (tl.load(x + at[:, None] + far, mask, other=0.0).to(tl.float32) - mean) * scale
        value = activate(
            _affine(value, w, b, row, start, col, exists, groups, per, spatial, AFFINE, W, B), ACT
        )
        far, exists, col = _columns(start, n, yn, plane, yp, BLOCK, BS)
        tl.store(y + to[:, None] + far, value.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["outer"])
def _gather(
    x, parts, outer, inner, so, si, n, sn, plane, sp, total, length, each, splits,
    MEAN: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr,
    LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    count = _none(BLOCK, LANES)
    for start in tl.range(split * each, min(length, (split + 1) * each), BLOCK, num_stages=STAGES):
        far, exists, _ = _columns(start, n, sn, plane, sp, BLOCK, BS)
        value = tl.load(x + at[:, None] + far, live[:, None] & exists, other=0.0).to(tl.float32)
        mean, squares, count = _step(mean, squares, count, value, exists, MEAN, LANES)
    count = _seen(count, split * each, min(length, (split + 1) * each), BLOCK, LANES)
    if LANES:
        seen = tl.sum(count, 1)[:, None]
    else:  # known; adding up what needs no adding up takes more registers than there are
        seen = tl.zeros([1, 1], tl.float32) + (min(length, (split + 1) * each) - split * each)
    mean, squares = _merged(mean, squares, count, tl.maximum(seen, 1.0), MEAN)
    to = ((tile.to(tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)[:, None]) * 3
    tl.store(parts + to, mean)
    tl.store(parts + to + 1, squares)
    tl.store(parts + to + 2, tl.zeros([ROWS, 1], tl.float32) + seen)


@triton.jit(do_not_specialize=["outer", "eps"])
def _apply(
    x, y, w, b, means, variances, parts,
    outer, inner, so, si, yo, n, sn, yn, plane, sp, yp, total, groups, per, spatial, eps, length, each,
    splits,
    MEAN: tl.constexpr, AFFINE: tl.constexpr, W: tl.constexpr, B: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    part = tl.arange(0, SPLITS)[None, :]
    here = ((tile.to(tl.int64) * splits + part) * ROWS + tl.arange(0, ROWS)[:, None]) * 3
    mean = tl.load(parts + here, part < splits, other=0.0)
    squares = tl.load(parts + here + 1, part < splits, other=0.0)
    count = tl.load(parts + here + 2, part < splits, other=0.0)
    mean, squares = _merged(mean, squares, count, total, MEAN)
    row = _rows(tile, outer, inner, ROWS, INNER)
    if KEEP:
        first = live[:, None] & (split == 0)
        tl.store(means + row[:, None], mean, first)
        tl.store(variances + row[:, None], squares / total, first)
    scale = tl.rsqrt(squares / total + eps)
    for start in tl.range(split * each, min(length, (split + 1) * each), BLOCK, num_stages=STAGES):
        far, exists, col = _columns(start, n, sn, plane, sp, BLOCK, BS)
        mask = live[:, None] & exists
        value = (tl.load(x + at[:, None] + far, mask, other=0.0).to(tl.float32) - mean) * scale
        value = activate(
            _affine(value, w, b, row, start, col, exists, groups, per, spatial, AFFINE, W, B), ACT
        )
        far, exists, col = _columns(start, n, yn, plane, yp, BLOCK, BS)
        tl.store(y + to[:, None] + far, value.to(y.dtype.element_ty), mask)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows to normalize, and how."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """Where to write means and variances of the rows, float32."""
    outer: int
    inner: int
    rows: tuple[int, int, int]
    """Strides of rows: outer and inner of ``x``, outer of ``y``, whose inner one is 1."""
    n: int
    """Elements of a row, or its planes."""
    columns: tuple[int, int]
    """Their stride in ``x`` and ``y``."""
    plane: int = 1
    """Elements of a plane."""
    planes: tuple[int, int] | None = None
    """Their stride in ``x`` and ``y``, where a row is planes."""
    affine: int
    """Weight and bias go by place in the row (1), by channel of a group (2), by row (3)."""
    channels: tuple[int, int, int] = (1, 1, 1)
    """Groups (rows that repeat), channels of a group, elements of a channel."""
    eps: float
    mean: bool
    """Subtract the mean."""
    activation: str = "none"


def run(config: Config, p: Problem) -> None:
    """Write the normalized rows, contiguous in ``weight`` and ``bias``."""
    each, block, warps, stages = numbers(config, "rows", "block", "warps", "stages")
    chip = config["way"] == "chip"
    count, wide = tiles(p.outer, p.inner, each), p.inner > 1
    piece = 0
    length = p.n
    if p.planes is not None:
        piece = power(p.plane) if chip else min(power(p.plane), block)
        length = -(-p.n // max(1, block // piece)) * -(-p.plane // piece) * block
    lanes = piece > 0 and (p.n % max(1, block // piece) != 0 or p.plane % piece != 0)
    if chip:
        block = power(p.n) * max(1, piece)
    w, b = (t if t is not None else p.x for t in (p.weight, p.bias))
    means, variances = p.kept or (p.x, p.x)
    steps = p.planes or (0, 0)
    xs = (p.outer, p.inner, *p.rows[:2])
    sizes = (*xs, p.rows[2], p.n, *p.columns, p.plane, *steps, p.n * p.plane, *p.channels, p.eps)
    _, per, spatial = p.channels
    uniform = p.affine == 2 and (per == 1 or (not chip and spatial % block == 0))
    flags = (
        p.mean,
        4 if uniform else p.affine,
        p.weight is not None,
        p.bias is not None,
        p.activation,
        p.kept is not None,
    )
    heads = (p.x, p.y, w, b, means, variances)
    tile = (each, wide, block, piece)
    if chip:
        _chip[(count,)](*heads, *sizes, *flags, *tile, num_warps=warps)
        return
    if config["way"] == "stream":
        _stream[(count,)](*heads, *sizes, length, *flags, *tile, lanes, stages, num_warps=warps)
        return
    part, splits = divided(length, block, count, multiprocessors(p.x.device), 256)
    parts = torch.empty(count * splits * each * 3, dtype=torch.float32, device=p.x.device)
    columns = (p.n, p.columns[0], p.plane, steps[0], p.n * p.plane, length, part, splits)
    grid = (count, splits)
    _gather[grid](p.x, parts, *xs, *columns, p.mean, *tile, lanes, stages, num_warps=warps)
    most = triton.next_power_of_2(splits)
    _apply[grid](
        *heads, parts, *sizes, length, part, splits, *flags, *tile, stages, most, num_warps=warps
    )
