"""Batch norm by the statistics of the batch, with an activation: what a model in training mode
computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchstone.kernels import base
from torchstone.kernels.base import Kernel
from torchstone.kernels.norm import ACTIVATIONS, Optional, activated
from torchstone.kernels.softmax import row_space
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space

__all__ = ["KERNEL"]

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(x: torch.Tensor, weight: Optional, bias: Optional, eps: float, activation: str) -> Outputs:
    """The normalized ``x``, and mean and biased variance of each channel, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [-1, *[1] * (x.dim() - 2)]
    mean = wide.mean(dims)
    apart = wide - mean.view(shape)
    variance = apart.square().mean(dims)
    y = apart * torch.rsqrt(variance + eps).view(shape)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return activated(y, activation).to(x.dtype), mean, variance


def refuses(
    x: torch.Tensor, weight: Optional, bias: Optional, eps: float, activation: str
) -> str | None:
    """See :attr:`~torchstone.kernels.base.Kernel.refuses`."""
    if activation not in ACTIVATIONS:
        return f"no activation is called {activation}"
    return base.unfit(x, weight, bias)


def _inside(x: torch.Tensor) -> bool:
    """Whether channels are next to each other in memory, so that rows run across the tile."""
    if x.dim() == 2 or math.prod(x.shape[2:]) == 1:
        return True
    return x.stride(1) == 1 and x.shape[1] > 1


def sizes(x: torch.Tensor, *rest: Any) -> dict[str, int]:
    """Rows are channels, ``plane`` a part of one: ``outer`` of them, or ``inner`` where they are next to
    each other in memory.
    """
    channels = x.shape[1]
    each, plane = x.numel() // max(1, channels), math.prod(x.shape[2:])
    outer, inner = (1, channels) if _inside(x) else (channels, 1)
    return {"outer": outer, "n": each, "inner": inner, "plane": plane}


def work(
    x: torch.Tensor, weight: Optional, bias: Optional, eps: float, activation: str
) -> tuple[float, float]:
    """Read once, written once; a copy is a further read and write each way."""
    copies = 1 if _strides(x) is not None else 3
    kept = 8.0 * x.shape[1]
    return 2.0 * copies * base.bytes_of(x) + base.bytes_of(weight, bias) + kept, 8.0 * x.numel()


def space(x: torch.Tensor, *rest: Any) -> Space:
    """See :func:`~torchstone.kernels.softmax.row_space`; a channel on chip is whole planes, padded
    each.
    """
    found = sizes(x)
    processors = base.multiprocessors(x.device)
    if not _inside(x):
        found["n"] = base.power(x.shape[0]) * base.power(found["plane"])
    return row_space(found, processors)


def _strides(x: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of (positions, channels), or of (images, channels, positions); None where there are
    none.
    """
    if _inside(x):
        rows = x.movedim(1, -1)
        merged = base._merged(rows.shape[:-1], rows.stride()[:-1])
        return None if merged is None else (merged[1], x.stride(1))
    merged = base._merged(x.shape[2:], x.stride()[2:])
    return None if merged is None else (x.stride(0), x.stride(1), merged[1])


def launch(config: Config, *args: Any) -> Outputs:
    """Run Triton with one config."""
    from torchstone.kernels.device import norm as device

    x, weight, bias, eps, activation = args
    y, mean, variance = _fake(x, weight, bias, eps, activation)
    if _strides(x) is None or _strides(y) is None or _inside(x) != _inside(y):
        near = x.contiguous()
        found = launch(space(near).default(), near, weight, bias, eps, activation)
        return y.copy_(found[0]), found[1], found[2]
    own: dict[str, Any] = {
        "x": x,
        "y": y,
        "weight": None if weight is None else weight.contiguous(),
        "bias": None if bias is None else bias.contiguous(),
        "kept": (mean, variance),
        "affine": 3,
        "channels": (x.shape[1], 1, 1),
        "eps": eps,
        "mean": True,
        "activation": activation,
    }
    xs, ys = _strides(x) or (), _strides(y) or ()
    if _inside(x):
        own |= {"outer": 1, "inner": x.shape[1], "rows": (0, xs[1], 0)}
        own |= {"n": x.numel() // x.shape[1], "columns": (xs[0], ys[0])}
    else:
        own |= {"outer": x.shape[1], "inner": 1, "rows": (xs[1], 1, ys[1])}
        own |= {"n": x.shape[0], "columns": (xs[0], ys[0])}
        own |= {"plane": math.prod(x.shape[2:]), "planes": (xs[2], ys[2])}
    device.run(config, device.Problem(**own))
    return y, mean, variance


def _fake(x: torch.Tensor, weight: Optional, bias: Optional, eps: float, activation: str) -> Outputs:
    wide = torch.promote_types(x.dtype, torch.float32)
    mean = x.new_empty((x.shape[1],), dtype=wide)
    return base.like(x, x.shape), mean, torch.empty_like(mean)


KERNEL = base.kernel(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    _fake,
    Kernel(
        name="batch_norm",
        op=reference,
        reference=reference,
        refuses=refuses,
        sizes=sizes,
        work=work,
        space=space,
        launch=launch,
        device="norm",
        follow=lambda shape, x, weight, bias, *rest: tuple(
            (shape[1],) for t in (weight, bias) if t is not None
        ),
    ),
)
"""``batch_norm(x, weight, bias, eps, activation)`` of (batch, channels, ...): the result in the layout
of ``x``, and mean and biased variance of each channel in float32. Running statistics are for the caller
to keep."""
