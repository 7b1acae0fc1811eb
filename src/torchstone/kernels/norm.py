"""Layer, RMS and group norm: rows normalized by statistics of their own. Instance norm is a group a
channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchstone.kernels import base
from torchstone.kernels.base import Kernel
from torchstone.kernels.softmax import row_sizes, row_space
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space

__all__ = ["ACTIVATIONS", "KERNELS", "activated"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""What a kernel can apply to its results before it stores them; ``gelu`` is the exact one."""

Optional = torch.Tensor | None


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of ``x``; unknown names are the caller's to refuse."""
    return ACTIVATIONS[activation](x)


def _layer(
    x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> torch.Tensor:
    wide = _wide(x)
    mean = wide.mean(list(dims), keepdim=True)
    apart = wide - mean
    scaled = apart * torch.rsqrt(apart.square().mean(list(dims), keepdim=True) + eps)
    return _affine(scaled, dims, weight, bias).to(x.dtype)


def _rms(
    x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> torch.Tensor:
    wide = _wide(x)
    scaled = wide * torch.rsqrt(wide.square().mean(list(dims), keepdim=True) + eps)
    return _affine(scaled, dims, weight, bias).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _affine(x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional) -> torch.Tensor:
    first = min(d % x.dim() for d in dims)
    after = x.dim() - first - len(dims)
    for tensor, apply in ((weight, torch.mul), (bias, torch.add)):
        if tensor is not None:
            x = apply(x, tensor.reshape(*tensor.shape, *[1] * after))
    return x


def _refuses(
    x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> str | None:
    why = base.unfit(x, weight, bias)
    if why is None and x.dim() == 0:
        return "a scalar has no rows"
    return why or (
        None if dims and base.span(x, dims) else f"dimensions {list(dims)} are not neighbours"
    )


def _sizes(
    x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> dict[str, int]:
    first, last = base.span(x, dims) or (0, x.dim() - 1)
    return row_sizes(x, first, last)


def _work(
    x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[float, float]:
    """Read once, written once; a copy is a further read and write."""
    first, last = base.span(x, dims) or (0, x.dim() - 1)
    copies = 2 if base.copied(x, first, last) else 1
    return 2.0 * copies * base.bytes_of(x) + base.bytes_of(weight, bias), 8.0 * x.numel()


def _space(x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float) -> Space:
    return row_space(_sizes(x, dims, weight, bias, eps), base.multiprocessors(x.device))


def _fake(
    x: torch.Tensor, dims: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _follow(shape: tuple[int, ...], *args: Any) -> tuple[Any, ...]:
    dims, weight, bias = args[1:4]
    own = tuple(shape[d] for d in sorted(d % len(shape) for d in dims))
    return tuple(own for tensor in (weight, bias) if tensor is not None)


def _launch(
    config: Config,
    x: torch.Tensor,
    dims: Sequence[int],
    affine: tuple[Optional, Optional],
    how: tuple[float, bool],
) -> torch.Tensor:
    from torchstone.kernels.device import norm as device

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = base.rows_of(x, *(base.span(x, dims) or (0, x.dim() - 1)))
    so, sn, si = rows.strides
    weight, bias = (None if t is None else t.contiguous() for t in affine)
    device.run(
        config,
        device.Problem(
            x=rows.x,
            y=y,
            weight=weight,
            bias=bias,
            outer=rows.outer,
            inner=rows.inner,
            rows=(so, si, rows.n * rows.inner),
            n=rows.n,
            columns=(sn, rows.inner),
            affine=1,
            eps=how[0],
            mean=how[1],
        ),
    )
    return y


def _launch_layer(config: Config, *args: Any) -> torch.Tensor:
    x, dims, weight, bias, eps = args
    return _launch(config, x, dims, (weight, bias), (eps, True))


def _launch_rms(config: Config, *args: Any) -> torch.Tensor:
    x, dims, weight, bias, eps = args
    return _launch(config, x, dims, (weight, bias), (eps, False))


def _group(  # noqa: PLR0913
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, activation: str
) -> torch.Tensor:
    wide = _wide(x)
    each = wide.reshape(x.shape[0], groups, -1)
    apart = each - each.mean(-1, keepdim=True)
    scaled = (apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    return activated(_affine(scaled, (1,), weight, bias), activation).to(x.dtype)


def _group_refuses(  # noqa: PLR0913
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, activation: str
) -> str | None:
    if activation not in ACTIVATIONS:
        return f"no activation is called {activation}"
    return base.unfit(x, weight, bias)


def _group_sizes(x: torch.Tensor, groups: int, *rest: Any) -> dict[str, int]:
    each = math.prod(x.shape[1:]) // groups
    return {"outer": x.shape[0] * groups, "n": each, "inner": 1}


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    # a view: one dimension becomes two
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _group_work(  # noqa: PLR0913
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, activation: str
) -> tuple[float, float]:
    """Read once, written once; a copy is a further read and write."""
    copies = 2 if base.copied(_grouped(x, groups), 2, x.dim()) else 1
    return 2.0 * copies * base.bytes_of(x) + base.bytes_of(weight, bias), 8.0 * x.numel()


def _group_space(x: torch.Tensor, groups: int, *rest: Any) -> Space:
    return row_space(_group_sizes(x, groups), base.multiprocessors(x.device), loads=3)


def _group_fake(  # noqa: PLR0913
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, activation: str
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _group_launch(config: Config, *args: Any) -> torch.Tensor:
    from torchstone.kernels.device import norm as device

    x, groups, weight, bias, eps, activation = args
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = base.rows_of(_grouped(x, groups), 2, x.dim())
    per = x.shape[1] // groups
    device.run(
        config,
        device.Problem(
            x=rows.x,
            y=y,
            weight=None if weight is None else weight.contiguous(),
            bias=None if bias is None else bias.contiguous(),
            outer=rows.outer,
            inner=1,
            rows=(rows.strides[0], 1, rows.n),
            n=rows.n,
            columns=(rows.strides[1], 1),
            affine=2,
            channels=(groups, per, rows.n // per),
            eps=eps,
            mean=True,
            activation=activation,
        ),
    )
    return y


def _row_kernel(name: str, reference: Any, launch: Any) -> Kernel:
    return base.kernel(
        f"{name}(Tensor x, int[] dims, Tensor? weight, Tensor? bias, float eps) -> Tensor",
        _fake,
        Kernel(
            name=name,
            op=reference,
            reference=reference,
            refuses=_refuses,
            sizes=_sizes,
            work=_work,
            space=_space,
            launch=launch,
            device="norm",
            follow=_follow,
        ),
    )


KERNELS = (
    _row_kernel("layer_norm", _layer, _launch_layer),
    _row_kernel("rms_norm", _rms, _launch_rms),
    base.kernel(
        "group_norm(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, str activation)"
        " -> Tensor",
        _group_fake,
        Kernel(
            name="group_norm",
            op=_group,
            reference=_group,
            refuses=_group_refuses,
            sizes=_group_sizes,
            work=_group_work,
            space=_group_space,
            launch=_group_launch,
            device="norm",
            follow=base.fixed,
        ),
    ),
)
"""``layer_norm`` and ``rms_norm(x, dims, weight, bias, eps)`` over neighbouring dimensions, weight and
bias of their sizes; ``group_norm(x, groups, weight, bias, eps, activation)`` of (batch, channels, ...),
weight and bias of the channels."""
