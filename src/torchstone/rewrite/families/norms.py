"""Algebra of normalizations: means of what is normalized, and scales that belong into a norm's weights.

The mean over a channel's positions of a group norm follows from the channels' own means and variances:
a group's variance is the mean of its channels' variances plus the variance of their means, a sum of
squares in which nothing cancels. So one pass over the input gives it, and the normalized tensor is
never stored.

A batch norm that changes running statistics is never matched here, since its update must happen once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torchstone.rewrite.families.arguments import (
    ADD,
    DIV,
    MUL,
    SUB,
    each,
    known,
    made,
    number,
    per_channel,
    same_dtype,
    sane,
)
from torchstone.rewrite.pattern import V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

aten = torch.ops.aten
_GROUP_NORM = op(
    aten.group_norm.default, V("x"), V("groups"), V("weight"), V("bias"), V("eps"), V("cudnn")
)
_GROUP_SHAPES = {"x": "b g<5*c *s", "weight": "g*c?", "bias": "g*c?"}
_GROUP_SETTINGS: dict[str, Sequence[Any]] = {
    "groups": "g",
    "eps": (1e-5, 1e-2),
    "cudnn": (True, False),
}
_POOLS = (
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)
_NUMBERS = (0.3, -2, 3.0)


def _moments(x: Any, dims: list[int]) -> tuple[Any, Any]:
    """Variance and mean over dims, kept as dims of size one, in at least float32."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    return variance, mean


def _mean_of_group_norm(given: SimpleNamespace, dims: Any, *, keepdim: bool) -> Any:
    x, groups = given.x, given.groups
    if not same_dtype(x, given.weight, given.bias) or not known(dims) or x.dim() < 3:
        return NotImplemented
    rank, channels = x.dim(), x.shape[1]
    places, spatial = sorted({d % rank for d in dims}), list(range(2, rank))
    if places not in (spatial, [1, *spatial]) or not known([channels, groups]) or channels < 2 * groups:
        return NotImplemented  # of one channel a group, the mean is nothing but rounding
    if 1 in places and given.weight is None:
        return NotImplemented  # likewise
    variance, mean = (m.flatten(1).unflatten(1, (groups, -1)) for m in _moments(x, spatial))
    middle = mean.mean(2, keepdim=True)
    spread = variance.mean(2, keepdim=True) + (mean - middle).square().mean(2, keepdim=True)
    out = ((mean - middle) * torch.rsqrt(spread + given.eps)).flatten(1)
    out = out if given.weight is None else out * given.weight
    out = out if given.bias is None else out + given.bias
    if 1 in places:
        out = out.mean(1, keepdim=True)
    out = out.to(x.dtype)
    if keepdim:
        return out.unflatten(1, (-1, *[1] * len(spatial)))
    return out.squeeze(1) if 1 in places else out


@made(
    "mean_of_group_norm",
    op(aten.mean.dim, _GROUP_NORM, V("dims"), V("keepdim")),
    family="norms",
    shapes=_GROUP_SHAPES,
    constants={
        **_GROUP_SETTINGS,
        "dims": ([2], [2, 3], [2, 3, 4], [-1], [-2, -1], [1, 2], [1, 2, 3], [1, 2, 3, 4]),
        "keepdim": (False, True),
    },
    measured=True,
)
def mean_of_group_norm(given: SimpleNamespace) -> Any:
    """Mean over positions of w (x - m) / d + b is w (mean of x - m) / d + b; of channels, theirs."""
    return _mean_of_group_norm(given, given.dims, keepdim=given.keepdim)


def _pooled_group_norm(many: int) -> Rule:
    @made(
        f"global_pool_of_group_norm{many}d",
        op(_POOLS[many - 1], _GROUP_NORM, V("size")),
        family="norms",
        shapes={**_GROUP_SHAPES, "x": "b g<5*c " + " ".join("hwd"[:many])},
        constants={**_GROUP_SETTINGS, "size": ([1] * many, [1], [2] * many)},
        measured=True,
    )
    def pooled(given: SimpleNamespace) -> Any:
        """The average pool to one position is the mean over all of them."""
        if each(given.size, many) != [1] * many or given.x.dim() != many + 2:
            return NotImplemented
        return _mean_of_group_norm(given, list(range(2, many + 2)), keepdim=True)

    return pooled


def _spatial(dims: Any, rank: int) -> bool:
    """Whether dims are all those after batch and channels."""
    return rank > 2 and known(dims) and sorted(d % rank for d in dims) == list(range(2, rank))


