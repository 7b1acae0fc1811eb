"""The operator ``split_pointwise``: float32 convolutions of kernel size 1 on bfloat16 tensor cores.

Such a convolution is a matrix product over the channels: nothing is unfolded, and nothing copied, since
the device code of :mod:`torchstone.kernels.split_gemm` takes any strides. Channels-last inputs give
channels-last outputs, as PyTorch's own convolutions do; others contiguous ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchstone.kernels import base, split_gemm
from torchstone.kernels.split_gemm import How
from torchstone.recipe import Numerics
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space

__all__ = ["POINTWISE"]

_door: Any = torch
"""Parts of torch that have no types."""


def _wrong(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> str | None:
    if x.dim() < 3:
        return f"the input has {x.dim()} dimensions, not a batch, channels and others"
    return split_gemm.layer_wrong(x, w_parts, bias, parts, epilogue)


def reference(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> Tensor:
    """The convolution in the dtype of ``x``, with the weights that the parts stand for."""
    y = split_gemm.linear_reference(x.movedim(1, -1), w_parts, bias, parts, epilogue)
    return y.movedim(-1, 1)


def _refuses(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> str | None:
    return _wrong(x, w_parts, bias, parts, epilogue) or base.unfit(x, w_parts, bias)


def _last(x: Tensor) -> bool:
    """Whether the channels lie last in memory."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _sizes(x: Tensor, w_parts: Tensor, _bias: Tensor | None, parts: int, *_: Any) -> dict[str, int]:
    batch, k, *places = x.shape
    found = {"batch": batch, "m": math.prod(places), "n": w_parts.shape[1], "k": k, "parts": parts}
    return {**found, "batch": 1, "m": batch * found["m"]} if _last(x) else found


def _work(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, *_: Any) -> tuple[float, float]:
    found = _sizes(x, w_parts, bias, parts)
    copies = 1 if x.is_contiguous() or _last(x) else 3
    moved = copies * base.bytes_of(x) + base.bytes_of(w_parts, bias)
    return moved + 4.0 * found["batch"] * found["m"] * found["n"], split_gemm.operations(found)


def _space(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, *_: Any) -> Space:
    return split_gemm.space_of(_sizes(x, w_parts, bias, parts), x.device, split_b=False)


def _launch(config: Config | None, x: Tensor, w_parts: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Both sides as matrices of places and channels, in whatever order they lie in memory."""
    y = _empty(x, w_parts)
    if _last(x):
        flat, out = x.movedim(1, -1).flatten(0, -2)[None], y.movedim(1, -1).flatten(0, -2)[None]
    else:
        flat, out = x.contiguous().flatten(2).mT, y.flatten(2).mT
    split_gemm.product(flat, w_parts, bias, How(config, *how), out)
    return y


def _empty(x: Tensor, w_parts: Tensor) -> Tensor:
    batch, _, *places = x.shape
    if _last(x):
        return x.new_empty((batch, *places, w_parts.shape[1])).movedim(-1, 1)
    return x.new_empty((batch, w_parts.shape[1], *places))


def _follow(shape: Sequence[int], _x: Any, w_parts: Any, bias: Any, *_: Any) -> tuple[Any, ...]:
    parts, n, _k = w_parts.shape
    return ((parts, n, shape[1]), (n,)) if bias is not None else ((parts, n, shape[1]),)


def _fake(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> Tensor:
    split_gemm.check("split_pointwise", _wrong(x, w_parts, bias, parts, epilogue))
    _door._check(x.shape[1] == w_parts.shape[2], lambda: "the input's channels are not the weights'")
    return _empty(x, w_parts)


def _run(x: Tensor, w_parts: Tensor, bias: Tensor | None, parts: int, epilogue: str) -> Tensor:
    why = _wrong(x, w_parts, bias, parts, epilogue)
    n, k = w_parts.shape[-2:]
    if why is None and (x.shape[1] != k or (bias is not None and len(bias) != n)):
        why = f"sizes {tuple(x.shape)} and {tuple(w_parts.shape)} do not go together"
    split_gemm.check("split_pointwise", why)
    args = (x, w_parts, bias, parts, epilogue)
    return _launch(split_gemm.config_of(POINTWISE, args), *args)


POINTWISE = split_gemm.SplitKernel(
    name="split_pointwise",
    op=split_gemm.registered(
        "split_pointwise(Tensor x, Tensor w_parts, Tensor? bias, int parts, str epilogue) -> Tensor",
        _run,
        _fake,
    ),
    reference=reference,
    refuses=_refuses,
    sizes=_sizes,
    work=_work,
    space=_space,
    launch=_launch,
    device="split_gemm",
    follow=_follow,
    numerics=Numerics.LOSSY,
)
"""``epilogue(conv(x, w) + bias)``: float32 (batch, k, ...), parts (parts, n, k) and float32 (n,) to
float32 (batch, n, ...), with one or more dimensions of places."""
