"""What computes nothing: removals, equal to the bit.

A removal never makes a result share memory with what it was computed from unless eager does: a dropout
that is off and a view of the same shape give their input itself in eager too, while ``x * 1`` is a
copy, and goes only where what it copies is new memory of its own. So a program that returns or changes
such a result in place stays right.

Left alone: ``x + 0``, which turns -0 into 0; ``clone``, whose worth is that very copy; ``pow(x, 2)``
and ``pow(x, 0.5)``, which PyTorch computes as ``x * x`` and a root anyway; sums of a softmax, which are
one but for rounding, and only where nothing is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchstone.recipe import Numerics
from torchstone.rewrite.families.arguments import ADD, DIV, MUL, SUB, made, number
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

aten = torch.ops.aten
_Function = Callable[[SimpleNamespace], Any]
_X = V("x")


def _removal(
    name: str, pattern: Op, shapes: dict[str, str], **constants: Any
) -> Callable[[_Function], Rule]:
    """Less work, equal to the bit."""
    domain: dict[str, Any] = {"family": "simplify", "numerics": Numerics.EXACT, "always": True}
    return made(name, pattern, shapes=shapes, constants=constants, **domain)


def _named(
    name: str, pattern: Op, shapes: dict[str, str], **constants: Any
) -> Callable[[_Function], Rule]:
    """Less work, equal but for rounding."""
    return made(name, pattern, family="simplify", shapes=shapes, constants=constants, always=True)


# What gives its input back


@_removal(
    "dropout_off",
    op(aten.dropout.default, _X, V("p"), V("train")),
    {"x": "*b"},
    p=(0.0, 0.3),
    train=(False,),
)
def _dropout_off(call: SimpleNamespace) -> Any:
    """Dropout(x) = x, out of training."""
    return NotImplemented if call.train and call.p != 0 else call.x


@_removal(
    "dropout_of_none", op(aten.dropout.default, _X, 0.0, V("train")), {"x": "*b"}, train=(True, False)
)
def _dropout_of_none(call: SimpleNamespace) -> Any:
    """Dropout(x) with probability 0 = x."""
    return call.x


def _same_sizes(x: Any, sizes: Any) -> bool:
    """Whether sizes are the tensor's own; -1 may stand for any."""
    given = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in sizes]
    if len(given) != x.dim():
        return False
    pairs = zip(given, x.shape, strict=True)
    return all(statically_known_true(a == -1) or statically_known_true(a == b) for a, b in pairs)


def _same_view(call: SimpleNamespace) -> Any:
    """A view of x in its own shape = x."""
    return call.x if _same_sizes(call.x, call.sizes) else NotImplemented


def _view(target: Any, name: str) -> Rule:
    return _removal(name, op(target, _X, V("sizes")), {"x": "2 k 3"}, sizes=([2, -1, 3], [2, 3, -1]))(
        _same_view
    )


@_removal(
    "expand_to_itself",
    op(aten.expand.default, _X, V("sizes")),
    {"x": "k 3"},
    sizes=([-1, 3], [-1, -1], [4, 3]),
)
def _expand_to_itself(call: SimpleNamespace) -> Any:
    """Expand(x) to its own shape = x."""
    return call.x if _same_sizes(call.x, call.sizes) else NotImplemented


@_removal("expand_as_itself", op(aten.expand_as.default, _X, V("like")), {"x": "a 3", "like": "b 3"})
def _expand_as_itself(call: SimpleNamespace) -> Any:
    """Expand(x) to the shape of a tensor of its own shape = x."""
    same = call.x.dim() == call.like.dim() and _same_sizes(call.x, call.like.shape)
    return call.x if same else NotImplemented


@_removal(
    "cast_to_itself",
    op(aten.to.dtype, _X, V("dtype"), V("later"), False, V("layout")),
    {},
    x=(torch.arange(6), torch.arange(6).reshape(2, 3).T, torch.arange(4) > 1),
    dtype=(torch.int64, torch.int32, torch.bool),
    later=(False, True),
    layout=(None,),
)
def _cast_to_itself(call: SimpleNamespace) -> Any:
    """To(x) in its own dtype = x."""
    return call.x if call.x.dtype == call.dtype and call.layout is None else NotImplemented


@_removal("type_as_itself", op(aten.type_as.default, _X, V("like")), {"x": "*b", "like": "k"})
def _type_as_itself(call: SimpleNamespace) -> Any:
    """X in the dtype of a tensor of its own dtype = x."""
    same = call.x.dtype == call.like.dtype and call.x.device == call.like.device
    return call.x if same else NotImplemented


@_removal(
    "transpose_twice",
    op(aten.transpose.int, op(aten.transpose.int, _X, V("a"), V("b")), V("c"), V("d")),
    {"x": "k 3 m"},
    a=(0, 1, -1),
    b=(1, 2),
    c=(0, 1, 2, -2),
    d=(1, 2, -1),
)
def _transpose_twice(call: SimpleNamespace) -> Any:
    """(xᵀ)ᵀ = x."""
    dims = call.x.dim()
    first, second = {call.a % dims, call.b % dims}, {call.c % dims, call.d % dims}
    return call.x if first == second else NotImplemented


