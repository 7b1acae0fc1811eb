"""Pooling, and depthwise convolution, in one to three dimensions. Channels-last stays channels-last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchstone.kernels import base
from torchstone.kernels.base import Kernel, number, power
from torchstone.kernels.norm import ACTIVATIONS, Optional, activated
from torchstone.records.tuning import Config
from torchstone.tuner.space import Choice, PowerOfTwo, Space

__all__ = ["KERNELS"]

Ints = Sequence[int]


def _space(x: torch.Tensor, channels: int, sizes: Ints) -> Space:
    """Tiles wide where memory is: an output a thread, windows being unaligned, or 4 channels."""
    last = base.channels_last(x)
    columns = channels if last else sizes[-1]
    rows = math.prod(sizes) if last else sizes[-2] if len(sizes) > 1 else 1
    if last:
        b = min(power(columns), 128)
        a = min(power(rows), 512 // b)
    else:  # two outputs a thread; tiles as tall as wide in 16-byte words, for what windows share
        b = min(power(columns), 32 if rows > 1 else 512)
        a = min(power(rows), 256 // b) if rows > 1 else 1
    warps = min(8, max(1, a * b // (128 if last else 64)))

    def fits(config: Config) -> str | None:
        each = number(config, "a") * number(config, "b") / (32 * number(config, "warps"))
        return None if each <= 16 and (each >= 1 or config["warps"] == 1) else f"{each} outputs a thread"

    return Space(
        {
            "a": PowerOfTwo(1, min(128, power(rows)), default=a),
            "b": PowerOfTwo(
                min(8, power(columns)), min(512, power(columns)), default=max(b, min(8, power(columns)))
            ),
            "warps": PowerOfTwo(1, 8, default=warps),
            "unroll": Choice((1, 4, 16), default=4 if last else 16),
        },
        valid=(fits,),
        derived={"tile": lambda c: number(c, "a") * number(c, "b")},
    )


def _five(x: torch.Tensor) -> torch.Tensor:
    """With depth and height of 1 where there are none."""
    return x.reshape(*x.shape[:2], *[1] * (5 - x.dim()), *x.shape[2:]) if x.dim() < 5 else x


def _three(values: Ints, first: int) -> tuple[int, ...]:
    return (*[first] * (3 - len(values)), *values)


def _pool_sizes(size: Ints, how: tuple[Ints, Ints, Ints, Ints], up: bool) -> list[int]:
    """Output sizes, as PyTorch has them: rounded up, a window must begin within the input or its left
    padding.
    """
    found = []
    for s, k, step, pad, wide in zip(size, *how, strict=True):
        out = (s + 2 * pad - wide * (k - 1) - 1 + (step - 1 if up else 0)) // step + 1
        found.append(out - 1 if up and (out - 1) * step >= s + pad else out)
    return found


def _pool(  # noqa: PLR0913
    x: torch.Tensor,
    kind: str,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    up: bool,
    include: bool,
) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    if kind == "max":
        most = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
        found: torch.Tensor = most(wide, list(kernel), list(stride), list(padding), list(dilation), up)
    else:
        mean: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
        found = mean(wide, list(kernel), list(stride), list(padding), up, include)
    return found.to(x.dtype)


def _pool_refuses(  # noqa: PLR0913
    x: torch.Tensor,
    kind: str,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    up: bool,
    include: bool,
) -> str | None:
    if kind not in ("max", "avg"):
        return f"no pooling is called {kind}"
    if kind == "avg" and any(d != 1 for d in dilation):
        return "an average has no dilation"
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        return "padding is more than half of the kernel"
    return base.unfit(x) or _shaped(x, kernel)


def _shaped(x: torch.Tensor, kernel: Ints) -> str | None:
    if not 1 <= len(kernel) <= 3 or x.dim() != len(kernel) + 2:
        return f"{x.dim()} dimensions, not batch, channels and {len(kernel)} more"
    return "an index does not fit into 32 bits" if max(x.shape[2:]) >= 2**30 else None


def _pool_args(x: torch.Tensor, args: Sequence[Any]) -> list[int]:
    _, kernel, stride, padding, dilation, up, _ = args
    return _pool_sizes(x.shape[2:], (kernel, stride, padding, dilation), up)


def _pool_all(x: torch.Tensor, *args: Any) -> dict[str, int]:
    out = _pool_args(x, args)
    return {
        "planes": x.shape[0] * x.shape[1],
        "inputs": math.prod(x.shape[2:]),
        "outputs": math.prod(out),
        "last": int(base.channels_last(x)),
    }


def _pool_work(x: torch.Tensor, *args: Any) -> tuple[float, float]:
    """Inputs read once, outputs written once."""
    outputs = x.shape[0] * x.shape[1] * math.prod(_pool_args(x, args))
    return base.bytes_of(x) + outputs * x.element_size(), float(outputs * math.prod(args[1]))


def _pool_space(x: torch.Tensor, *args: Any) -> Space:
    return _space(x, x.shape[1], _pool_args(x, args))


def _pool_fake(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return base.like(x, (x.shape[0], x.shape[1], *_pool_args(x, args)))


def _pool_launch(config: Config, *args: Any) -> torch.Tensor:
    from torchstone.kernels.device import window as device

    x, kind, kernel, stride, padding, dilation, _, include = args
    y = _pool_fake(*args)
    how = device.Window(
        kind=kind,
        kernel=_three(kernel, 1),
        stride=_three(stride, 1),
        padding=_three(padding, 0),
        dilation=_three(dilation, 1),
        include=include,
    )
    device.run(config, _five(x), None, None, _five(y), how)
    return y


def _conv(  # noqa: PLR0913
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    activation: str,
) -> torch.Tensor:
    conv: Any = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    wide = [t if t is None or t.dtype == torch.float64 else t.float() for t in (x, weight, bias)]
    found = conv(*wide, list(stride), list(padding), list(dilation), x.shape[1])
    return activated(found, activation).to(x.dtype)


def _conv_refuses(  # noqa: PLR0913
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    activation: str,
) -> str | None:
    if activation not in ACTIVATIONS:
        return f"no activation is called {activation}"
    if weight.dim() != x.dim() or weight.shape[1] != 1 or weight.shape[0] % x.shape[1]:
        return "weights are not of one channel each, as many as there are channels or a multiple"
    return base.unfit(x, weight, bias) or _shaped(x, weight.shape[2:])


def _conv_out(x: torch.Tensor, weight: torch.Tensor, args: Sequence[Any]) -> list[int]:
    _, stride, padding, dilation, _ = args
    return _pool_sizes(x.shape[2:], (weight.shape[2:], stride, padding, dilation), False)


def _conv_all(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> dict[str, int]:
    out = _conv_out(x, weight, args)
    return {
        "planes": x.shape[0] * weight.shape[0],
        "inputs": math.prod(x.shape[2:]),
        "outputs": math.prod(out),
        "last": int(base.channels_last(x)),
    }


def _conv_work(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[float, float]:
    """Inputs read once, outputs written once."""
    outputs = x.shape[0] * weight.shape[0] * math.prod(_conv_out(x, weight, args))
    moved = base.bytes_of(x, weight, args[0]) + outputs * x.element_size()
    return moved, 2.0 * outputs * math.prod(weight.shape[2:])


def _conv_space(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> Space:
    return _space(x, weight.shape[0], _conv_out(x, weight, args))


def _conv_fake(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    return base.like(x, (x.shape[0], weight.shape[0], *_conv_out(x, weight, args)))


def _conv_launch(config: Config, *args: Any) -> torch.Tensor:
    from torchstone.kernels.device import window as device

    x, weight, bias, stride, padding, dilation, activation = args
    y = _conv_fake(*args)
    how = device.Window(
        kind="conv",
        kernel=_three(weight.shape[2:], 1),
        stride=_three(stride, 1),
        padding=_three(padding, 0),
        dilation=_three(dilation, 1),
        activation=activation,
    )
    near = None if bias is None else bias.contiguous()
    device.run(config, _five(x), weight.contiguous(), near, _five(y), how)
    return y


KERNELS = (
    base.kernel(
        "pool(Tensor x, str kind, int[] kernel, int[] stride, int[] padding, int[] dilation,"
        " bool ceil_mode, bool include_pad) -> Tensor",
        _pool_fake,
        Kernel(
            name="pool",
            op=_pool,
            reference=_pool,
            refuses=_pool_refuses,
            sizes=_pool_all,
            work=_pool_work,
            space=_pool_space,
            launch=_pool_launch,
            device="window",
            follow=base.fixed,
        ),
    ),
    base.kernel(
        "depthwise_conv(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding,"
        " int[] dilation, str activation) -> Tensor",
        _conv_fake,
        Kernel(
            name="depthwise_conv",
            op=_conv,
            reference=_conv,
            refuses=_conv_refuses,
            sizes=_conv_all,
            work=_conv_work,
            space=_conv_space,
            launch=_conv_launch,
            device="window",
            follow=base.fixed,
        ),
    ),
)
"""``pool(x, kind, kernel, stride, padding, dilation, ceil_mode, include_pad)``, kind ``max avg``, and
``depthwise_conv(x, weight, bias, stride, padding, dilation, activation)`` with groups = channels of
``x``: of (batch, channels, ...), every list as long as there are dimensions after those.
"""
