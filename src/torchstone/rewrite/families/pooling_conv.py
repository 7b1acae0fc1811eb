"""Sums, means and average pools of convolutions, without the convolution's output.

Over all output positions a tap of the kernel meets one box of the input. So a sum over a spatial dim
is the convolution of *box sums*, one for each tap, and taps that meet the same box are added first. A
transposed convolution that crops nothing has one box, the whole input. Average pooling is a
convolution too, so the two kernels become one, ahead of time; after a transposed convolution whose
stride divides the pool's, what is left is an ordinary one at the input's resolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torchstone.rewrite.families.arguments import (
    CONV,
    CONV_TRANSPOSE,
    conv_shapes,
    each,
    known,
    made,
    same_dtype,
)
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

aten = torch.ops.aten
_CONV: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_ADAPTIVE = (
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)
_POOLS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)

Box = tuple[int, int, int]
"""Start, stop and step of the inputs that a tap meets."""


@dataclass(frozen=True)
class _Convolution:
    """A call of a convolution whose arguments are known."""

    x: Any
    """Input, (batch, in channels, \\*spatial)."""
    weight: Any
    """(out, in / groups, \\*kernel); (in, out / groups, \\*kernel) where transposed."""
    bias: Any
    """(out,) or None."""
    stride: list[int]
    """For each spatial dim, as the other lists are."""
    padding: list[int]
    """Cropped from the output, where transposed."""
    dilation: list[int]
    """Steps between taps."""
    more: list[int] | None
    """Output padding of a transposed convolution; None for an ordinary one."""
    groups: int
    """Groups of channels."""

    @property
    def out(self) -> list[int]:
        """Spatial sizes of the result."""
        return list(starmap(self._out, enumerate(self.x.shape[2:])))

    def _out(self, i: int, size: int) -> int:
        reach: int = self.dilation[i] * (self.weight.shape[2 + i] - 1)
        if self.more is not None:
            return (size - 1) * self.stride[i] - 2 * self.padding[i] + reach + self.more[i] + 1
        return (size + 2 * self.padding[i] - reach - 1) // self.stride[i] + 1

    def run(self) -> Any:
        """Its result."""
        many = len(self.stride) - 1
        tensors = (self.x, self.weight, self.bias)
        if self.more is None:
            return _CONV[many](*tensors, self.stride, self.padding, self.dilation, self.groups)
        last = (self.more, self.groups, self.dilation)
        return _TRANSPOSED[many](*tensors, self.stride, self.padding, *last)


def _convolution(given: SimpleNamespace) -> _Convolution | None:
    """The call that a pattern's variables are; None where something about it is not known."""
    x, weight = given.x, given.weight
    many = weight.dim() - 2
    if x.dim() != weight.dim() or not known([*x.shape[1:], *weight.shape]):
        return None
    if not same_dtype(x, weight, given.bias) or not known([given.groups]):
        return None
    transposed = hasattr(given, "output_padding")
    stride, padding, dilation = (each(v, many) for v in (given.stride, given.padding, given.dilation))
    more = each(given.output_padding, many) if transposed else None
    if stride is None or padding is None or dilation is None or (transposed and more is None):
        return None
    call = _Convolution(x, weight, given.bias, stride, padding, dilation, more, given.groups)
    return call if all(size > 0 for size in call.out) else None


