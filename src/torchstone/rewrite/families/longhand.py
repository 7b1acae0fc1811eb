"""Operations written out longhand, as the one operation of that name: one pass in place of many.

The named operation may be more accurate: a log of a softmax that is 0 in the long form is -inf there
and right in the short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torchstone.rewrite.families.arguments import ADD, DIV, MUL, SUB, floating, made, number
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES", "SQUARES", "mean_of", "over_root"]

aten = torch.ops.aten
_Function = Callable[[SimpleNamespace], Any]
_X = V("x")
_FEW = ([-1], [1], [0], [0, 1])


def _named(
    name: str, pattern: Op, shapes: dict[str, str], **constants: Any
) -> Callable[[_Function], Rule]:
    return made(name, pattern, family="simplify", shapes=shapes, constants=constants, always=True)


def _elementwise(
    name: str, pattern: Op, function: Callable[..., Any], identity: str, **constants: Any
) -> Rule:
    """One argument, and numbers that must be what the domain's first are."""
    wanted = {n: values[0] for n, values in constants.items()}

    def replacement(call: SimpleNamespace) -> Any:
        if not floating(call.x):
            return NotImplemented
        for n, value in wanted.items():
            if not number(getattr(call, n)) or not math.isclose(getattr(call, n), value, rel_tol=1e-14):
                return NotImplemented
        return function(call.x)

    replacement.__doc__ = identity
    return _named(name, pattern, {"x": "*b"}, **constants)(replacement)


# Activations


def _plus(x: Any, n: Any) -> Op:
    return op(ADD, x, n)


def _times(x: Any, n: Any) -> Op:
    return op(MUL, x, n)


_DENOMINATOR = _plus(op(aten.exp.default, op(aten.neg.default, _X)), 1)
_CUBES = (
    op(aten.pow.Tensor_Scalar, _X, 3),
    _times(_times(_X, _X), _X),
    _times(op(aten.pow.Tensor_Scalar, _X, 2), _X),
)
SQUARES = (op(aten.pow.Tensor_Scalar, _X, 2), _times(_X, _X), op(aten.square.default, _X))
_GELU_INNER = (
    *(_times(_plus(_X, _times(cube, 0.044715)), V("c")) for cube in _CUBES),
    *(_times(_times(_X, V("c")), _plus(_times(square, 0.044715), 1)) for square in SQUARES),
)


def _halved(inside: Op) -> tuple[Op, ...]:
    """Half of x times (1 + f), with the half at any of the three places."""
    one = _plus(inside, 1)
    return _times(_times(_X, 0.5), one), _times(_X, _times(one, 0.5)), _times(_times(_X, one), 0.5)


def _gelu_tanh(x: Any) -> Any:
    return F.gelu(x, approximate="tanh")


def _gelus() -> list[Rule]:
    """Both kinds of gelu, in the ways that they are written."""
    tanh = [p for inner in _GELU_INNER for p in _halved(op(aten.tanh.default, inner))]
    text = "X (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))) / 2 = gelu(x), by tanh."
    value = (math.sqrt(2 / math.pi), 0.8)
    found = [_elementwise(f"gelu_tanh_{i}", p, _gelu_tanh, text, c=value) for i, p in enumerate(tanh)]
    text = "X (1 + erf(x / sqrt(2))) / 2 = gelu(x)."
    for what, arithmetic, constant in (("over", DIV, math.sqrt(2)), ("times", MUL, math.sqrt(0.5))):
        inside = op(aten.erf.default, op(arithmetic, _X, V("c")))
        found += [
            _elementwise(f"gelu_{what}_{i}", p, F.gelu, text, c=(constant, 1.5))
            for i, p in enumerate(_halved(inside))
        ]
    return found


_SIX = {
    "relu6": op(aten.relu6.default, _plus(_X, 3)),
    "clamp": op(aten.clamp.default, _plus(_X, 3), 0, 6),
    "hardtanh": op(aten.hardtanh.default, _plus(_X, 3), 0, 6),
}


def _hards() -> list[Rule]:
    """Hardswish and hardsigmoid, by each of the ways to bound x + 3 by 0 and 6."""
    swish, sigmoid = (
        "X min(max(x + 3, 0), 6) / 6 = hardswish(x).",
        "Min(max(x + 3, 0), 6) / 6 = hardsigmoid(x).",
    )
    found = []
    for name, six in _SIX.items():
        found += [
            _elementwise(f"hardswish_{name}_last", op(DIV, _times(_X, six), 6), F.hardswish, swish),
            _elementwise(f"hardswish_{name}_first", _times(_X, op(DIV, six, 6)), F.hardswish, swish),
            _elementwise(f"hardsigmoid_{name}", op(DIV, six, 6), F.hardsigmoid, sigmoid),
        ]
    hard = op(aten.hardsigmoid.default, _X)
    return [
        *found,
        _elementwise(
            "hardswish_product", _times(_X, hard), F.hardswish, "X hardsigmoid(x) = hardswish(x)."
        ),
    ]


_MISH = _times(_X, op(aten.tanh.default, op(aten.softplus.default, _X)))
_ACTIVATIONS = (
    _elementwise("silu", _times(_X, op(aten.sigmoid.default, _X)), F.silu, "X sigmoid(x) = silu(x)."),
    _elementwise("silu_quotient", op(DIV, _X, _DENOMINATOR), F.silu, "X / (1 + exp(-x)) = silu(x)."),
    _elementwise(
        "sigmoid_quotient",
        op(aten.reciprocal.default, _DENOMINATOR),
        torch.sigmoid,
        "1 / (1 + exp(-x)) = sigmoid(x).",
    ),
    _elementwise("mish", _MISH, F.mish, "X tanh(softplus(x)) = mish(x)."),
    *_gelus(),
    *_hards(),
)


