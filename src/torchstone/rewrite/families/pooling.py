"""Sums and means pushed through what is linear: most of a product's result need never be computed.

A sum over the output features of ``x Wᵀ + b`` needs only the sum of W's rows: a matrix product becomes a
product with one vector. A mean over rows comes before the product instead of after it. Convolutions,
whose borders need more care, are in :mod:`torchstone.rewrite.families.pooling_conv`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torchstone.recipe import Numerics
from torchstone.rewrite.families import pooling_conv
from torchstone.rewrite.families.arguments import DIV, MUL, floating, is_one, known, made, sane
from torchstone.rewrite.pattern import V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

aten = torch.ops.aten
_SUM, _MEAN = aten.sum.dim_IntList, aten.mean.dim
_EXTREMES = (aten.amax.default, aten.amin.default)
_LINEAR = op(aten.linear.default, V("x"), V("weight"), V("bias"))
_LINEAR_SHAPES = {"x": "*b m k", "weight": "n k", "bias": "n?"}
_DIMS: dict[str, Sequence[Any]] = {
    "dims": ([-1], [-1], [-2], [0], [-1, -2], [0, 1], [1, 2]),
    "keepdim": (False, True),
}


def _places(dims: Any, rank: int) -> list[int]:
    """Dims counted from the front; none where they are not given one by one."""
    return [d % rank for d in dims] if known(dims) and rank else []


def _reduced_linear(given: SimpleNamespace, *, mean: bool) -> Any:
    x, weight, bias = given.x, given.weight, given.bias
    dims = _places(given.dims, x.dim())
    rows = [d for d in dims if d != x.dim() - 1]
    if not dims or not floating(x):
        return NotImplemented
    if rows:
        if bias is not None and not mean:
            for d in rows:
                if not known([x.shape[d]]):
                    return NotImplemented
                bias = bias * x.shape[d]
        x = x.mean(rows, keepdim=True) if mean else x.sum(rows, keepdim=True)
    if len(rows) < len(dims):
        weight = weight.mean(0, keepdim=True) if mean else weight.sum(0, keepdim=True)
        if bias is not None:
            bias = bias.mean(0, keepdim=True) if mean else bias.sum(0, keepdim=True)
    out = F.linear(x, weight, bias)
    return out if given.keepdim else out.squeeze(dims)


@made(
    "sum_of_linear",
    op(_SUM, _LINEAR, V("dims"), V("keepdim")),
    family="pooling",
    shapes=_LINEAR_SHAPES,
    constants=_DIMS,
)
def sum_of_linear(given: SimpleNamespace) -> Any:
    """Sum over n of (x Wᵀ + b)[n] = x · sum of W[n] + sum of b; over m rows, (sum of x) Wᵀ + m b."""
    return _reduced_linear(given, mean=False)


@made(
    "mean_of_linear",
    op(_MEAN, _LINEAR, V("dims"), V("keepdim")),
    family="pooling",
    shapes=_LINEAR_SHAPES,
    constants=_DIMS,
)
def mean_of_linear(given: SimpleNamespace) -> Any:
    """Mean over n of (x Wᵀ + b)[n] = x · mean of W[n] + mean of b; over rows, (mean of x) Wᵀ + b."""
    return _reduced_linear(given, mean=True)


def _reduced_product(given: SimpleNamespace, reduce: Any) -> Any:
    x, weight = given.x, given.weight
    if x.dim() < 2 or weight.dim() < 2 or not floating(x):
        return NotImplemented
    rank = max(x.dim(), weight.dim())
    dims = _places(given.dims, rank)
    rows = [d - rank for d in dims if d != rank - 1]
    if not dims or (weight.dim() > 2 and rows not in ([], [-2])):
        return NotImplemented
    x = reduce(x, rows, True) if rows else x
    weight = reduce(weight, [-1], True) if len(rows) < len(dims) else weight
    out = given.product(x, weight)
    return out if given.keepdim else out.squeeze(dims)


def _product_rules(name: str, product: Any, shapes: dict[str, str]) -> tuple[Rule, ...]:
    """The sum and the mean of one kind of matrix product."""
    pattern = op(product, V("x"), V("weight"), bind="product")
    constants = {**_DIMS, "product": (product,)}

    @made(
        f"sum_of_{name}",
        op(_SUM, pattern, V("dims"), V("keepdim")),
        family="pooling",
        shapes=shapes,
        constants=constants,
    )
    def sum_of_product(given: SimpleNamespace) -> Any:
        """Sum over n of (A B)[:, n] = A · sum over n of B[:, n]; over rows, (sum of A's rows) B."""
        return _reduced_product(given, _SUM)

    @made(
        f"mean_of_{name}",
        op(_MEAN, pattern, V("dims"), V("keepdim")),
        family="pooling",
        shapes=shapes,
        constants=constants,
    )
    def mean_of_product(given: SimpleNamespace) -> Any:
        """Mean over n of (A B)[:, n] = A · mean over n of B[:, n]; over rows, (mean of A's rows) B."""
        return _reduced_product(given, _MEAN)

    return sum_of_product, mean_of_product


@made(
    "reduced_addmm",
    op(
        (_SUM, _MEAN),
        op(aten.addmm.default, V("bias"), V("x"), V("weight")),
        V("dims"),
        V("keepdim"),
        bind="reduce",
    ),
    family="pooling",
    shapes={"bias": "n", "x": "m k", "weight": "k n"},
    constants={"dims": ([-1], [1], [0]), "keepdim": (False, True), "reduce": (_SUM, _MEAN)},
)
def reduced_addmm(given: SimpleNamespace) -> Any:
    """Sum (mean) over n of (c + A B)[:, n] = sum (mean) of c + A · sum (mean) over n of B[:, n]."""
    bias, width = given.bias, given.weight.shape[1]
    if _places(given.dims, 2) != [1] or not floating(bias, given.x):
        return NotImplemented
    if bias.dim() < 1 or not known([width, bias.shape[-1]]) or bias.shape[-1] != width:
        return NotImplemented  # one value for all features
    bias, weight = (given.reduce(t, [-1], True) for t in (bias, given.weight))
    out = torch.addmm(bias, given.x, weight)
    return out if given.keepdim else out.squeeze(-1)


_POOL = tuple(V(n) for n in ("size", "stride", "padding", "ceil", "padded"))
_POOL_SETTINGS: dict[str, Sequence[Any]] = {
    "size": ([2], [3], [1]),
    "stride": ([], [1], [2], [3]),
    "padding": ([0], [0], [1]),
    "ceil": (False, True),
    "padded": (False, True),
}


def _pooled(given: SimpleNamespace, weight: Any, bias: Any) -> tuple[Any, Any] | None:
    """A weight (out, in) and bias (out,) with their out features pooled."""
    window = (given.size, given.stride, given.padding)
    if not all(known(w) for w in window) or not floating(weight):
        return None
    settings = (*window, given.ceil, given.padded)
    pooled = None if bias is None else aten.avg_pool1d(bias.unsqueeze(0), *settings).squeeze(0)
    return aten.avg_pool1d(weight.t(), *settings).t(), pooled


@made(
    "avg_pool_of_linear",
    op(aten.avg_pool1d.default, _LINEAR, *_POOL),
    family="pooling",
    shapes=_LINEAR_SHAPES,
    constants=_POOL_SETTINGS,
)
def avg_pool_of_linear(given: SimpleNamespace) -> Any:
    """pool(x Wᵀ + b) = x pool(W)ᵀ + pool(b): pooling the features is linear, borders and all."""
    pooled = _pooled(given, given.weight, given.bias)
    return NotImplemented if pooled is None else F.linear(given.x, *pooled)


@made(
    "avg_pool_of_lifted_linear",
    op(aten.avg_pool1d.default, op(aten.unsqueeze.default, _LINEAR, V("dim")), *_POOL),
    family="pooling",
    shapes={"x": "m k", "weight": "n k", "bias": "n?"},
    constants={**_POOL_SETTINGS, "dim": (1, 0, -2)},
)
def avg_pool_of_lifted_linear(given: SimpleNamespace) -> Any:
    """pool((x Wᵀ + b) with a dim put in) = (x pool(W)ᵀ + pool(b)) with that dim."""
    if given.dim in (-1, given.x.dim()):
        return NotImplemented
    pooled = _pooled(given, given.weight, given.bias)
    return NotImplemented if pooled is None else F.linear(given.x, *pooled).unsqueeze(given.dim)


@made(
    "avg_pool_of_lifted_product",
    op(
        aten.avg_pool1d.default,
        op(aten.unsqueeze.default, op(aten.matmul.default, V("x"), V("weight")), V("dim")),
        *_POOL,
    ),
    family="pooling",
    shapes={"x": "m k", "weight": "k n"},
    constants={**_POOL_SETTINGS, "dim": (1, 0, -2)},
)
def avg_pool_of_lifted_product(given: SimpleNamespace) -> Any:
    """pool((A B) with a dim put in) = (A pool(B)) with that dim."""
    if given.x.dim() != 2 or given.weight.dim() != 2 or given.dim in (-1, 2):
        return NotImplemented
    pooled = _pooled(given, given.weight.t(), None)
    return NotImplemented if pooled is None else F.linear(given.x, pooled[0]).unsqueeze(given.dim)


def _one(given: SimpleNamespace) -> Any:
    """The sum, mean, product, maximum, minimum or log-sum-exp of one number is that number."""
    x = given.x
    dims = _places(given.dims if isinstance(given.dims, list | tuple) else [given.dims], x.dim())
    if not dims or not floating(x) or not all(is_one(x.shape[d]) for d in dims):
        return NotImplemented
    return x if given.keepdim else x.squeeze(dims)


def _over_one(name: str, targets: tuple[Any, ...], dims: Sequence[Any], *, first: bool = False) -> Rule:
    """A rule for reductions over a dim of size one; ``first`` of what they give."""
    pattern = op(targets, V("x"), V("dims"), V("keepdim"), bind="reduce")
    return made(
        name,
        op(operator.getitem, pattern, 0) if first else pattern,
        family="pooling",
        numerics=Numerics.EXACT,
        shapes={"x": "b 1 m"},
        constants={"dims": dims, "keepdim": (False, True), "reduce": targets},
        always=True,
    )(_one)


@made(
    "reduction_of_scaled",
    op(
        (_SUM, _MEAN),
        op((*MUL, *DIV), V("x"), V("s"), bind="how"),
        V("dims"),
        V("keepdim"),
        bind="reduce",
    ),
    family="pooling",
    shapes={"x": "*b m k"},
    constants={
        "s": (0.3, -2, 3.0),
        "how": (aten.mul.Tensor, aten.div.Tensor),
        "reduce": (_SUM, _MEAN),
        "dims": ([-1], [-2], [0, 1]),
        "keepdim": (False, True),
    },
    always=True,
)
def reduction_of_scaled(given: SimpleNamespace) -> Any:
    """Sum (mean) of s x = s times the sum (mean) of x, for a number s; likewise for x / s."""
    if not floating(given.x) or not sane(given.s):
        return NotImplemented
    return given.how(given.reduce(given.x, given.dims, given.keepdim), given.s)


RULES: tuple[Rule, ...] = (
    sum_of_linear,
    mean_of_linear,
    *_product_rules("matmul", aten.matmul.default, {"x": "*b m k", "weight": "*c k n"}),
    *_product_rules("mm", aten.mm.default, {"x": "m k", "weight": "k n"}),
    *_product_rules("bmm", aten.bmm.default, {"x": "b m k", "weight": "b k n"}),
    reduced_addmm,
    avg_pool_of_linear,
    avg_pool_of_lifted_linear,
    avg_pool_of_lifted_product,
    *pooling_conv.RULES,
    _over_one(
        "reduction_over_one", (_SUM, _MEAN, *_EXTREMES, aten.logsumexp.default), ([1], [-2], [0], [1, 2])
    ),
    _over_one("product_over_one", (aten.prod.dim_int,), (1, -2, 0)),
    _over_one("extreme_of_one", (aten.max.dim, aten.min.dim), (1, -2, 0), first=True),
    reduction_of_scaled,
)
