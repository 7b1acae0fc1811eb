"""Split-precision products of float32 matrices: see :mod:`torchstone.kernels.split_gemm_parts`.

``_gemm`` reads float32 activations, takes them apart in registers and multiplies the parts on the
bfloat16 tensor cores. Those of Hopper round a running sum towards zero at each step, which over a long
``k`` costs more than the split saves (Ootomo and Yokota, 2022). So the products of one ``BLOCK_K`` are
summed from zero, the small ones first, and added to the total in float32, rounded to nearest. A model
of it (sums of 16 exact products, added towards zero to 24 bits) gives relative errors, at ``k`` = 8192
of normal numbers, of 4.3e-6 for two parts and 2.3e-7 for three; 1.1e-5 for three parts without that;
1.2e-5 for two parts by the library, whose sums all run inside the tensor cores; 1.6e-6 for float32
summed in order.

What the split cannot hold shows as a sum that is not finite. Such elements are stored as NaN and their
tile is marked; ``_repair`` computes them anew in plain float32, and leaves at once where nothing is
marked. So the host never waits to learn whether there were any.
"""

# Constants of compilation are in capitals, and a kernel takes what it takes.
# ruff: noqa: N803, PLR0913
# Triton has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from torchstone.records.tuning import Config

__all__ = ["Task", "multiply", "split"]

_FLAT = 1024
_ALIGNED = 8
_REPAIR = 64
_KNOBS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "splits", "group")
_SCALE = tl.constexpr(2.0**16)
_UNSCALE_ONE = tl.constexpr(2.0**-16)
_UNSCALE = tl.constexpr(2.0**-32)


@triton.jit
def _narrow(v, EMULATED: tl.constexpr):
    """``v`` rounded to the nearest bfloat16, ties to even; emulated, as a float32 of that value.

    Triton's interpreter truncates there, and multiplies bfloat16 wrongly.
    """
    if EMULATED:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        narrow = tl.where(v == v, rounded, bits | 0x00400000).to(tl.float32, bitcast=True)
    else:
        narrow = v.to(tl.bfloat16)
    return narrow


@triton.jit
def _wide(v, EMULATED: tl.constexpr):
    """A stored bfloat16 as what :func:`_narrow` gives."""
    if EMULATED:
        wide = (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = v
    return wide


@triton.jit
def _parts(v, EMULATED: tl.constexpr):
    """Three parts of ``2**16 v``, each the nearest bfloat16 of what those before it leave."""
    v = v * _SCALE
    first = _narrow(v, EMULATED)
    v = v - first.to(tl.float32)
    second = _narrow(v, EMULATED)
    v = v - second.to(tl.float32)
    return first, second, _narrow(v, EMULATED)


@triton.jit
def _dot(a, b, acc):
    # float32 where emulated, and then its products are exact; bfloat16 knows no other precision
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _tanh(v):
    """Within a few units in the last place: a polynomial near zero (Cephes' tanhf), else by exp."""
    z = v * v
    series = -5.70498872745e-3 * z + 2.06390887954e-2
    series = (series * z - 5.37397155531e-2) * z + 1.33314422036e-1
    near = (series * z - 3.33332819422e-1) * z * v + v
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(v)) + 1.0)
    return tl.where(tl.abs(v) < 0.625, near, tl.where(v < 0, -far, far))


