"""Running sums and products along rows: a block at a time with what came before carried along; long
rows by several programs, each of which starts from what those before it came to (reduce, then scan).
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
from torchstone.kernels.device.reduce import along, combine, identity
from torchstone.kernels.device.softmax import divided
from torchstone.records.tuning import Config


@triton.jit
def _block(
    x,
    mask,
    at,
    mat,
    live,
    start,
    n,
    sn,
    mn,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A block of rows in float32, with the identity where there is nothing or the mask is not set."""
    col = start + tl.arange(0, BLOCK)
    there = live[:, None] & (col < n)[None, :]
    far = col.to(tl.int64)[None, :]
    value = tl.load(x + at[:, None] + far * sn, there, other=identity(KIND)).to(tl.float32)
    if MASKED:
        value = tl.where(
            tl.load(mask + mat[:, None] + far * mn, there, other=0) != 0, value, identity(KIND)
        )
    return value


@triton.jit(do_not_specialize=["outer"])
def _scan(
    x, mask, y, parts, outer, n, inner, so, sn, si, mo, mn, mi, yo, blocks, each, splits,
    KIND: tl.constexpr, MASKED: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INNER: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    mat, live = locate(tile, outer, inner, mo, mi, ROWS, INNER)
    to, live = locate(tile, outer, inner, yo, 1, ROWS, INNER)
    lane = tl.arange(0, BLOCK)
    carry = tl.full([ROWS], identity(KIND), tl.float32)
    if SPLITS:
        part = tl.arange(0, SPLITS)[None, :]
        here = (tile.to(tl.int64) * splits + part) * ROWS + tl.arange(0, ROWS)[:, None]
        carry = along(tl.load(parts + here, part < split, other=identity(KIND)), KIND)
    for step in tl.range(split * each, min(blocks, (split + 1) * each), num_stages=STAGES):
        start = step * BLOCK
        if REVERSE:
            start = (blocks - 1 - step) * BLOCK
        value = _block(x, mask, at, mat, live, start, n, sn, mn, BLOCK, KIND, MASKED)
        if KIND == "sum":
            found = tl.cumsum(value, 1, reverse=REVERSE)
        else:
            found = tl.cumprod(value, 1, reverse=REVERSE)
        found = combine(found, carry[:, None], KIND)
        # chosen, not added up anew: Triton 3.6 does not compile a reduction that is carried and used
        last = lane[None, :] == (0 if REVERSE else BLOCK - 1)
        carry = tl.sum(tl.where(last, found, 0.0), 1)
        col = start + lane
        if EXCLUSIVE:
            col += -1 if REVERSE else 1
        there = live[:, None] & ((col >= 0) & (col < n))[None, :]
        tl.store(
            y + to[:, None] + col.to(tl.int64)[None, :] * inner, found.to(y.dtype.element_ty), there
        )
    if EXCLUSIVE:
        first = tl.zeros([ROWS], tl.int64)
        if REVERSE:
            first += n - 1
        none = tl.full([ROWS], identity(KIND), tl.float32)
        tl.store(y + to + first * inner, none.to(y.dtype.element_ty), live & (split == 0))


@triton.jit(do_not_specialize=["outer"])
def _parts(
    x, mask, parts, outer, n, inner, so, sn, si, mo, mn, mi, blocks, each, splits,
    KIND: tl.constexpr, MASKED: tl.constexpr, REVERSE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    at, live = locate(tile, outer, inner, so, si, ROWS, INNER)
    mat, live = locate(tile, outer, inner, mo, mi, ROWS, INNER)
    found = tl.full([ROWS, BLOCK], identity(KIND), tl.float32)
    for step in tl.range(split * each, min(blocks, (split + 1) * each), num_stages=STAGES):
        start = step * BLOCK
        if REVERSE:
            start = (blocks - 1 - step) * BLOCK
        value = _block(x, mask, at, mat, live, start, n, sn, mn, BLOCK, KIND, MASKED)
        found = combine(found, value, KIND)
    to = (tile.to(tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)
    tl.store(parts + to, along(found, KIND))


def run(
    config: Config, rows: Rows, mask: Rows | None, y: torch.Tensor, how: tuple[str, bool, bool]
) -> None:
    """Write the running sums or products to ``y``, contiguous.

    :param how: kind (``sum``, ``prod``), whether from the end, whether without the element itself.
    """
    x, outer, n, inner, (so, sn, si) = rows
    kind, reverse, exclusive = how
    each, block, warps, stages = numbers(config, "rows", "block", "warps", "stages")
    count, wide, blocks = tiles(outer, inner, each), inner > 1, -(-n // block)
    length, splits = blocks, 1
    if config["way"] == "split":
        length, splits = divided(n, block, count, multiprocessors(x.device))
        length //= block
    under, (mo, mn, mi) = (x, (0, 0, 0)) if mask is None else (mask.x, mask.strides)
    sizes = (outer, n, inner, so, sn, si, mo, mn, mi)
    parts, tile = y, (each, block, wide)
    if splits > 1:
        parts = torch.empty(count * splits * each, dtype=torch.float32, device=x.device)
        _parts[(count, splits)](
            x, under, parts, *sizes, blocks, length,
            splits, kind, mask is not None, reverse, *tile, stages,
            num_warps=warps,
        )  # fmt: skip
    most = triton.next_power_of_2(splits) if splits > 1 else 0
    _scan[(count, splits)](
        x, under, y, parts, *sizes, n * inner,
        blocks, length, splits, kind, mask is not None, reverse, exclusive,
        *tile, most, stages, num_warps=warps,
    )  # fmt: skip
