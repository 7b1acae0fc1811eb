"""Convolution as a matrix product whose right side is never written down (implicit GEMM).

Channels by places: tile (BM, BN) of the result is the sum over taps and channels of weights (BM, BK) by
inputs (BK, BN), which are read from where each tap of each place lies. A tile's places are one image's,
and its second dimension, so that the compiler sees that results are stored as they lie in memory: where
it does not, it may store each lane's to another channel, ten times slower.
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

from torchstone.kernels.base import numbers
from torchstone.kernels.device.common import activate
from torchstone.records.tuning import Config


@triton.jit
def _inside(at, size):
    """Whether 0 <= at < size, by one comparison."""
    return at.to(tl.uint32) < (at * 0 + size).to(tl.uint32)  # a size of 1 is no tensor


@triton.jit
def _finished(
    acc, columns, bias, out, COLUMNS: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr
):  # fmt: skip
    """What becomes of sums (channels, places) before they are stored."""
    if COLUMNS:
        acc *= tl.load(columns + out)[:, None]
    if BIAS:
        acc += tl.load(bias + out)[:, None]
    return activate(acc, ACT)


@triton.jit
def _conv(
    x, w, bias, rows, columns, y, places, co, ci, depth, height, width, oh_all, ow_all,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    CI: tl.constexpr, EVEN: tl.constexpr, SAFE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    heads, tiles = tl.cdiv(co, BM), tl.cdiv(places, BN)
    tile = tl.program_id(0) // heads
    image = (tile // tiles).to(tl.int64)
    place = tile % tiles * BN + tl.arange(0, BN)
    p = tl.minimum(place, places - 1)
    ow, oh, od = p % ow_all, p // ow_all % oh_all, p // ow_all // oh_all
    base = x + image * (depth * height * width * ci)
    d, h, v = od * SD - PD, oh * SH - PH, ow * SW - PW
    at = (d * height + h) * width + v
    head = tl.program_id(0) % heads * BM
    out = head + tl.arange(0, BM)
    inner = tl.arange(0, BK)
    weights = w + (tl.minimum(out, co - 1) * (KD * KH * KW * ci))[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    if CI == 0:  # each step is some channels of one tap
        blocks = tl.cdiv(ci, BK)
        for step in range(KD * KH * KW * blocks):
            tap, c = step // blocks, (step % blocks) * BK + inner
            kd, kh, kw = tap // (KH * KW), tap // KW % KH, tap % KW
            far = ((kd * DD * height + kh * DH) * width + kw * DW) * ci
            left_at, right_at = (
                weights + (tap * ci + c)[None, :],
                base + (at * ci + far)[None, :] + c[:, None],
            )
            held = (c < ci)[:, None]
            if not SAFE:
                inside = _inside(h + kh * DH, height) & _inside(v + kw * DW, width)
                if PD > 0:
                    inside = inside & _inside(d + kd * DD, depth)
                held = inside[None, :] if EVEN else held & inside[None, :]
            left = tl.load(left_at) if EVEN else tl.load(left_at, (c < ci)[None, :], other=0.0)
            right = tl.load(right_at) if SAFE and EVEN else tl.load(right_at, held, other=0.0)
            acc = tl.dot(left, right, acc)
    else:  # few channels: each step goes on where the last one stopped, over taps and channels
        for step in range(tl.cdiv(KD * KH * KW * CI, BK)):
            k = step * BK + inner
            tap, c = k // CI, k % CI
            kd, kh, kw = tap // (KH * KW), tap // KW % KH, tap % KW
            far = ((kd * DD * height + kh * DH) * width + kw * DW) * CI + c
            known = k < KD * KH * KW * CI
            left = tl.load(weights + k[None, :], known[None, :], other=0.0)
            right_at = base + tl.multiple_of((at * CI)[None, :] + far[:, None], [8, 1])
            held = known[:, None]
            if not SAFE:
                inside = _inside(h[None, :] + (kh * DH)[:, None], height)
                held = held & inside & _inside(v[None, :] + (kw * DW)[:, None], width)
                if PD > 0:
                    held = held & _inside(d[None, :] + (kd * DD)[:, None], depth)
            right = tl.load(right_at, held, other=0.0)
            acc = tl.dot(left, right, acc)
    if ROWS:
        acc *= tl.load(rows + image)
    acc = _finished(acc, columns, bias, tl.minimum(out, co - 1), COLUMNS, BIAS, ACT)
    y += (image * co + head) * places
    to = place[None, :] + (tl.arange(0, BM) * places)[:, None]
    tl.store(y + to, acc, (place < places)[None, :] & (out < co)[:, None])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is convolved; lists are of depth, height and width."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    activation: str


def run(
    config: Config,
    given: tuple[torch.Tensor, torch.Tensor],
    ends: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    y: torch.Tensor,
    shape: Shape,
) -> None:
    """Write a convolution to ``y``.

    :param given: half (batch, ci, depth, height, width) and (co, ci, *kernel), channels last in memory.
    :param ends: float32 factors (batch,) and (co,), and what is added, (co,).
    :param y: float32 (batch, co, depth, height, width), contiguous.
    """
    bm, bn, bk, warps, stages, flat = numbers(config, "BM", "BN", "BK", "warps", "stages", "flat")
    (x, w), (rows, columns, bias) = given, ends
    batch, co, *out = y.shape
    ci, *sizes = x.shape[1:]
    kernel = w.shape[2:]
    places = out[0] * out[1] * out[2]
    safe = not any(shape.padding)
    _conv[(batch * -(-places // bn) * -(-co // bm),)](
        x, w, w if bias is None else bias, w if rows is None else rows,
        w if columns is None else columns, y, places, co, ci, *sizes, out[1], out[2],
        *kernel, *shape.stride, *shape.padding, *shape.dilation,
        ci if flat else 0, ci % bk == 0, safe, bias is not None, rows is not None,
        columns is not None, shape.activation, bm, bn, bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