_CENTERED_SHAPES = {"x": "~b c *s", "weight": "~c?", "bias": "~c?"}
_CENTERED_SETTINGS: dict[str, Sequence[Any]] = {
    "momentum": (0.1,),
    "eps": (1e-5, 1e-2),
    "cudnn": (False, True),
    "dims": ([2], [2, 3], [2, 3, 4], [-1], [-2, -1]),
}
_BATCH_NORM, _INSTANCE_NORM = (
    op(target, V("x"), V("weight"), V("bias"), None, None, True, V("momentum"), V("eps"), V("cudnn"))
    for target in (aten.batch_norm.default, aten.instance_norm.default)
)


@made(
    "batch_norm_less_its_mean",
    op(SUB, _BATCH_NORM, op(aten.mean.dim, _BATCH_NORM, V("dims"), True)),
    family="norms",
    shapes=_CENTERED_SHAPES,
    constants=_CENTERED_SETTINGS,
    measured=True,
)
def batch_norm_less_its_mean(given: SimpleNamespace) -> Any:
    """y less its mean over positions, for y = w (x - m) / d + b, is (w / d) (x less its own mean)."""
    x = given.x
    if not same_dtype(x, given.weight, given.bias) or not _spatial(given.dims, x.dim()):
        return NotImplemented
    variance, mean = _moments(x, list(range(2, x.dim())))
    middle = mean.mean(0, keepdim=True)
    spread = variance.mean(0, keepdim=True) + (mean - middle).square().mean(0, keepdim=True)
    scale = torch.rsqrt(spread + given.eps)
    if given.weight is not None:
        scale = scale * given.weight.reshape(-1, *[1] * (x.dim() - 2))
    return ((x - mean) * scale).to(x.dtype)


@made(
    "instance_norm_less_its_mean",
    op(SUB, _INSTANCE_NORM, op(aten.mean.dim, _INSTANCE_NORM, V("dims"), True)),
    family="norms",
    shapes=_CENTERED_SHAPES,
    constants=_CENTERED_SETTINGS,
    always=True,
)
def instance_norm_less_its_mean(given: SimpleNamespace) -> Any:
    """w n + b - mean of (w n + b) = w n: what is normalized over positions has the mean zero there."""
    x = given.x
    if not same_dtype(x, given.weight, given.bias) or not _spatial(given.dims, x.dim()):
        return NotImplemented
    return aten.instance_norm(
        x, given.weight, None, None, None, True, given.momentum, given.eps, given.cudnn
    )


_GROUP_OPERAND = "g*c 1|1 g*c 1|1 1|"


def _with(how: Any, old: Any, neutral: Any, operand: Any) -> Any:
    """A norm's weight or bias with an operand taken in; ``neutral`` stands for one that is not there."""
    return how(neutral if old is None else old, operand)


@made(
    "scale_after_group_norm",
    op((*MUL, *DIV), _GROUP_NORM, V("s"), bind="how"),
    family="norms",
    shapes={"x": "~b g<5*c 2*l", "weight": "g*c?", "bias": "g*c?", "s": _GROUP_OPERAND},
    constants={**_GROUP_SETTINGS, "s": _NUMBERS, "how": (MUL[0], DIV[0])},
    always=True,
)
def scale_after_group_norm(given: SimpleNamespace) -> Any:
    """s (w n + b) = (s w) n + s b, with one s for each channel or one for all; likewise 1 / s."""
    x = given.x
    if not same_dtype(x, given.weight, given.bias) or x.dim() < 2 or not known([x.shape[1]]):
        return NotImplemented
    s = per_channel(given.s, x, x.dim(), 1 - x.dim(), x.shape[1])
    if s is None:
        return NotImplemented
    ones = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    weight = _with(given.how, given.weight, ones, s)
    bias = None if given.bias is None else given.how(given.bias, s)
    return aten.group_norm(x, given.groups, weight, bias, given.eps, given.cudnn)


@made(
    "shift_after_group_norm",
    op((*ADD, *SUB), _GROUP_NORM, V("t"), bind="how"),
    family="norms",
    shapes={"x": "~b g<5*c 2*l", "weight": "g*c?", "bias": "g*c?", "t": _GROUP_OPERAND},
    constants={**_GROUP_SETTINGS, "t": _NUMBERS, "how": (ADD[0], SUB[0])},
    always=True,
)
def shift_after_group_norm(given: SimpleNamespace) -> Any:
    """(w n + b) + t = w n + (b + t), with one t for each channel or one for all; likewise - t."""
    x = given.x
    if not same_dtype(x, given.weight, given.bias) or x.dim() < 2 or not known([x.shape[1]]):
        return NotImplemented
    t = per_channel(given.t, x, x.dim(), 1 - x.dim(), x.shape[1])
    if t is None:
        return NotImplemented
    bias = _with(given.how, given.bias, torch.zeros(x.shape[1], dtype=x.dtype, device=x.device), t)
    return aten.group_norm(x, given.groups, given.weight, bias, given.eps, given.cudnn)


