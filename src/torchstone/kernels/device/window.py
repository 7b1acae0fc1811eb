"""Pooling and depthwise convolution in up to three dimensions: each output is made of a window of its
own channel.

A tile is A x B outputs: rows and columns of a plane, or positions and channels where channels are next
to each other in memory (CL). What windows share is read from the cache.
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
def _share(o, size, S: tl.constexpr, K: tl.constexpr, P: tl.constexpr, INCLUDE: tl.constexpr):
    """Elements along one dimension that an average divides by."""
    start = o * S - P
    if INCLUDE:
        count = tl.minimum(start + K, size + P) - start
    else:
        count = tl.minimum(start + K, size) - tl.maximum(start, 0)
    return count


@triton.jit
def _tap(
    found,
    line,
    weight,
    v,
    inside,
    width,
    xw,
    KIND: tl.constexpr,
    SAFE: tl.constexpr,
    SMALL: tl.constexpr,
):
    """One more element of a line of each window."""
    if not SAFE:
        inside = inside & (v >= 0) & (v < width)
    far = v * xw if SMALL else v.to(tl.int64) * xw
    if KIND == "max":
        value = tl.load(line + far, inside, other=-float("inf")).to(tl.float32)
        found = tl.maximum(found, value, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "avg":
        found += tl.load(line + far, inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(line + far, inside, other=0.0).to(tl.float32)
        found += value * tl.load(weight).to(tl.float32)
    return found


@triton.jit
def _window(
    x, w, b, y, channels, per, depth, height, width, od_all, oh_all, ow_all,
    xn, xc, xd, xh, xw, yn, yc, yd, yh, yw,
    KIND: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, INCLUDE: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    CL: tl.constexpr, SAFE: tl.constexpr, SMALL: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    lane = tl.arange(0, A * B)
    if CL:
        across = tl.cdiv(channels, B)
        positions = od_all * oh_all * ow_all
        down = tl.cdiv(positions, A)
        c = (tile % across) * B + lane % B
        place = (tile // across % down) * A + lane // B
        n = tile // across // down
        ow, oh, od = place % ow_all, place // ow_all % oh_all, place // ow_all // oh_all
        live = (c < channels) & (place < positions)
    else:
        across, down = tl.cdiv(ow_all, B), tl.cdiv(oh_all, A)
        ow = (tile % across) * B + lane % B
        oh = (tile // across % down) * A + lane // B
        rest = tile // across // down
        od, c, n = rest % od_all, rest // od_all % channels, rest // od_all // channels
        live = (ow < ow_all) & (oh < oh_all)
    c = tl.where(c < channels, c, 0)
    start = x + n.to(tl.int64) * xn + (c // per).to(tl.int64) * xc
    found = tl.full([A * B], -float("inf") if KIND == "max" else 0.0, tl.float32)
    first = ow * SW - PW
    for row in tl.range(0, KD * KH, num_stages=1, loop_unroll_factor=UNROLL):
        d = od * SD - PD + (row // KH) * DD
        h = oh * SH - PH + (row % KH) * DH
        inside = live if SAFE else live & (d >= 0) & (d < depth) & (h >= 0) & (h < height)
        if SMALL:
            line = start + (d * xd + h * xh)
        else:
            line = start + (d.to(tl.int64) * xd + h.to(tl.int64) * xh)
        weights = w + c * (KD * KH * KW) + row * KW
        if KW <= 16:
            for tap in tl.static_range(KW):
                at = first + tap * DW
                found = _tap(found, line, weights + tap, at, inside, width, xw, KIND, SAFE, SMALL)
        else:
            for tap in tl.range(0, KW, num_stages=1):
                at = first + tap * DW
                found = _tap(found, line, weights + tap, at, inside, width, xw, KIND, SAFE, SMALL)
    if KIND == "avg":
        count = _share(od, depth, SD, KD, PD, INCLUDE) * _share(oh, height, SH, KH, PH, INCLUDE)
        found /= (count * _share(ow, width, SW, KW, PW, INCLUDE)).to(tl.float32)
    if BIAS:
        found += tl.load(b + c).to(tl.float32)
    found = activate(found, ACT)
    to = n.to(tl.int64) * yn + c.to(tl.int64) * yc + od.to(tl.int64) * yd
    to += oh.to(tl.int64) * yh + ow.to(tl.int64) * yw
    tl.store(y + to, found.to(y.dtype.element_ty), live)


@dataclass(frozen=True, kw_only=True)
class Window:
    """What is done with windows; sizes are of depth, height and width."""

    kind: str
    """``max``, ``avg``, ``conv``."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    include: bool = True
    """An average counts padding."""
    activation: str = "none"


def run(
    config: Config, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, y:
    torch.Tensor, how: Window,
) -> None:  # fmt: skip
    """Write the outputs to ``y``; ``x`` and ``y`` are (batch, channels, depth, height, width), any
    strides.
    """
    a, b, warps, unroll = numbers(config, "a", "b", "warps", "unroll")
    images, channels, *out = y.shape
    last = channels > 1 and x.stride(1) == 1
    columns, rows = (channels, out[0] * out[1] * out[2]) if last else (out[2], out[1])
    grid = images * -(-columns // b) * -(-rows // a) * (1 if last else channels * out[0])
    ends = [
        (o - 1) * step - pad + wide * (k - 1)
        for o, k, step, pad, wide in zip(
            out, how.kernel, how.stride, how.padding, how.dilation, strict=True
        )
    ]
    safe = not any(how.padding) and all(end < size for end, size in zip(ends, x.shape[2:], strict=True))
    reach = [
        (size + max(0, end)) * step
        for size, end, step in zip(x.shape[2:], ends, x.stride()[2:], strict=True)
    ]
    small = sum(reach) < 2**31
    _window[(grid,)](
        x, x if weight is None else weight, x if bias is None else bias, y,
        channels, channels // x.shape[1], *x.shape[2:], *out, *x.stride(), *y.stride(),
        how.kind, bias is not None, how.activation, how.include,
        *how.kernel, *how.stride, *how.padding, *how.dilation, last, safe, small, a, b, unroll,
        num_warps=warps,
    )  # fmt: skip
