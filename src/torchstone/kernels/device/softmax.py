"""Softmax and log-softmax of rows.

``chip`` keeps whole rows in registers and reads them once; ``stream`` reads them twice, in blocks, there
and back, with a running maximum and sum a lane ("Online normalizer calculation for softmax",
arXiv:1805.02867); ``split`` has several programs for a row, whose maxima and sums are merged.
"""

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
from torchstone.records.tuning import Config


@triton.jit
def fold(top, total, value):
    """One more value a lane; minus infinity is no maximum to subtract."""
    higher = tl.maximum(top, value)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    total = total * tl.exp2((top - base) * 1.4426950408889634)
    return higher, total + tl.exp2((value - base) * 1.4426950408889634)


@triton.jit
def merge(top, total):
    """Maximum and sum of rows from those of their lanes, [ROWS, 1] each."""
    most = tl.max(top, 1)[:, None]
    base = tl.where(most == -float("inf"), 0.0, most)
    return base, tl.sum(total * tl.exp2((top - base) * 1.4426950408889634), 1)[:, None]


@triton.jit
def finish(value, most, total, LOG: tl.constexpr):
    """The result from a row's maximum and sum."""
    if LOG:
        return (value - most) - tl.log(total)
    else:  # noqa: RET505  Triton compiles one branch
        return tl.exp2((value - most) * 1.4426950408889634) / total


@triton.jit(do_not_specialize=["outer"])
def _chip(
    x, y, outer, n, inner, so, sn, si, yo,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    col = tl.arange(0, BLOCK)
    mask = live[:, None] & (col < n)[None, :]
    far = col.to(tl.int64)[None, :]
    value = tl.load(x + at[:, None] + far * sn, mask, other=-float("inf")).to(tl.float32)
    most = tl.max(value, 1)[:, None]
    total = tl.sum(tl.exp2((value - most) * 1.4426950408889634), 1)[:, None]
    value = finish(value, most, total, LOG)
    tl.store(y + to[:, None] + far * inner, value.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["outer"])
def _stream(
    x, y, outer, n, inner, so, sn, si, yo,
    LOG: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    lane = tl.arange(0, BLOCK)
    top = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        col = start + lane
        mask = live[:, None] & (col < n)[None, :]
        value = tl.load(x + at[:, None] + col.to(tl.int64)[None, :] * sn, mask, other=-float("inf"))
        top, total = fold(top, total, value.to(tl.float32))
    most, total = merge(top, total)
    last = (n - 1) // BLOCK * BLOCK
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        col = last - start + lane  # backwards: what was read last is still in the cache
        mask = live[:, None] & (col < n)[None, :]
        far = col.to(tl.int64)[None, :]
        value = tl.load(x + at[:, None] + far * sn, mask, other=0.0).to(tl.float32)
        value = finish(value, most, total, LOG)
        tl.store(y + to[:, None] + far * inner, value.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["outer"])
def _gather(
    x, parts, outer, n, inner, so, sn, si, each, splits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    lane = tl.arange(0, BLOCK)
    top = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(split * each, min(n, (split + 1) * each), BLOCK, num_stages=STAGES):
        col = start + lane
        mask = live[:, None] & (col < n)[None, :]
        value = tl.load(x + at[:, None] + col.to(tl.int64)[None, :] * sn, mask, other=-float("inf"))
        top, total = fold(top, total, value.to(tl.float32))
    to = ((tile.to(tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)) * 2
    most = tl.max(top, 1)
    base = tl.where(most == -float("inf"), 0.0, most)
    tl.store(parts + to, most)
    tl.store(parts + to + 1, tl.sum(total * tl.exp2((top - base[:, None]) * 1.4426950408889634), 1))


@triton.jit(do_not_specialize=["outer"])
def _apply(
    x, y, parts, outer, n, inner, so, sn, si, yo, each, splits,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    part = tl.arange(0, SPLITS)[None, :]
    here = ((tile.to(tl.int64) * splits + part) * ROWS + tl.arange(0, ROWS)[:, None]) * 2
    top = tl.load(parts + here, part < splits, other=-float("inf"))
    most, total = merge(top, tl.load(parts + here + 1, part < splits, other=0.0))
    lane = tl.arange(0, BLOCK)
    for start in tl.range(split * each, min(n, (split + 1) * each), BLOCK, num_stages=STAGES):
        col = start + lane
        mask = live[:, None] & (col < n)[None, :]
        far = col.to(tl.int64)[None, :]
        value = tl.load(x + at[:, None] + far * sn, mask, other=0.0).to(tl.float32)
        value = finish(value, most, total, LOG)
        tl.store(y + to[:, None] + far * inner, value.to(y.dtype.element_ty), mask)


def run(config: Config, rows: Rows, y: torch.Tensor, log: bool) -> None:
    """Write the softmax of the rows to ``y``, which is contiguous."""
    x, outer, n, inner, (so, sn, si) = rows
    each, block, warps, stages = numbers(config, "rows", "block", "warps", "stages")
    count, wide = tiles(outer, inner, each), inner > 1
    ends = (outer, n, inner, so, sn, si)
    yo = n * inner
    if config["way"] == "chip":
        _chip[(count,)](x, y, *ends, yo, log, each, triton.next_power_of_2(n), wide, num_warps=warps)
        return
    if config["way"] == "stream":
        _stream[(count,)](x, y, *ends, yo, log, each, block, wide, stages, num_warps=warps)
        return
    length, splits = divided(n, block, count, multiprocessors(x.device))
    parts = torch.empty(count * splits * each * 2, dtype=torch.float32, device=x.device)
    grid = (count, splits)
    _gather[grid](x, parts, *ends, length, splits, each, block, wide, stages, num_warps=warps)
    most = triton.next_power_of_2(splits)
    _apply[grid](
        x, y, parts, *ends, yo, length, splits, log, each, block, wide, stages, most, num_warps=warps
    )


def divided(n: int, block: int, count: int, processors: int, most: int = 1024) -> tuple[int, int]:
    """Elements that each program has of a row, in whole blocks, and how many programs a row has.

    As many as fill the device four times over, at least two blocks each.
    """
    wanted = max(1, min(-(-4 * processors // count), -(-n // (2 * block)), most))
    length = -(-n // (wanted * block)) * block
    return length, -(-n // length)