# Softmax and its log

_MODEST = tuple(
    torch.linspace(-9, 9, 24, dtype=torch.float64).reshape(shape)[..., ::step]
    for shape, step in (((4, 6), 1), ((6, 4), 2), ((2, 12), 3), ((1, 24), 24))
)
"""Within what exp takes: beyond, the long form overflows."""


@_named(
    "log_of_softmax",
    op(aten.log.default, op(aten.softmax.int, _X, V("dim"))),
    {},
    x=_MODEST,
    dim=(0, 1, -1),
)
def _log_of_softmax(call: SimpleNamespace) -> Any:
    """Log(softmax(x)) = log_softmax(x)."""
    return torch.log_softmax(call.x, call.dim) if floating(call.x) else NotImplemented


@_named(
    "logsumexp",
    op(aten.log.default, op(aten.sum.dim_IntList, op(aten.exp.default, _X), V("dims"), V("keepdim"))),
    {},
    x=_MODEST,
    dims=_FEW,
    keepdim=(True, False),
)
def _logsumexp(call: SimpleNamespace) -> Any:
    """Log of the sum of exp(x) = logsumexp(x)."""
    if not floating(call.x) or not call.dims:
        return NotImplemented
    return torch.logsumexp(call.x, call.dims, call.keepdim)


@_named(
    "softmax_quotient",
    op(
        DIV,
        op(aten.exp.default, _X),
        op(aten.sum.dim_IntList, op(aten.exp.default, _X), V("dims"), True),
    ),
    {},
    x=_MODEST,
    dims=_FEW,
)
def _softmax_quotient(call: SimpleNamespace) -> Any:
    """Exp(x) over the sum of exp(x) = softmax(x)."""
    if not floating(call.x) or len(call.dims) != 1:
        return NotImplemented
    return torch.softmax(call.x, call.dims[0])


# Normalization over the last dim


def mean_of(x: Any) -> Op:
    """Mean along ``dims``, which stay."""
    return op(aten.mean.dim, x, V("dims"), True)


def _last(call: SimpleNamespace) -> bool:
    """Whether what is normalized is the last dim, of a size that is known."""
    dims = call.dims if isinstance(call.dims, list | tuple) else ()
    if not floating(call.x) or [d % call.x.dim() for d in dims] != [call.x.dim() - 1]:
        return False
    return type(call.x.shape[-1]) is int and number(call.eps) and call.eps >= 0


def _rms(call: SimpleNamespace) -> Any:
    """X / sqrt(mean(x²) + eps) = rms_norm(x)."""
    return (
        F.rms_norm(call.x, call.x.shape[-1:], None, float(call.eps)) if _last(call) else NotImplemented
    )


def _layer(call: SimpleNamespace) -> Any:
    """(x - mean(x)) / sqrt(variance(x) + eps) = layer_norm(x)."""
    if not _last(call) or getattr(call, "unbiased", False):
        return NotImplemented
    return F.layer_norm(call.x, call.x.shape[-1:], None, None, float(call.eps))


def over_root(x: Any, square: Op) -> dict[str, Op]:
    """X over the root of a mean square, in the ways that it is written."""
    sum_ = _plus(square, V("eps"))
    return {
        "rsqrt": _times(x, op(aten.rsqrt.default, sum_)),
        "over": op(DIV, x, op(aten.sqrt.default, sum_)),
    }


def _norms() -> list[Rule]:
    """Root-mean-square and layer norm, by each way to write squares, variances and roots."""
    centred = op(SUB, _X, mean_of(_X))
    variances = {
        "var": op(aten.var.dim, _X, V("dims"), V("unbiased"), True),
        "pow": mean_of(op(aten.pow.Tensor_Scalar, centred, 2)),
        "mul": mean_of(_times(centred, centred)),
        "square": mean_of(op(aten.square.default, centred)),
    }
    rows: dict[str, Any] = {"dims": ([-1], [2], [1]), "eps": (1e-5, 0.1)}
    found = []
    for kind, square in zip(("pow", "mul", "square"), SQUARES, strict=True):
        for how, pattern in over_root(_X, mean_of(square)).items():
            found.append(_named(f"rms_norm_{kind}_{how}", pattern, {"x": "b t k"}, **rows)(_rms))
    for kind, variance in variances.items():
        values = rows | ({"unbiased": (False, True)} if kind == "var" else {})
        for how, pattern in over_root(centred, variance).items():
            made_of = _named(f"layer_norm_{kind}_{how}", pattern, {"x": "b 2*t 2*k"}, **values)
            found.append(made_of(_layer))
    return found


@_named(
    "rms_norm_weight",
    op(MUL, op(aten.rms_norm.default, _X, V("shape"), None, V("eps")), V("weight")),
    {"x": "b t 3", "weight": "3"},
    shape=([3],),
    eps=(1e-5, 0.1),
)
def _rms_norm_weight(call: SimpleNamespace) -> Any:
    """Rms_norm(x) w = rms_norm(x, w)."""
    if not isinstance(call.weight, torch.Tensor) or call.weight.dtype != call.x.dtype:
        return NotImplemented
    if list(call.weight.shape) != list(call.shape):
        return NotImplemented
    return F.rms_norm(call.x, call.shape, call.weight, call.eps)


RULES: tuple[Rule, ...] = (
    *_ACTIVATIONS,
    _log_of_softmax,
    _logsumexp,
    _softmax_quotient,
    *_norms(),
    _rms_norm_weight,
)
"""Ways to write what has a name."""