def _boxes(call: _Convolution, i: int) -> list[Box]:
    """What each tap of the kernel meets along a spatial dim, over all output positions."""
    size, stride, out = call.x.shape[2 + i], call.stride[i], call.out[i]
    found: list[Box] = []
    for tap in range(call.weight.shape[2 + i]):
        shift = tap * call.dilation[i] - call.padding[i]
        if call.more is None:  # reads inputs shift + stride * o
            first = max(0, -(shift // stride))
            start, stop, step = first * stride + shift, (out - 1) * stride + shift + 1, stride
        else:  # writes outputs shift + stride * input
            start, stop, step = max(0, -(shift // stride)), (out - 1 - shift) // stride + 1, 1
        stop = min(size, stop)
        found.append((start, stop, step) if start < stop else (0, 0, 1))
    return found


def _box_means(x: Any, dim: int, boxes: Sequence[Box]) -> list[Any]:
    """Means over boxes along a dim; from one pass over all of it for those that leave out little.

    What is left out is taken from the mean of the whole dim, at most a quarter of it, so that rounding
    stays that of a sum over the dim.
    """
    size = x.shape[dim]
    left_out = [size - (stop - start) if step == 1 else size for start, stop, step in boxes]
    shared = sum(4 * cut <= size for cut in left_out) > 1 or 0 in left_out
    whole = x.mean(dim, keepdim=True) if shared else None
    found = []
    for (start, stop, step), cut in zip(boxes, left_out, strict=True):
        if whole is None or 4 * cut > size:
            found.append(aten.slice.Tensor(x, dim, start, stop, step).mean(dim, keepdim=True))
            continue
        rest = whole * cut if cut else None
        for first, many in ((0, start), (stop, size - stop)):
            if many:
                rest = rest - x.narrow(dim, first, many).sum(dim, keepdim=True)
        found.append(whole if rest is None else whole + rest / (stop - start))
    return found


def _boxed(call: _Convolution, i: int, *, mean: bool) -> _Convolution | None:
    """The sums (means) over output positions along a spatial dim, from an input with one size a box.

    Boxes are averaged and their lengths put into the kernel, so that half formats do not overflow.

    :returns: None where no tap meets any input.
    """
    dim, boxes = 2 + i, _boxes(call, i)
    distinct = [box for box in dict.fromkeys(boxes) if box[1]]
    if not distinct:
        return None
    means = _box_means(call.x, dim, distinct)
    kernels = []
    for box in distinct:
        taps = [call.weight.narrow(dim, t, 1) for t, other in enumerate(boxes) if other == box]
        share = len(range(*box)) / (call.out[i] if mean else 1)
        kernels.append(sum(taps[1:], taps[0]) * share)
    if call.more is not None:  # a transposed convolution meets its kernel backwards
        kernels.reverse()
    x, weight = (t[0] if len(t) == 1 else torch.cat(t, dim) for t in (means, kernels))
    return replace(
        call,
        x=x,
        weight=weight,
        stride=_put(call.stride, i, 1),
        padding=_put(call.padding, i, 0 if call.more is None else len(distinct) - 1),
        dilation=_put(call.dilation, i, 1),
        more=None if call.more is None else _put(call.more, i, 0),
    )


def _put(values: Sequence[int], i: int, value: int) -> list[int]:
    return [value if j == i else v for j, v in enumerate(values)]


def _one_channel(call: _Convolution) -> _Convolution:
    """The same sums over output channels: a convolution with one of them."""
    weight, groups = call.weight, call.groups
    if call.more is not None:
        weight = weight.sum(1, keepdim=True)
    else:
        weight = weight.unflatten(0, (groups, -1)).sum(1).flatten(0, 1).unsqueeze(0)
    bias = None if call.bias is None else call.bias.sum(0, keepdim=True)
    return replace(call, weight=weight, bias=bias, groups=1)


def _whole(call: _Convolution) -> Any:
    """The result of a convolution with one output position: a matrix product where it has one group."""
    if call.groups > 1:
        return call.run()
    weight: Any = call.weight
    if call.more is not None:
        weight = _ordinary(weight, 1).flip(list(range(2, weight.dim())))
    out: Any = F.linear(call.x.flatten(1), weight.flatten(1), call.bias)
    return out.unflatten(1, (-1, *[1] * len(call.stride)))


def _ordinary(weight: Any, groups: int) -> Any:
    """The kernel of a transposed convolution with its channels as an ordinary one has them."""
    if groups == 1:
        return weight.transpose(0, 1)
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _reduced(given: SimpleNamespace, dims: Any, *, mean: bool, keepdim: bool) -> Any:
    """The sum or mean over channels, spatial dims or both."""
    call = _convolution(given)
    if call is None or not known(dims):
        return NotImplemented
    rank = call.x.dim()
    places = sorted({d % rank for d in dims})
    spatial = [d - 2 for d in places if d > 1]
    if not places or 0 in places:
        return NotImplemented
    positions, channels = math.prod(call.out[i] for i in spatial), 1
    if 1 in places:
        channels = call.weight.shape[1] * call.groups if call.more is not None else call.weight.shape[0]
        call = _one_channel(call)
    for i in reversed(spatial):  # the last first: its elements are neighbours
        boxed = _boxed(call, i, mean=mean)
        if boxed is None:
            return NotImplemented
        call = boxed
    weight, bias = call.weight, call.bias
    if mean:
        weight = weight / channels
        bias = None if bias is None else bias / channels
    elif bias is not None:
        bias = bias * positions
    call = replace(call, weight=weight, bias=bias)
    out = _whole(call) if len(spatial) == rank - 2 else call.run()
    return out if keepdim else out.squeeze(places)


def _pooled(given: SimpleNamespace) -> Any:
    """An average pool whose windows are all full."""
    call = _convolution(given)
    if call is None:
        return NotImplemented
    window = _window(given, len(call.stride), "")
    if (
        window is None
        or getattr(given, "divisor", None) is not None
        or any(d != 1 for d in call.dilation)
    ):
        return NotImplemented
    size, step = window
    if any(s > o for s, o in zip(size, call.out, strict=True)):
        return NotImplemented
    return _pooled_kernel(call, size, step) if call.more is None else _merged(call, size, step)


def _averaged(weight: Any, i: int, size: int, stride: int) -> Any:
    """A kernel moved ``size`` times by ``stride`` along a spatial dim, and averaged."""
    before = [0] * (2 * (weight.dim() - 3 - i))
    moved = [F.pad(weight, [*before, r * stride, (size - 1 - r) * stride]) for r in range(size)]
    return sum(moved) / size


def _pooled_kernel(call: _Convolution, size: list[int], step: list[int]) -> Any:
    weight = call.weight
    for i, stride in enumerate(call.stride):
        weight = _averaged(weight, i, size[i], stride)
    strides = [a * b for a, b in zip(call.stride, step, strict=True)]
    return replace(call, weight=weight, stride=strides).run()


def _merged(call: _Convolution, size: list[int], step: list[int]) -> Any:
    """A transposed convolution and a pool of m times its stride s: an ordinary convolution of stride m.

    Output j of the first is the sum over i of x[i] w[j + p - s i], so output q of the pool is the sum
    over e of x[m q + e] v[p + K - 1 - s e], where v is w averaged over K places.
    """
    if any(a % b for a, b in zip(step, call.stride, strict=True)):
        return NotImplemented
    weight: Any = _ordinary(call.weight, call.groups)
    borders: list[tuple[int, int]] = []
    strides = [a // b for a, b in zip(step, call.stride, strict=True)]
    for i, stride in enumerate(call.stride):
        weight = _averaged(weight, i, size[i], 1)
        last = weight.shape[2 + i] - 1
        at = call.padding[i] + size[i] - 1
        left, right = (last - at) // stride, at // stride  # e runs from -left to right
        if left + right < 0:
            return NotImplemented  # no window meets an input
        taps = [at - stride * e for e in range(-left, right + 1)]
        weight = torch.cat([weight.narrow(2 + i, t, 1) for t in taps], 2 + i)
        most = (call.out[i] - size[i]) // step[i] * strides[i] + right
        borders.append((left, most - call.x.shape[2 + i] + 1))
    x, padding = call.x, [left for left, _ in borders]
    if any(left != right or left < 0 for left, right in borders):
        x = F.pad(x, [n for pair in reversed(borders) for n in pair])
        padding = [0] * len(step)
    return replace(call, x=x, weight=weight, stride=strides, padding=padding, more=None).run()


_SETTINGS: dict[str, Callable[[int], Sequence[Any]]] = {
    "stride": lambda n: ([1], [1] * n, [2] * n, [2, 3, 1][:n]),
    "padding": lambda n: ([0] * n, [0], [1] * n, [2, 0, 1][:n], [3] * n),
    "dilation": lambda n: ([1] * n, [1], [2] * n, [1, 3, 2][:n]),
    "output_padding": lambda n: ([0], [0] * n, [1] * n, [0, 1, 0][:n]),
}
_ORDER = ("stride", "padding", "dilation", "groups")
_ORDER_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


def _pattern(many: int, transposed: bool) -> Op:
    target, order = (CONV_TRANSPOSE, _ORDER_TRANSPOSED) if transposed else (CONV, _ORDER)
    return op(target[many], V("x"), V("weight"), V("bias"), *map(V, order))


def _domain(many: int, transposed: bool) -> dict[str, Sequence[Any]]:
    order = _ORDER_TRANSPOSED if transposed else _ORDER
    return {name: _SETTINGS[name](many) for name in order if name != "groups"} | {"groups": "g"}


def _reductions(many: int, transposed: bool) -> tuple[Rule, ...]:
    """The rules for one convolution and what it is reduced by."""
    inner, constants = _pattern(many, transposed), _domain(many, transposed)
    shapes = conv_shapes(many, transposed=transposed)
    name = f"conv_transpose{many}d" if transposed else f"conv{many}d"
    spatial = list(range(2, 2 + many))
    dims = {
        "dims": (spatial, [-d - 1 for d in range(many)], spatial[-1:], spatial[:1], [1], [1, *spatial])
    }
    keepdim = {"keepdim": (False, True)}

    @made(
        f"sum_of_{name}",
        op(aten.sum.dim_IntList, inner, V("dims"), V("keepdim")),
        family="pooling",
        shapes=shapes,
        constants={**constants, **dims, **keepdim},
    )
    def summed(given: SimpleNamespace) -> Any:
        """Sum over outputs of conv(x, w) = conv of x summed over what each tap meets; channels: of w."""
        return _reduced(given, given.dims, mean=False, keepdim=given.keepdim)

    @made(
        f"mean_of_{name}",
        op(aten.mean.dim, inner, V("dims"), V("keepdim")),
        family="pooling",
        shapes=shapes,
        constants={**constants, **dims, **keepdim},
    )
    def averaged(given: SimpleNamespace) -> Any:
        """Mean over N outputs of conv(x, w) = conv of x's sum over what each tap meets with w / N."""
        return _reduced(given, given.dims, mean=True, keepdim=given.keepdim)

    @made(
        f"global_pool_of_{name}",
        op(_ADAPTIVE[many - 1], inner, V("size")),
        family="pooling",
        shapes=shapes,
        constants={**constants, "size": ([1] * many, [1], [2] * many)},
    )
    def global_pool(given: SimpleNamespace) -> Any:
        """The average pool to one position is the mean over all of them."""
        if each(given.size, many) != [1] * many:
            return NotImplemented
        return _reduced(given, spatial, mean=True, keepdim=True)

    return summed, averaged, global_pool


def _pool_pattern(many: int, inner: Any, suffix: str = "") -> Op:
    names = ("size", "step", "crop", "ceil", "padded", "divisor")[: 6 if many > 1 else 5]
    return op(_POOLS[many - 1], inner, *(V(n + suffix) for n in names))


def _pool_domain(many: int, suffix: str = "") -> dict[str, Sequence[Any]]:
    found: dict[str, Sequence[Any]] = {
        "size": ([2] * many, [2], [3, 2, 1][:many]),
        "step": ([], [], [2] * many, [2], [3, 2, 1][:many]),
        "crop": ([0] * many, [0], [0], [0], [1]),
        "ceil": (False, False, False, True),
        "padded": (True, False),
    }
    found |= {"divisor": (None, None, None, 3)} if many > 1 else {}
    return {name + suffix: values for name, values in found.items()}


def _pools(many: int, transposed: bool) -> Rule:
    """The rule for one convolution and an average pool."""
    strides = ([1] * many, [1], [2] * many, [3, 2, 1][:many])
    only = {"dilation": ([1] * many, [1], [1], [2]), "stride": strides}

    @made(
        f"avg_pool_of_conv_transpose{many}d" if transposed else f"avg_pool_of_conv{many}d",
        _pool_pattern(many, _pattern(many, transposed)),
        family="pooling",
        shapes=conv_shapes(many, transposed=transposed),
        constants=_domain(many, transposed) | only | _pool_domain(many),
        measured=True,  # the library has other kernels for other sizes
    )
    def avg_pool(given: SimpleNamespace) -> Any:
        """pool(conv(x, w)) = conv(x, w averaged over the window), by the product of the strides."""
        return _pooled(given)

    return avg_pool


def _pool_of_pool(many: int) -> Rule:
    @made(
        f"avg_pool_of_avg_pool{many}d",
        _pool_pattern(many, _pool_pattern(many, V("x"), "_1")),
        family="pooling",
        shapes={"x": "b c " + " ".join(f"2*{d}" for d in "hwd"[:many])},
        constants=_pool_domain(many, "_1") | _pool_domain(many),
    )
    def pooled(given: SimpleNamespace) -> Any:
        """The mean over k windows of n each, side by side, is the mean over one window of k n."""
        if any(getattr(given, n, None) is not None for n in ("divisor", "divisor_1")):
            return NotImplemented
        first, second = _window(given, many, "_1"), _window(given, many, "")
        if first is None or second is None or first[0] != first[1]:
            return NotImplemented
        size, step = ([a * b for a, b in zip(first[0], n, strict=True)] for n in second)
        return _POOLS[many - 1](given.x, size, step)

    return pooled


def _window(given: SimpleNamespace, many: int, suffix: str) -> tuple[list[int], list[int]] | None:
    """Size and step of a pool's windows where all of them are full."""
    size, step, crop, ceil = (getattr(given, n + suffix) for n in ("size", "step", "crop", "ceil"))
    size, crop = each(size, many), each(crop, many)
    step = size if list(step) == [] else each(step, many)
    return None if size is None or step is None or crop is None or any(crop) or ceil else (size, step)


RULES: tuple[Rule, ...] = (
    *(r for t in (False, True) for many in (1, 2, 3) for r in (*_reductions(many, t), _pools(many, t))),
    *(_pool_of_pool(many) for many in (1, 2, 3)),
)
