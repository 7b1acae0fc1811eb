"""Scales and shifts that disappear in the weights of the layer beside them, and steps that cancel.

A layer here is a linear map, a matrix product, a convolution or a transposed one. What is constant is
computed ahead of time, so a layer whose scale was folded does no more work than the layer alone; where
it is not constant, what folding costs is weighed like everything else. An addition *before* a layer is
not folded unless it is a batch norm's, which is computed as a scale and a shift anyway: the two
products could cancel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torchstone.rewrite.families import folding_steps
from torchstone.rewrite.families.arguments import (
    ADD,
    CONV,
    CONV_TRANSPOSE,
    DIV,
    MUL,
    SUB,
    conv_shapes,
    each,
    known,
    made,
    number,
    per_channel,
    same_dtype,
)
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule, rule

__all__ = ["RULES"]

aten = torch.ops.aten
_NUMBERS = (0.3, -2, 3.0)
_NORM = tuple(V(n) for n in ("scale", "shift", "mean", "var"))
_NORM_SETTINGS = (False, V("momentum"), V("eps"), V("cudnn"))
_NORM_DOMAIN: dict[str, Sequence[Any]] = {
    "momentum": (0.1,),
    "eps": (1e-5, 1e-3),
    "cudnn": (False, True),
}


@dataclass(frozen=True)
class _Layer:
    """A kind of layer."""

    name: str
    """As rules' names end."""
    target: Any
    """The overload."""
    settings: tuple[str, ...]
    """Variables for its arguments after x, weight and bias."""
    shapes: Mapping[str, str]
    """Domain of x, weight and bias."""
    constants: Mapping[str, Sequence[Any]]
    """Domain of the settings."""
    channel: int
    """Dim of the channels in its input and its result, from the end."""

    def of(self, x: Any) -> Op:
        """The pattern, with something in place of its input."""
        if self.name == "product":
            return op(self.target, x, V("weight"))
        return op(self.target, x, V("weight"), V("bias"), *map(V, self.settings))

    @property
    def transposed(self) -> bool:
        """Whether in channels come first in its weight."""
        return self.target in CONV_TRANSPOSE.values()

    def holds(self, given: SimpleNamespace) -> bool:
        """Whether it is called on a batch, with what is known, all of one dtype."""
        x, weight = given.x, given.weight
        if not same_dtype(x, weight, getattr(given, "bias", None)) or not known(weight.shape):
            return False
        if self.name == "product":
            return bool(weight.dim() == 2 and x.dim() > 1)
        lists = [getattr(given, n) for n in self.settings]
        values = [v for one in lists for v in (one if isinstance(one, list | tuple) else [one])]
        return known(values) and bool(x.dim() == weight.dim() or self.name == "linear")

    def sizes(self, given: SimpleNamespace) -> tuple[int, int]:
        """How many channels come in, and how many go out."""
        first, second = given.weight.shape[:2]
        if self.name == "product":
            return first, second
        groups = getattr(given, "groups", 1)
        return (first, second * groups) if self.transposed else (second * groups, first)

    def run(self, given: SimpleNamespace, weight: Any, bias: Any) -> Any:
        """The layer with another weight and bias."""
        if self.name != "product":
            return self.target(given.x, weight, bias, *(getattr(given, n) for n in self.settings))
        return torch.matmul(given.x, weight) if bias is None else F.linear(given.x, weight.t(), bias)

    def beside(self, given: SimpleNamespace, values: Any, *, out: bool) -> Any:
        """One value for each out (in) channel, or one for all, in a shape that multiplies the weight."""
        if number(values) or values.shape[0] == 1:
            return values
        ones = [1] * (given.weight.dim() - 2)
        if self.name == "product":
            return values if out else values.unsqueeze(-1)
        if out is not self.transposed:  # the channels are the weight's first dim
            return values.reshape(-1, 1, *ones)
        groups, rows = getattr(given, "groups", 1), given.weight.shape[0]
        if groups == 1:
            return values.reshape(1, -1, *ones)
        spread = values.reshape(groups, 1, -1).expand(-1, rows // groups, -1)
        return spread.reshape(rows, -1, *ones)


def _convolutions() -> tuple[_Layer, ...]:
    found = []
    for many in (1, 2, 3):
        settings: dict[str, Sequence[Any]] = {
            "stride": ([1], [2] * many),
            "padding": ([0], [1] * many),
            "dilation": ([1], [2] * many),
            "output_padding": ([0], [1] * many),
            "groups": "g",
        }
        for name, target, order in (
            ("conv", CONV, ("stride", "padding", "dilation", "groups")),
            (
                "conv_transpose",
                CONV_TRANSPOSE,
                ("stride", "padding", "output_padding", "groups", "dilation"),
            ),
        ):
            shapes = conv_shapes(many, transposed=target is CONV_TRANSPOSE)
            domain = {n: settings[n] for n in order}
            found.append(_Layer(f"{name}{many}d", target[many], order, shapes, domain, -1 - many))
    return tuple(found)


_LINEAR = _Layer(
    "linear", aten.linear.default, (), {"x": "*b m k", "weight": "n k", "bias": "n?"}, {}, -1
)
_PRODUCT = _Layer("product", aten.matmul.default, (), {"x": "*b m k", "weight": "k n"}, {}, -1)
_LAYERS = (_LINEAR, _PRODUCT, *_convolutions())


def _bias(given: SimpleNamespace, channels: int) -> Any:
    bias = getattr(given, "bias", None)
    return given.weight.new_zeros(channels) if bias is None else bias


def _affine(given: SimpleNamespace) -> tuple[Any, Any]:
    """Scale and shift of each channel in a batch norm that uses running statistics."""
    scale = torch.rsqrt(given.var + given.eps)
    scale = scale if given.scale is None else scale * given.scale
    shift = -given.mean * scale
    return scale, shift if given.shift is None else shift + given.shift


def _channels(layer: _Layer, *, out: bool) -> str:
    """Sizes of a per-channel operand in a rule's domain."""
    if layer.channel == -1:
        return "n|1 n|1|" if out else "k|1 k|1|"
    size, ones = "g*o" if out else "g*i", " 1" * (-1 - layer.channel)
    return f"{size}{ones}|1 {size}{ones}|1{ones}|"


def _scaled_after(layer: _Layer) -> Rule:
    @made(
        f"scale_after_{layer.name}",
        op((*MUL, *DIV), layer.of(V("x")), V("s"), bind="how"),
        family="folding",
        shapes={**layer.shapes, "s": _channels(layer, out=True)},
        constants={**layer.constants, "s": _NUMBERS, "how": (MUL[0], DIV[0])},
    )
    def scaled(given: SimpleNamespace) -> Any:
        """s (W x + b) = (s W) x + s b, for s a number or one for each out channel; likewise 1 / s."""
        if not layer.holds(given):
            return NotImplemented
        channels = layer.sizes(given)[1]
        s = per_channel(given.s, given.x, given.x.dim(), layer.channel, channels)
        if s is None:
            return NotImplemented
        bias = getattr(given, "bias", None)
        weight = given.how(given.weight, layer.beside(given, s, out=True))
        return layer.run(given, weight, None if bias is None else given.how(bias, s))

    return scaled


def _shifted_after(layer: _Layer) -> tuple[Rule, ...]:
    domain: dict[str, Any] = {
        "family": "folding",
        "shapes": {**layer.shapes, "t": _channels(layer, out=True)},
    }
    numbers = {**layer.constants, "t": _NUMBERS}

    def shift(given: SimpleNamespace) -> Any:
        if not layer.holds(given):
            return None
        return per_channel(given.t, given.x, given.x.dim(), layer.channel, layer.sizes(given)[1])

    @made(
        f"shift_after_{layer.name}",
        op((*ADD, *SUB), layer.of(V("x")), V("t"), bind="how"),
        constants={**numbers, "how": (ADD[0], SUB[0])},
        **domain,
    )
    def shifted(given: SimpleNamespace) -> Any:
        """(W x + b) + t = W x + (b + t), for t a number or one for each out channel; likewise - t."""
        t = shift(given)
        if t is None:
            return NotImplemented
        return layer.run(given, given.weight, given.how(_bias(given, layer.sizes(given)[1]), t))

    def subtracted(given: SimpleNamespace) -> Any:
        """t - (W x + b) = (-W) x + (t - b), for t a number or one for each out channel."""
        t = shift(given)
        if t is None:
            return NotImplemented
        return layer.run(given, -given.weight, t - _bias(given, layer.sizes(given)[1]))

    by_number = op(aten.rsub.Scalar, layer.of(V("x")), V("t"))
    only_numbers = {"family": "folding", "shapes": layer.shapes}
    tensors = op(SUB, V("t"), layer.of(V("x")))
    return (
        shifted,
        made(f"{layer.name}_subtracted_from_number", by_number, constants=numbers, **only_numbers)(
            subtracted
        ),
        made(f"{layer.name}_subtracted_from", tensors, constants=layer.constants, **domain)(subtracted),
    )


def _scaled_before(layer: _Layer) -> Rule:
    @made(
        f"scale_before_{layer.name}",
        layer.of(op((*MUL, *DIV), V("x"), V("s"), bind="how")),
        family="folding",
        shapes={**layer.shapes, "s": _channels(layer, out=False)},
        constants={**layer.constants, "s": _NUMBERS, "how": (MUL[0], DIV[0])},
    )
    def scaled(given: SimpleNamespace) -> Any:
        """W (s x) + b = (W s) x + b, for s a number or one for each in channel; likewise x / s."""
        if not layer.holds(given):
            return NotImplemented
        channels = layer.sizes(given)[0]
        s = per_channel(given.s, given.x, given.x.dim(), layer.channel, channels)
        if s is None:
            return NotImplemented
        weight = given.how(given.weight, layer.beside(given, s, out=False))
        return layer.run(given, weight, getattr(given, "bias", None))

    return scaled


def _normed_after(layer: _Layer) -> Rule:
    size = "n" if layer is _LINEAR else "g*o"
    norm = {"scale": f"{size}?", "shift": f"{size}?", "mean": size, "var": f"+{size}"}
    shapes = {**layer.shapes, **({"x": "m k"} if layer is _LINEAR else {}), **norm}

    @made(
        f"batch_norm_after_{layer.name}",
        op(aten.batch_norm.default, layer.of(V("x")), *_NORM, *_NORM_SETTINGS),
        family="folding",
        shapes=shapes,
        constants={**layer.constants, **_NORM_DOMAIN},
    )
    def normed(given: SimpleNamespace) -> Any:
        """With running statistics, bn(W x + b) = (a W) x + a (b - m) + shift, a = scale / deviation."""
        if not layer.holds(given) or given.x.dim() != given.weight.dim():
            return NotImplemented
        if not same_dtype(given.x, given.scale, given.shift, given.mean, given.var):
            return NotImplemented
        scale, shift = _affine(given)
        bias = shift if given.bias is None else given.bias * scale + shift
        return layer.run(given, given.weight * layer.beside(given, scale, out=True), bias)

    return normed


def _normed_before(layer: _Layer) -> Rule:
    size = "k" if layer is _LINEAR else "g*i"
    norm = {"scale": f"{size}?", "shift": f"{size}?", "mean": size, "var": f"+{size}"}
    shapes = {**layer.shapes, **({"x": "m k"} if layer is _LINEAR else {}), **norm}

    @made(
        f"batch_norm_before_{layer.name}",
        layer.of(op(aten.batch_norm.default, V("x"), *_NORM, *_NORM_SETTINGS)),
        family="folding",
        shapes=shapes,
        constants={**layer.constants, **_NORM_DOMAIN},
    )
    def normed(given: SimpleNamespace) -> Any:
        """With running statistics and no padding, W bn(x) + b = (W a) x + b + W (shift - a mean)."""
        many = given.weight.dim() - 2
        if not layer.holds(given) or given.x.dim() != given.weight.dim():
            return NotImplemented
        if not same_dtype(given.x, given.scale, given.shift, given.mean, given.var):
            return NotImplemented
        if many and each(given.padding, many) != [0] * many:
            return NotImplemented  # borders are zeros after the norm, not before it
        scale, shift = _affine(given)
        taps = (given.weight * layer.beside(given, shift, out=False)).flatten(1).sum(1)
        weight = given.weight * layer.beside(given, scale, out=False)
        return layer.run(given, weight, taps if given.bias is None else given.bias + taps)

    return normed


@rule(
    op(
        aten.linear.default,
        op(aten.linear.default, V("x"), V("weight_1"), V("bias_1")),
        V("weight_2"),
        V("bias_2"),
    ),
    family="folding",
    shapes={
        "x": "*b m k",
        "weight_1": "n k",
        "bias_1": "n?",
        "weight_2": "o n",
        "bias_2": "o?",
    },
)
def linear_of_linear(x: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any) -> Any:
    """(x Aᵀ + a) Bᵀ + b = x (B A)ᵀ + (B a + b)."""
    bias = bias_2 if bias_1 is None else F.linear(bias_1, weight_2, bias_2)
    return F.linear(x, weight_2 @ weight_1, bias)


RULES: tuple[Rule, ...] = (
    linear_of_linear,
    *folding_steps.MERGING,
    *(_normed_after(layer) for layer in _LAYERS if layer is not _PRODUCT),
    *(_normed_before(layer) for layer in _LAYERS if layer is not _PRODUCT and not layer.transposed),
    *(_scaled_after(layer) for layer in _LAYERS),
    *(r for layer in _LAYERS for r in _shifted_after(layer)),
    *(_scaled_before(layer) for layer in _LAYERS),
    *folding_steps.MOVING,
)