def _operand(value: Any, given: SimpleNamespace) -> Any:
    """What is the same for all rows of a layer norm, else None."""
    x, shape = given.x, given.shape
    if not known(shape) or not same_dtype(x, given.weight, getattr(given, "bias", None)):
        return None
    if number(value):
        return value if sane(value) else None
    if not same_dtype(x, value) or value.device != x.device or value.dim() > len(shape):
        return None
    tail = shape[len(shape) - value.dim() :]
    return (
        value
        if all(known([v]) and v in (1, s) for v, s in zip(value.shape, tail, strict=True))
        else None
    )


_LAYER_NORM = op(
    aten.layer_norm.default, V("x"), V("shape"), V("weight"), V("bias"), V("eps"), V("cudnn")
)
_LAYER_SETTINGS: dict[str, Sequence[Any]] = {
    "shape": ([4], [3, 4]),
    "eps": (1e-5, 1e-2),
    "cudnn": (True, False),
}


@made(
    "scale_after_layer_norm",
    op((*MUL, *DIV), _LAYER_NORM, V("s"), bind="how"),
    family="norms",
    shapes={"x": "*b 3 4", "weight": "4|3 4?", "bias": "4|3 4?", "s": "4|3 4|1 4|3 1|1|"},
    constants={**_LAYER_SETTINGS, "s": _NUMBERS, "how": (MUL[0], DIV[0])},
    always=True,
)
def scale_after_layer_norm(given: SimpleNamespace) -> Any:
    """s (w n + b) = (s w) n + s b, with one s for each feature or one for all; likewise 1 / s."""
    s = _operand(given.s, given)
    if s is None:
        return NotImplemented
    ones = torch.ones(given.shape, dtype=given.x.dtype, device=given.x.device)
    bias = None if given.bias is None else given.how(given.bias, s)
    weight = _with(given.how, given.weight, ones, s)
    return aten.layer_norm(given.x, given.shape, weight, bias, given.eps, given.cudnn)


@made(
    "shift_after_layer_norm",
    op((*ADD, *SUB), _LAYER_NORM, V("t"), bind="how"),
    family="norms",
    shapes={"x": "*b 3 4", "weight": "4|3 4?", "bias": "4|3 4?", "t": "4|3 4|1 4|3 1|1|"},
    constants={**_LAYER_SETTINGS, "t": _NUMBERS, "how": (ADD[0], SUB[0])},
    always=True,
)
def shift_after_layer_norm(given: SimpleNamespace) -> Any:
    """(w n + b) + t = w n + (b + t), with one t for each feature or one for all; likewise - t."""
    t = _operand(given.t, given)
    if t is None:
        return NotImplemented
    zeros = torch.zeros(given.shape, dtype=given.x.dtype, device=given.x.device)
    bias = _with(given.how, given.bias, zeros, t)
    return aten.layer_norm(given.x, given.shape, given.weight, bias, given.eps, given.cudnn)


@made(
    "scale_after_rms_norm",
    op(
        (*MUL, *DIV),
        op(aten.rms_norm.default, V("x"), V("shape"), V("weight"), V("eps")),
        V("s"),
        bind="how",
    ),
    family="norms",
    shapes={"x": "*b 3 4", "weight": "4?", "s": "4|1|"},
    constants={"shape": ([4],), "eps": (None, 1e-3), "s": _NUMBERS, "how": (MUL[0], DIV[0])},
    always=True,
)
def scale_after_rms_norm(given: SimpleNamespace) -> Any:
    """s (w n) = (s w) n, with one s for each feature or one for all; likewise 1 / s."""
    s = _operand(given.s, given)
    if s is None:
        return NotImplemented
    ones = torch.ones(given.shape, dtype=given.x.dtype, device=given.x.device)
    return aten.rms_norm(given.x, given.shape, _with(given.how, given.weight, ones, s), given.eps)


RULES: tuple[Rule, ...] = (
    mean_of_group_norm,
    *(_pooled_group_norm(many) for many in (1, 2, 3)),
    batch_norm_less_its_mean,
    instance_norm_less_its_mean,
    scale_after_group_norm,
    shift_after_group_norm,
    scale_after_layer_norm,
    shift_after_layer_norm,
    scale_after_rms_norm,
)
