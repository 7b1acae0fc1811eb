"""The operator ``half_conv``: convolutions of half numbers whose sums stay float32.

Tensor cores multiply float16 and bfloat16 exactly and add in float32. cuDNN rounds the sums to half when
it stores them; this kernel does not, so that its error is that of the operands alone, as TF32's is. It
reads channels-last operands, and writes results as float32 programs have them, contiguous. One group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstone.errors import InputError
from torchstone.kernels import base
from torchstone.kernels.base import Kernel, number, power
from torchstone.kernels.split_gemm_parts import EPILOGUES
from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, Integer, PowerOfTwo, Space

__all__ = ["KERNEL", "refuses"]

_CONV = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_HALVES = (torch.float16, torch.bfloat16)
_MOST = 2**31
_door: Any = torch
"""Parts of torch that have no types."""
_ACTIVATIONS = ("none", "relu", "gelu", "silu", "sigmoid", "tanh")
Numbers = Sequence[int]
Optional = Tensor | None


def _wrong(
    x: Tensor, w: Tensor, bias: Optional, rows: Optional, columns: Optional, *how: Any
) -> str | None:
    """What no path can take: misuse."""
    stride, padding, dilation, activation = how
    if x.dim() not in _CONV or w.dim() != x.dim():
        return f"the input has {x.dim()} dimensions and the kernel {w.dim()}, not 3 to 5 both"
    if any(len(v) != x.dim() - 2 for v in (stride, padding, dilation)):
        return "stride, padding and dilation are not one number for each dimension of places"
    if activation not in _ACTIVATIONS:
        return f"{activation!r} is none of {', '.join(_ACTIVATIONS)}"
    if any(t is not None and t.dim() != 1 for t in (bias, rows, columns)):
        return "bias and factors have one dimension"
    return None


def refuses(
    x: Tensor, w: Tensor, bias: Optional, rows: Optional, columns: Optional, *how: Any
) -> str | None:
    """Why Triton cannot be used."""
    why = _wrong(x, w, bias, rows, columns, *how) or base.unfit(x, w, bias, rows, columns)
    if why is not None:
        return why
    if x.dtype not in _HALVES or w.dtype is not x.dtype:
        return f"the operands are {x.dtype} and {w.dtype}, not both float16 or both bfloat16"
    if any(t is not None and t.dtype is not torch.float32 for t in (bias, rows, columns)):
        return "bias and factors are float32"
    if not (_last(x) and _last(w)):
        return "the operands' channels do not lie last in memory"
    if x.shape[1] % 8:
        return "the channels are no multiple of 8: no 16 bytes of one place lie together"
    places = math.prod(_places(x, w, *how))
    if places < 1:
        return "the kernel is larger than what it is laid over"
    if math.prod(x.shape[1:]) >= _MOST or 256 * places >= _MOST or math.prod(w.shape) >= _MOST:
        return "an image, its result or the kernel is too large for 32 bits"
    return None


def _check(*args: Any) -> None:
    why = _wrong(*args)
    if why is not None:
        raise InputError(why, where="torchstone.half_conv", hint="ask the kernel's `refuses` first")


def _last(x: Tensor) -> bool:
    """Whether the channels of each place lie together, place after place."""
    return x.movedim(1, -1).is_contiguous()


def _places(x: Tensor, w: Tensor, *how: Any) -> list[int]:
    stride, padding, dilation = how[:3]
    rows = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows]


def _reference(
    x: Tensor, w: Tensor, bias: Optional, rows: Optional, columns: Optional, *how: Any
) -> Tensor:
    """The convolution in float32, or in float64 where the operands are."""
    _check(x, w, bias, rows, columns, *how)
    stride, padding, dilation, activation = how
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = _CONV[x.dim()](x.to(dtype), w.to(dtype), None, stride, padding, dilation)
    ones = (1,) * (x.dim() - 2)
    if rows is not None:
        y = y * rows.view(-1, 1, *ones)
    if columns is not None:
        y = y * columns.view(-1, *ones)
    return EPILOGUES[activation](y if bias is None else y + bias.view(-1, *ones))


def _sizes(x: Tensor, w: Tensor, *rest: Any) -> dict[str, int]:
    places = math.prod(_places(x, w, *rest[3:]))
    taps = math.prod(w.shape[2:])
    return {"m": w.shape[0], "n": x.shape[0] * places, "k": taps * x.shape[1], "ci": x.shape[1]}


def _work(x: Tensor, w: Tensor, bias: Optional, *rest: Any) -> tuple[float, float]:
    found = _sizes(x, w, bias, *rest)
    moved = base.bytes_of(x, w, bias) + 4.0 * found["m"] * found["n"]
    return moved, 2.0 * found["m"] * found["n"] * found["k"]


def _space(x: Tensor, w: Tensor, *rest: Any) -> Space:
    found = _sizes(x, w, *rest)
    places = found["n"] // max(1, x.shape[0])
    bm = min(128, max(64, power(found["m"])))
    bn = _narrow(places, x.shape[0] * -(-found["m"] // bm), base.multiprocessors(x.device))
    bk = min(64, max(16, power(found["ci"])))
    few = found["ci"] < 32
    bn = min(bn, 64) if few and bm == 128 else bn

    def fits(config: Config) -> str | None:
        m, n, k, warps, stages = (number(config, v) for v in ("BM", "BN", "BK", "warps", "stages"))
        if (shared := max(2 * (m + n) * k * stages, 4 * m * n)) > base.SHARED_BYTES:
            return f"{shared} bytes of shared memory, of {base.SHARED_BYTES}"
        if not 8 <= (each := m * n // (32 * warps)) <= 128:
            return f"{each} sums a thread: fewer starve it, more spill"
        if number(config, "flat") == 0 and k > 2 * power(found["ci"]):
            return "more than half of each step would be zeros"
        return None

    return Space(
        {
            "BM": PowerOfTwo(64, 256, default=bm),
            "BN": PowerOfTwo(32, 256, default=bn),
            "BK": PowerOfTwo(16, 128, default=16 if few else bk),
            "warps": PowerOfTwo(4, 8, default=8 if bm * bn >= 128 * 128 or (few and bm == 64) else 4),
            "stages": Integer(2, 5, default=4 if few else 3),
            "flat": Choice((0, 1), default=int(few)),
        },
        valid=(fits,),
        derived={"tile": lambda c: number(c, "BM") * number(c, "BN")},
    )


def _narrow(places: int, others: int, processors: int) -> int:
    """The widest tile that wastes little of an image's places, and leaves no processor without one.

    :param others: tiles beside each tile of one image.
    """
    for wide in (128, 64):
        tiles = -(-places // wide)
        if places >= 0.75 * tiles * wide and tiles * others >= 2 * processors:
            return wide
    return 32 if places <= 32 else 64


def _three(values: Sequence[Any], fill: int) -> tuple[Any, ...]:
    return (*(fill,) * (3 - len(values)), *values)


def _five(x: Tensor) -> Tensor:
    for _ in range(5 - x.dim()):
        x = x.unsqueeze(2)
    return x


def _launch(config: Config, x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    from torchstone.kernels.device import implicit_gemm as device

    bias, rows, columns, stride, padding, dilation, activation = rest
    y = _fake(x, w, *rest)
    shape = device.Shape(
        stride=_three(stride, 1),
        padding=_three(padding, 0),
        dilation=_three(dilation, 1),
        activation=activation,
    )
    near = [None if t is None else t.contiguous() for t in (rows, columns, bias)]
    device.run(config, (_five(x), _five(w)), (near[0], near[1], near[2]), _five(y), shape)
    return y


def _fake(x: Tensor, w: Tensor, bias: Optional, rows: Optional, columns: Optional, *how: Any) -> Tensor:
    _check(x, w, bias, rows, columns, *how)
    _door._check(x.shape[1] == w.shape[1], lambda: "the input's channels are not the kernel's")
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[0], w.shape[0], *_places(x, w, *how)), dtype=dtype)


KERNEL = base.kernel(
    "half_conv(Tensor x, Tensor w, Tensor? bias, Tensor? rows, Tensor? columns, int[] stride,"
    " int[] padding, int[] dilation, str activation) -> Tensor",
    _fake,
    Kernel(
        name="half_conv",
        op=_reference,
        reference=_reference,
        refuses=refuses,
        sizes=_sizes,
        work=_work,
        space=_space,
        launch=_launch,
        device="implicit_gemm",
        follow=base.fixed,
    ),
)
"""``activation(conv(x, w) * rows * columns + bias)``: float16 or bfloat16 (batch, ci, ...) and (co, ci,
...), float32 (batch,), (co,) and (co,), to float32 (batch, co, ...), contiguous."""