def _turned_back(call: SimpleNamespace) -> Any:
    """(xᵀ)ᵀ = x."""
    return call.x


@_removal(
    "permute_twice",
    op(aten.permute.default, op(aten.permute.default, _X, V("a")), V("b")),
    {"x": "k 3 m"},
    a=([0, 1, 2], [1, 2, 0], [0, 2, 1]),
    b=([2, 0, 1], [-3, -1, -2], [1, 2, 0]),
)
def _permute_twice(call: SimpleNamespace) -> Any:
    """Two permutations = one."""
    order = [call.a[i] for i in call.b]
    dims = [i % call.x.dim() for i in order]
    return call.x if dims == sorted(dims) else call.x.permute(order)


@_removal(
    "squeeze_of_unsqueeze",
    op(aten.squeeze.dim, op(aten.unsqueeze.default, _X, V("a")), V("b")),
    {"x": "k 3"},
    a=(0, 1, -1, -2),
    b=(0, 1, 2, -1, -3),
)
def _squeeze_of_unsqueeze(call: SimpleNamespace) -> Any:
    """A dim put in and taken out = x."""
    dims = call.x.dim() + 1
    return call.x if call.a % dims == call.b % dims else NotImplemented


@_removal(
    "contiguous_already", op(aten.contiguous.default, op(aten.contiguous.default, _X)), {"x": "*b"}
)
def _contiguous_already(call: SimpleNamespace) -> Any:
    """Contiguous twice = once."""
    return call.x.contiguous()


@_removal(
    "flip_twice",
    op(aten.flip.default, op(aten.flip.default, _X, V("a")), V("b")),
    {"x": "k m"},
    a=([0], [1], [0, 1]),
    b=([0], [-1], [1, 0], [-2]),
)
def _flip_twice(call: SimpleNamespace) -> Any:
    """X turned round twice = a copy of x."""
    dims = call.x.dim()
    same = sorted(d % dims for d in call.a) == sorted(d % dims for d in call.b)
    return call.x.clone() if same else NotImplemented


# What adds nothing to memory that is new already

_UNARY = (
    aten.relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.log.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.reciprocal.default,
    aten.abs.default,
    aten.neg.default,
    aten.square.default,
    aten.silu.default,
)
_BINARY = (*MUL, *DIV, aten.matmul.default, aten.mm.default, aten.bmm.default)


def _times_one(call: SimpleNamespace) -> Any:
    """F(x) · 1 = f(x)."""
    return call.inner(*(getattr(call, n) for n in ("x", "y", "bias") if hasattr(call, n)))


def _ones() -> list[Rule]:
    """Where 1 or 0 does nothing to a result that nobody else has."""
    inner = {
        "unary": (op(_UNARY, _X, bind="inner"), {"x": "+*b"}, _UNARY),
        "binary": (op(_BINARY, _X, V("y"), bind="inner"), {"x": "b 3 3", "y": "b 3 3"}, _BINARY),
        "linear": (
            op((aten.linear.default,), _X, V("y"), V("bias"), bind="inner"),
            {"x": "b k", "y": "n k", "bias": "n?"},
            (aten.linear.default,),
        ),
    }
    outer = {"times_one": (MUL, 1), "over_one": (DIV, 1), "less_zero": (SUB, 0)}
    return [
        _removal(f"{kind}_{what}", op(targets, pattern, n), shapes, inner=choices)(_times_one)
        for kind, (pattern, shapes, choices) in inner.items()
        for what, (targets, n) in outer.items()
    ]


# Lower and upper bounds

_NOT_NEGATIVE = (
    aten.relu.default,
    aten.sigmoid.default,
    aten.abs.default,
    aten.square.default,
    aten.relu6.default,
    aten.hardsigmoid.default,
    aten.softplus.default,
)


def _already_positive(call: SimpleNamespace) -> Any:
    """Max(f(x), 0) = |f(x)| = f(x), where f is never negative."""
    return call.inner(call.x)


@_removal(
    "positive_softmax",
    op((aten.relu.default, aten.abs.default), op(aten.softmax.int, _X, V("dim"))),
    {"x": "b k"},
    dim=(0, 1, -1),
)
def _positive_softmax(call: SimpleNamespace) -> Any:
    """Max(softmax(x), 0) = softmax(x)."""
    return torch.softmax(call.x, call.dim)


@_removal("positive_square", op((aten.relu.default, aten.abs.default), op(MUL, _X, _X)), {"x": "*b"})
def _positive_square(call: SimpleNamespace) -> Any:
    """Max(x x, 0) = |x x| = x x."""
    return NotImplemented if call.x.is_complex() else call.x * call.x


_BOUNDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "relu": (aten.relu.default, ()),
    "relu6": (aten.relu6.default, ()),
    "hardtanh": (aten.hardtanh.default, ("low", "high")),
    "clamp": (aten.clamp.default, ("low", "high")),
    "clamp_min": (aten.clamp_min.default, ("low",)),
    "clamp_max": (aten.clamp_max.default, ("high",)),
}
_FIXED = {"relu": (0, None), "relu6": (0, 6)}


def _bounds(call: SimpleNamespace, name: str, which: str) -> tuple[float, float] | None:
    """The bounds of one of two clamps; None where they are no numbers, or the wrong way round."""
    given = (getattr(call, f"low_{which}", None), getattr(call, f"high_{which}", None))
    low, high = _FIXED.get(name, given)
    if not all(bound is None or (number(bound) and not math.isnan(bound)) for bound in (low, high)):
        return None
    found = -math.inf if low is None else low, math.inf if high is None else high
    return found if found[0] <= found[1] else None


def _clamp_twice(outer: str, inner: str) -> Rule:
    def replacement(call: SimpleNamespace) -> Any:
        """Min(max(min(max(x, a), b), c), d) = min(max(x, clamp(a; c, d)), clamp(b; c, d))."""
        first, second = _bounds(call, inner, "in"), _bounds(call, outer, "out")
        if first is None or second is None or not call.x.is_floating_point():
            return NotImplemented
        low, high = (min(max(bound, second[0]), second[1]) for bound in first)
        if low == -math.inf and high == math.inf:
            return NotImplemented
        return call.x.clamp(None if low == -math.inf else low, None if high == math.inf else high)

    def applied(name: str, which: str, to: Any) -> Op:
        target, bounds = _BOUNDS[name]
        return op(target, to, *(V(f"{bound}_{which}") for bound in bounds))

    values = {"low": (-1.0, 0.5, 0), "high": (2.0, 0.75, 1)}
    pairs = ((name, which) for name, which in ((inner, "in"), (outer, "out")))
    domain = {f"{bound}_{which}": values[bound] for name, which in pairs for bound in _BOUNDS[name][1]}
    pattern = applied(outer, "out", applied(inner, "in", _X))
    return _removal(f"{outer}_of_{inner}", pattern, {"x": "*b"}, **domain)(replacement)


# Softmax


def _per_row(value: Any, x: Any, dim: int) -> bool:
    """Whether a number or tensor is the same along a dim of x, and makes the sum with x no larger."""
    if number(value):
        return math.isfinite(value)
    if not isinstance(value, torch.Tensor) or value.dtype != x.dtype or value.dim() > x.dim():
        return False
    place = dim % x.dim() - (x.dim() - value.dim())
    sizes = list(zip(reversed(value.shape), reversed(x.shape), strict=False))[::-1]
    fits = all(statically_known_true(a == 1) or statically_known_true(a == b) for a, b in sizes)
    return fits and (place < 0 or statically_known_true(value.shape[place] == 1))


def _shifted(call: SimpleNamespace) -> Any:
    """Softmax(x + c) = softmax(x) for a c that is the same along the row."""
    if not call.x.is_floating_point() or not _per_row(call.c, call.x, call.dim):
        return NotImplemented
    return call.softmax(call.x, call.dim)


def _shift(name: str, targets: Any, shape: str) -> Rule:
    softmax = (aten.softmax.int, aten.log_softmax.int)
    pattern = op(softmax, op(targets, _X, V("c")), V("dim"), bind="softmax")
    shapes = {"x": "b k m", "c": shape}
    return _named(name, pattern, shapes, dim=(0, 1, 2, -1), softmax=softmax)(_shifted)


RULES: tuple[Rule, ...] = (
    _dropout_off,
    _dropout_of_none,
    _view(aten.view.default, "view_to_itself"),
    _view(aten.reshape.default, "reshape_to_itself"),
    _expand_to_itself,
    _expand_as_itself,
    _cast_to_itself,
    _type_as_itself,
    _transpose_twice,
    *(
        _removal(f"{name}_twice", op(target, op(target, _X)), {"x": shape})(_turned_back)
        for name, target, shape in (
            ("t", aten.t.default, "k m"),
            ("mT", aten.mT.default, "b k m"),
            ("numpy_T", aten.numpy_T.default, "k m"),
        )
    ),
    _permute_twice,
    _squeeze_of_unsqueeze,
    _contiguous_already,
    _flip_twice,
    *_ones(),
    _removal(
        "already_positive",
        op((aten.relu.default, aten.abs.default), op(_NOT_NEGATIVE, _X, bind="inner")),
        {"x": "*b"},
        inner=_NOT_NEGATIVE,
    )(_already_positive),
    _positive_softmax,
    _positive_square,
    *(_clamp_twice(outer, inner) for outer in _BOUNDS for inner in _BOUNDS),
    _shift("softmax_plus_row", ADD, "b 1 m"),
    _shift("softmax_plus_column", ADD, "1 m"),
    _shift("softmax_minus_row", SUB, "b k 1"),
)
"""Removals."""
