"""What rules ask of the arguments of operations: numbers, sizes that are known, per-channel tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torchstone.rewrite.pattern import Op, variables
from torchstone.rewrite.rule import Rule, rule

__all__ = [
    "ADD",
    "CONV",
    "CONV_TRANSPOSE",
    "DIV",
    "MUL",
    "SUB",
    "conv_shapes",
    "each",
    "floating",
    "is_one",
    "known",
    "made",
    "number",
    "per_channel",
    "same_dtype",
    "sane",
]

aten = torch.ops.aten

ADD = (aten.add.Tensor,)
SUB = (aten.sub.Tensor, aten.subtract.Tensor)
MUL = (aten.mul.Tensor, aten.multiply.Tensor)
DIV = (aten.div.Tensor, aten.divide.Tensor, aten.true_divide.Tensor)
CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
CONV_TRANSPOSE = {
    1: aten.conv_transpose1d.default,
    2: aten.conv_transpose2d.input,
    3: aten.conv_transpose3d.input,
}

_SANE = 60
"""Binary exponent up to which constants are merged: no product of two leaves float32's range."""


def made(name: str, pattern: Op, **domain: Any) -> Callable[[Callable[[SimpleNamespace], Any]], Rule]:
    """Make a named rule of a function that takes the pattern's variables as one namespace.

    For what is written once for many operations, or has more variables than a function should have
    parameters.

    :param domain: as :func:`torchstone.rewrite.rule.rule` takes it.
    """

    def make(function: Callable[[SimpleNamespace], Any]) -> Rule:
        def replacement(**given: Any) -> Any:
            return function(SimpleNamespace(**given))

        parameters = [inspect.Parameter(v, inspect.Parameter.KEYWORD_ONLY) for v in variables(pattern)]
        replacement.__name__, replacement.__doc__ = name, function.__doc__
        replacement.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return rule(pattern, **domain)(replacement)

    return make


def number(value: Any) -> bool:
    """Whether it is a number that the program has written down, not a size that varies."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def sane(*values: Any) -> bool:
    """Whether all are numbers, none zero, and the product of any two is well within float32's range."""
    return all(number(v) and v and abs(math.frexp(v)[1]) <= _SANE and math.isfinite(v) for v in values)


def known(sizes: Any) -> bool:
    """Whether all sizes are the same in every call."""
    return isinstance(sizes, Sequence) and all(type(size) is int for size in sizes)


def is_one(size: Any) -> bool:
    """Whether a size is one in every call."""
    return type(size) is int and size == 1


def floating(*tensors: Any) -> bool:
    """Whether all are real floating-point tensors."""
    return all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors)


def same_dtype(*tensors: Any) -> bool:
    """Whether those that are there are floating-point tensors of one dtype."""
    there = [t for t in tensors if t is not None]
    return floating(*there) and len({t.dtype for t in there}) == 1


def each(value: Any, many: int) -> list[int] | None:
    """A convolution's argument for each of its ``many`` spatial dims; None where it is not known."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not known(values) or len(values) not in (1, many):
        return None
    return values * many if len(values) == 1 else values


def per_channel(value: Any, x: Any, rank: int, dim: int, channels: Any) -> Any:
    """What an elementwise operand is for each channel.

    :param value: a number or a tensor, broadcast against a tensor ``y``.
    :param x: a floating-point tensor of the dtype and device of ``y``.
    :param rank: dims of ``y``.
    :param dim: which of them, counted from the end, are the channels.
    :param channels: how many.
    :returns: the number, or a tensor of shape (channels,) or (1,) in that dtype; None where it differs
        within a channel, makes the result larger or of another dtype, or where that is not known.
    """
    if number(value):
        return value if sane(value) else None
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.dim() > rank:
        return None
    promotes = value.is_floating_point() and value.dim() > 0 and value.dtype != x.dtype
    if value.device != x.device or promotes or not known([channels]):
        return None
    sizes = list(value.shape)
    if value.dim() >= -dim and known(sizes[dim:]) and sizes[dim] == channels:
        sizes[dim] = 1
    return value.reshape(-1).to(x.dtype) if all(map(is_one, sizes)) else None


def conv_shapes(many: int, *, transposed: bool = False, x: str = "") -> dict[str, str]:
    """The domain of a convolution of ``many`` spatial dims, with its groups a size called ``g``.

    :param x: other spatial sizes than up to 8 each.
    """
    spatial = x or " ".join("hwd"[:many])
    kernel = " ".join(f"{k}<{5 if many < 3 else 4}" for k in "klm"[:many])
    weight = f"g*i o<4 {kernel}" if transposed else f"g*o<4 i {kernel}"
    return {"x": f"b<4 g<4*i<4 {spatial}", "weight": weight, "bias": "g*o?"}
