"""Cross-entropy of rows of logits, read once with a running maximum and sum a lane
(arXiv:1805.02867).
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
from torchstone.kernels.device.softmax import divided, fold, merge
from torchstone.records.tuning import Config

_LONGEST = 1 << 17
"""Losses that one program adds up; more are left to PyTorch, whose sum has several programs."""


@triton.jit
def _loss(x, targets, at, row, live, most, total, n, sn, ignored):
    """Losses of a tile's rows, 0 for ignored ones, NaN where a target is no class; [ROWS, 1] all."""
    target = tl.load(targets + row, live, other=0)
    known = live & (target >= 0) & (target < n)
    chosen = tl.load(x + at + tl.where(known, target, 0).to(tl.int64) * sn, known, other=float("nan"))
    loss = (most - chosen.to(tl.float32)) + tl.log(total)
    return tl.where(target == ignored, 0.0, loss)


@triton.jit(do_not_specialize=["outer", "ignored", "splits"])
def _rows(
    x, targets, loss, parts, outer, n, inner, so, sn, si, each, splits, ignored,
    MERGED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    row, live = locate(tile, outer, inner, inner, 1, ROWS, INNER)
    lane = tl.arange(0, BLOCK)
    top = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(split * each, min(n, (split + 1) * each), BLOCK, num_stages=STAGES):
        col = start + lane
        mask = live[:, None] & (col < n)[None, :]
        value = tl.load(x + at[:, None] + col.to(tl.int64)[None, :] * sn, mask, other=-float("inf"))
        top, total = fold(top, total, value.to(tl.float32))
    if MERGED:
        most, total = merge(top, total)
        found = _loss(x, targets, at[:, None], row[:, None], live[:, None], most, total, n, sn, ignored)
        tl.store(loss + row[:, None], found.to(loss.dtype.element_ty), live[:, None])
    else:
        to = ((tile.to(tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)[:, None]) * 2
        most = tl.max(top, 1)[:, None]
        base = tl.where(most == -float("inf"), 0.0, most)
        tl.store(parts + to, most)
        tl.store(parts + to + 1, tl.sum(total * tl.exp2((top - base) * 1.4426950408889634), 1)[:, None])


@triton.jit(do_not_specialize=["outer", "ignored", "splits"])
def _finish(
    x, targets, loss, parts, outer, n, inner, so, sn, si, splits, ignored,
    ROWS: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    row, live = locate(tile, outer, inner, inner, 1, ROWS, INNER)
    part = tl.arange(0, SPLITS)[None, :]
    here = ((tile.to(tl.int64) * splits + part) * ROWS + tl.arange(0, ROWS)[:, None]) * 2
    top = tl.load(parts + here, part < splits, other=-float("inf"))
    most, total = merge(top, tl.load(parts + here + 1, part < splits, other=0.0))
    found = _loss(x, targets, at[:, None], row[:, None], live[:, None], most, total, n, sn, ignored)
    tl.store(loss + row[:, None], found.to(loss.dtype.element_ty), live[:, None])


@triton.jit(do_not_specialize=["rows", "ignored"])
def _total(loss, targets, out, rows, ignored, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, rows, BLOCK):
        row = start + lane
        total += tl.load(loss + row, row < rows, other=0.0)
        if MEAN:
            count += (tl.load(targets + row, row < rows, other=ignored) != ignored).to(tl.int32)
    found = tl.sum(total, 0)
    if MEAN:
        found /= tl.sum(count, 0).to(tl.float32)
    tl.store(out, found.to(out.dtype.element_ty))


def run(config: Config, rows: Rows, targets: torch.Tensor, loss: torch.Tensor, ignored: int) -> None:
    """Write the losses of all rows, contiguous like ``targets``: outer x inner."""
    x, outer, n, inner, (so, sn, si) = rows
    each, block, warps, stages = numbers(config, "rows", "block", "warps", "stages")
    count, wide = tiles(outer, inner, each), inner > 1
    length, splits = n, 1
    if config["way"] == "split":
        length, splits = divided(n, block, count, multiprocessors(x.device))
    merged = splits == 1
    parts = (
        loss if merged else torch.empty(count * splits * each * 2, dtype=torch.float32, device=x.device)
    )
    sizes = (outer, n, inner, so, sn, si)
    _rows[(count, splits)](
        x, targets, loss, parts, *sizes, length, splits, ignored, merged, each, block, wide, stages,
        num_warps=warps,
    )  # fmt: skip
    if not merged:
        most = triton.next_power_of_2(splits)
        _finish[(count,)](
            x, targets, loss, parts, *sizes, splits, ignored, each, wide, most, num_warps=4
        )


def total(
    loss: torch.Tensor, targets: torch.Tensor, out: torch.Tensor, ignored: int, mean: bool
) -> None:
    """Write the sum of float32 losses, or their mean over what is not ignored."""
    rows = loss.numel()
    if rows > _LONGEST:
        found = loss.sum(dtype=torch.float64)
        out.copy_(found / (targets != ignored).sum() if mean else found)
        return
    block = min(8192, max(128, triton.next_power_of_2(rows)))
    _total[(1,)](loss, targets, out, rows, ignored, mean, block, num_warps=max(1, block // 1024))