@triton.jit
def _finish(v, EPILOGUE: tl.constexpr):
    """The epilogue, in float32; NaN stays NaN."""
    if EPILOGUE == "relu":
        v = tl.where(v <= 0, 0.0, v)
    elif EPILOGUE == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif EPILOGUE == "gelu_tanh":
        v = 0.5 * v * (1.0 + _tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    elif EPILOGUE == "sigmoid":
        v = 1.0 / (1.0 + tl.exp(-v))
    elif EPILOGUE == "silu":
        v = v / (1.0 + tl.exp(-v))
    elif EPILOGUE == "tanh":
        v = _tanh(v)
    return v


@triton.jit
def _store(
    acc, bias, y, flag, rows, cols, m, n, y_row, y_col, EPILOGUE: tl.constexpr, BIASED: tl.constexpr
):
    """Scale back, finish and store a tile; NaN, and a mark, where the sum is not finite."""
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    held = tl.abs(acc) < float("inf")
    tl.store(flag, tl.max(tl.max((inside & ~held).to(tl.int32), 1), 0))
    v = acc * _UNSCALE
    if BIASED:
        v += tl.load(bias + cols, cols < n, other=0.0)[None, :]
    v = tl.where(held, _finish(v, EPILOGUE), float("nan"))
    tl.store(y + _offsets(rows, cols, y_row, y_col), v, inside)


@triton.jit
def _offsets(rows, cols, row, col):
    """Of elements, from the strides of rows and columns."""
    return rows.to(tl.int64)[:, None] * row + cols.to(tl.int64)[None, :] * col


@triton.jit
def _place(m, n, group, BM: tl.constexpr, BN: tl.constexpr):
    """Batch, first row, first column and number of this program's tile.

    Groups of tile rows share what they read in L2. The batch is in the same dimension of the grid as the
    tiles: others end at 65,535.
    """
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    pid = tl.program_id(0) % (tiles_m * tiles_n)
    first = pid // (group * tiles_n) * group
    height = tl.minimum(tiles_m - first, group)
    row = first + pid % (group * tiles_n) % height
    col = pid % (group * tiles_n) // height
    tile = batch.to(tl.int64) * tiles_m * tiles_n + row * tiles_n + col
    return batch.to(tl.int64), row * BM, col * BN, tile


@triton.jit(do_not_specialize=["group"])
def _gemm(
    a, b, bias, y, flags, m, n, k, a_batch, a_row, a_col, b_batch, b_part, b_row, b_col,
    y_batch, y_row, y_col, each, size, group,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, SPLIT_B: tl.constexpr,
    EPILOGUE: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    batch, row, col, tile = _place(m, n, group, BM, BN)
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, k)
    rows, cols, inner = row + tl.arange(0, BM), col + tl.arange(0, BN), tl.arange(0, BK)
    # Rows beyond the end read others: what they give is not stored, and no mask costs anything.
    a_at = a + batch * a_batch + (rows % m).to(tl.int64)[:, None] * a_row
    b_at = b + batch * b_batch + (cols % n).to(tl.int64)[None, :] * b_row
    a_at += (begin + inner).to(tl.int64)[None, :] * a_col
    b_at += (begin + inner).to(tl.int64)[:, None] * b_col
    a_step, b_step = tl.full((), BK, tl.int64) * a_col, tl.full((), BK, tl.int64) * b_col
    second_at, third_at = tl.full((), 1, tl.int64) * b_part, tl.full((), 2, tl.int64) * b_part
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(begin, end, BK):
        here_a, here_b = None, None
        if not EVEN:
            here_a, here_b = (inner < end - start)[None, :], (inner < end - start)[:, None]
        a1, a2, a3 = _parts(tl.load(a_at, here_a, other=None if EVEN else 0.0), EMULATED)
        if SPLIT_B:
            b1, b2, b3 = _parts(tl.load(b_at, here_b, other=None if EVEN else 0.0), EMULATED)
        else:
            b1 = _wide(tl.load(b_at, here_b, other=None if EVEN else 0.0), EMULATED)
            b2 = _wide(tl.load(b_at + second_at, here_b, other=None if EVEN else 0.0), EMULATED)
            b3 = b2
            if PARTS == 3:
                b3 = _wide(tl.load(b_at + third_at, here_b, other=None if EVEN else 0.0), EMULATED)
        part = tl.zeros([BM, BN], tl.float32)
        if PARTS == 3:
            part = _dot(a3, b1, part)
            part = _dot(a2, b2, part)
            part = _dot(a1, b3, part)
        part = _dot(a2, b1, part)
        part = _dot(a1, b2, part)
        acc += _dot(a1, b1, part)
        a_at += a_step
        b_at += b_step
    y += batch * y_batch
    if WHOLE:
        _store(acc, bias, y, flags + tile, rows, cols, m, n, y_row, y_col, EPILOGUE, BIASED)
    else:  # one of several sums, of which `_total` makes one
        y += tl.program_id(1).to(tl.int64) * size
        tl.store(y + _offsets(rows, cols, y_row, y_col), acc, (rows < m)[:, None] & (cols < n)[None, :])


@triton.jit
def _total(
    sums, bias, y, flags, m, n, y_batch, y_row, y_col, count, size,
    BM: tl.constexpr, BN: tl.constexpr, EPILOGUE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """``count`` sums over parts of ``k``, in order, and what follows them."""
    batch, row, col, tile = _place(m, n, 1, BM, BN)
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    at = sums + batch * m * n + _offsets(rows, cols, n, 1)
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in range(count):
        acc += tl.load(at, inside, other=0.0)
        at += size
    y += batch * y_batch
    _store(acc, bias, y, flags + tile, rows, cols, m, n, y_row, y_col, EPILOGUE, BIASED)


@triton.jit
def _add(
    high, low, lower, bias, y, flags, m, n, y_batch, y_row, y_col,
    BM: tl.constexpr, BN: tl.constexpr, EPILOGUE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Three products of the library, the small ones first, and what follows them."""
    batch, row, col, tile = _place(m, n, 1, BM, BN)
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    at = batch * m * n + _offsets(rows, cols, n, 1)
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    acc = tl.load(low + at, inside, other=0.0) + tl.load(lower + at, inside, other=0.0)
    acc += tl.load(high + at, inside, other=0.0)
    y += batch * y_batch
    _store(acc, bias, y, flags + tile, rows, cols, m, n, y_row, y_col, EPILOGUE, BIASED)


@triton.jit
def _repair(
    a, b, bias, y, flags, m, n, k, a_batch, a_row, a_col, b_batch, b_part, b_row, b_col,
    y_batch, y_row, y_col,
    BM: tl.constexpr, BN: tl.constexpr, RM: tl.constexpr, RN: tl.constexpr, RK: tl.constexpr,
    PARTS: tl.constexpr, SPLIT_B: tl.constexpr, EPILOGUE: tl.constexpr, BIASED: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """What is NaN in marked tiles, in plain float32; ``BM`` and ``BN`` are multiples of the tile
    here."""
    batch, row, col, _ = _place(m, n, 1, RM, RN)
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    if tl.load(flags + batch * tiles_m * tiles_n + row // BM * tiles_n + col // BN) != 0:
        rows, cols, inner = row + tl.arange(0, RM), col + tl.arange(0, RN), tl.arange(0, RK)
        a_at = a + batch * a_batch + (rows % m).to(tl.int64)[:, None] * a_row
        b_at = b + batch * b_batch + (cols % n).to(tl.int64)[None, :] * b_row
        second_at, third_at = tl.full((), 1, tl.int64) * b_part, tl.full((), 2, tl.int64) * b_part
        acc = tl.zeros([RM, RN], tl.float32)
        for start in range(0, k, RK):
            here = start + inner
            at = b_at + here.to(tl.int64)[:, None] * b_col
            mask = (here < k)[:, None]
            a_here = tl.load(a_at + here.to(tl.int64)[None, :] * a_col, (here < k)[None, :], other=0.0)
            if SPLIT_B:
                b_here = tl.load(at, mask, other=0.0)
            else:
                b_here = _wide(tl.load(at + second_at, mask, other=0.0), EMULATED).to(tl.float32)
                if PARTS == 3:
                    b_here += _wide(tl.load(at + third_at, mask, other=0.0), EMULATED).to(tl.float32)
                b_here += _wide(tl.load(at, mask, other=0.0), EMULATED).to(tl.float32)
                b_here *= _UNSCALE_ONE
            acc = tl.dot(a_here, b_here, acc, input_precision="ieee")
        if BIASED:
            acc += tl.load(bias + cols, cols < n, other=0.0)[None, :]
        at = y + batch * y_batch + _offsets(rows, cols, y_row, y_col)
        inside = (rows < m)[:, None] & (cols < n)[None, :]
        lost = tl.load(at, inside, other=0.0)
        tl.store(at, _finish(acc, EPILOGUE), inside & (lost != lost))


@triton.jit
def _split(v, out, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, EMULATED: tl.constexpr):
    """Parts of a flat tensor, one after the other; those after one that is not finite are zero."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, second, third = _parts(tl.load(v + at, at < size, other=0.0), EMULATED)
    held = tl.abs(first.to(tl.float32)) < float("inf")
    _store_part(out + at, first, at < size, EMULATED)
    step = tl.full((), 1, tl.int64) * size
    if PARTS >= 2:
        _store_part(out + step + at, tl.where(held, second, 0.0), at < size, EMULATED)
    if PARTS >= 3:
        _store_part(out + 2 * step + at, tl.where(held, third, 0.0), at < size, EMULATED)


@triton.jit
def _store_part(at, part, mask, EMULATED: tl.constexpr):
    if EMULATED:
        bits = (part.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(at, bits.to(tl.bfloat16, bitcast=True), mask)
    else:
        tl.store(at, part.to(tl.bfloat16), mask)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to do with a product, and how."""

    parts: int
    """2 (three products) or 3 (six)."""
    epilogue: str
    """Name of what follows the bias."""
    config: Config
    """``method`` and, for ``fused``, blocks, splits of ``k``, group, warps and stages."""

    def number(self, knob: str) -> int:
        """A knob's value, all beside ``method`` being numbers."""
        value = self.config[knob]
        assert isinstance(value, int)
        return value


def split(v: Tensor, parts: int) -> Tensor:
    """Parts of ``2**16 v`` on the device of ``v``: float32 of any shape to bfloat16 (parts, *shape)."""
    v = v.contiguous()
    out = torch.empty((parts, *v.shape), dtype=torch.bfloat16, device=v.device)
    if v.numel():
        with _on(v):
            grid = (triton.cdiv(v.numel(), _FLAT),)
            _split[grid](v, out, v.numel(), BLOCK=_FLAT, PARTS=parts, EMULATED=_emulated(v))
    return out


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, task: Task) -> None:
    """Write ``epilogue(a @ b.mT + bias)`` to ``y``; all sizes are at least 1, and strides any.

    :param a: float32 (batch, m, k).
    :param b: float32 (batch, n, k); or bfloat16 parts (parts, n, k) of one for all batches.
    :param bias: float32 (n,), contiguous.
    :param y: float32 (batch, m, n).
    """
    with _on(a):
        run = _by_library if task.config["method"] == "library" else _fused
        flags, tile = run(a, b, bias, y, task)
        _repair_marked((a, b, bias, y), flags, tile, task)


def _fused(
    a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, task: Task
) -> tuple[Tensor, tuple[int, int]]:
    """Gives a mark for each tile, and the tile's size."""
    (batch, m, k), n = a.shape, b.shape[1]
    bm, bn, bk, splits, group = (task.number(name) for name in _KNOBS)
    tiles = batch * triton.cdiv(m, bm) * triton.cdiv(n, bn)
    flags = torch.empty(tiles, dtype=torch.int32, device=a.device)
    each = triton.cdiv(triton.cdiv(k, splits), bk) * bk
    splits = triton.cdiv(k, each)
    sums = y if splits == 1 else a.new_empty((splits, batch, m, n))
    ends = {"EPILOGUE": task.epilogue, "BIASED": bias is not None}
    _gemm[(tiles, splits)](
        a, b, bias, sums, flags, m, n, k, *a.stride(), *_strides(b), *sums.stride()[-3:],
        each, y.numel(), group,
        BM=bm, BN=bn, BK=bk, PARTS=task.parts, SPLIT_B=b.dtype is torch.float32, EVEN=k % bk == 0,
        WHOLE=splits == 1, EMULATED=_emulated(a),
        num_warps=task.number("warps"), num_stages=task.number("stages"), **ends,
    )  # fmt: skip
    if splits > 1:
        _total[(tiles,)](
            sums, bias, y, flags, m, n, *y.stride(), splits, y.numel(), BM=bm, BN=bn, num_warps=8, **ends
        )
    return flags, (bm, bn)


def _by_library(
    a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, task: Task
) -> tuple[Tensor, tuple[int, int]]:
    """The same, by three products of the vendor's bfloat16 kernel with float32 results."""
    batch, m, n = y.shape
    a, b = _aligned(a, b)
    a1, a2 = _split_as_it_lies(a)
    b1, b2 = _split_as_it_lies(b) if b.dtype is torch.float32 else (p.expand(batch, -1, -1) for p in b)
    products = [_wide_product(x, w.mT) for x, w in ((a1, b1), (a1, b2), (a2, b1))]
    tiles = batch * triton.cdiv(m, _REPAIR) * triton.cdiv(n, _REPAIR)
    flags = torch.empty(tiles, dtype=torch.int32, device=a.device)
    _add[(tiles,)](
        *products, bias, y, flags, m, n, *y.stride(),
        BM=_REPAIR, BN=_REPAIR, EPILOGUE=task.epilogue, BIASED=bias is not None,
    )  # fmt: skip
    return flags, (_REPAIR, _REPAIR)


def _repair_marked(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    flags: Tensor,
    tile: tuple[int, int],
    task: Task,
) -> None:
    a, b, bias, y = tensors
    (batch, m, k), n = a.shape, b.shape[1]
    rm, rn = (min(_REPAIR, size) for size in tile)
    _repair[(batch * triton.cdiv(m, rm) * triton.cdiv(n, rn),)](
        a, b, bias, y, flags, m, n, k, *a.stride(), *_strides(b), *y.stride(),
        BM=tile[0], BN=tile[1], RM=rm, RN=rn, RK=32, PARTS=task.parts,
        SPLIT_B=b.dtype is torch.float32, EPILOGUE=task.epilogue, BIASED=bias is not None,
        EMULATED=_emulated(a), num_warps=8,
    )  # fmt: skip


def _strides(b: Tensor) -> tuple[int, int, int, int]:
    """Strides from batch to batch, part to part, row to row and along a row."""
    outer, row, col = b.stride()
    return (outer, 0, row, col) if b.dtype is torch.float32 else (0, outer, row, col)


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides so that each row of their parts begins at a multiple of 16 bytes, without which the
    vendor's kernels are five times slower; zeros are added to the sums where it must be."""
    missing = -a.shape[-1] % _ALIGNED
    if missing:
        return F.pad(a, (0, missing)), F.pad(b, (0, missing))
    loose = [v.mT.is_contiguous() and v.shape[-2] % _ALIGNED for v in (a, b)]
    a, b = (v.contiguous() if odd else v for v, odd in zip((a, b), loose, strict=True))
    return a, b


def _split_as_it_lies(v: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts, transposed in memory where ``v`` is: no copy of it is made."""
    high, low = split(v.mT, 2).mT if v.mT.is_contiguous() else split(v, 2)
    return high, low


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of bfloat16 matrices (batch, m, k) and (batch, k, n) in float32, contiguous."""
    if a.device.type == "cpu":  # the same, since products of bfloat16 are exact in float32
        return torch.bmm(a.float(), b.float())
    if a.shape[0] == 1:
        return torch.mm(a[0], b[0], out_dtype=torch.float32)[None]
    return torch.bmm(a, b, out_dtype=torch.float32)


def _emulated(v: Tensor) -> bool:
    return v.device.type == "cpu"


def _on(v: Tensor) -> Any:
    """The device that Triton launches on."""
    return torch.cuda.device_of(v)
