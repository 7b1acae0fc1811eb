"""Elementwise steps and views that merge, cancel or move to where they can be folded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torchstone.recipe import Numerics
from torchstone.rewrite.families.arguments import ADD, DIV, MUL, SUB, floating, known, made, sane
from torchstone.rewrite.pattern import V, op
from torchstone.rewrite.rule import Rule, rule

__all__ = ["MERGING", "MOVING"]

aten = torch.ops.aten
_NUMBERS = (0.3, -2, 3.0)
_TWICE = {"a": (0.3, -2, 3.0, 8), "b": (0.5, -1.5, 7, 5.0)}


@rule(
    op((*MUL, *DIV), op((*MUL, *DIV), V("x"), V("a"), bind="first"), V("b"), bind="second"),
    family="folding",
    shapes={"x": "*b m"},
    constants={**_TWICE, "first": (MUL[0], DIV[0]), "second": (MUL[0], DIV[0])},
    always=True,
)
def scaled_twice(x: Any, a: Any, b: Any, first: Any, second: Any) -> Any:
    """(a x) b = (a b) x for numbers; likewise with a division for either."""
    if not floating(x) or not sane(a, b):
        return NotImplemented
    if first in DIV and second in DIV:
        return torch.div(x, a * b)
    if first in DIV:
        return torch.mul(x, b / a)
    return torch.mul(x, a * b if second in MUL else a / b)


@rule(
    op((*ADD, *SUB), op((*ADD, *SUB), V("x"), V("a"), bind="first"), V("b"), bind="second"),
    family="folding",
    shapes={"x": "*b m"},
    constants={**_TWICE, "first": (ADD[0], SUB[0]), "second": (ADD[0], SUB[0])},
    always=True,
)
def shifted_twice(x: Any, a: Any, b: Any, first: Any, second: Any) -> Any:
    """(x + a) + b = x + (a + b) for numbers of one sign; likewise with a difference for either.

    Numbers of two signs stay: what the first rounds away may be meant to be lost.
    """
    if not floating(x) or not sane(a, b):
        return NotImplemented
    a, b = (-a if first in SUB else a), (-b if second in SUB else b)
    return torch.add(x, a + b) if (a > 0) is (b > 0) else NotImplemented


@rule(
    op(ADD, V("x"), V("x")),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "*b m"},
    always=True,
)
def doubled(x: Any) -> Any:
    """x + x = 2 x: one operand, and a scale that may be folded."""
    return torch.mul(x, 2) if floating(x) else NotImplemented


_COPIES = (
    V("x"),
    op(aten.clone.default, V("x")),
    op(aten.detach.default, op(aten.clone.default, V("x"))),
)


def _residual(i: int, copy: Any) -> Rule:
    @made(
        "scaled_residual" if not i else f"scaled_residual_of_copy_{i}",
        op(ADD, op(MUL, V("x"), V("s")), copy),
        family="folding",
        shapes={"x": "*b m"},
        constants={"s": (0.5, 2, 3.0, -0.25)},
        always=True,
    )
    def residual(given: SimpleNamespace) -> Any:
        """s x + x = (s + 1) x for a number s that is not near -1."""
        if not floating(given.x) or not sane(given.s, given.s + 1) or given.s < -0.5:
            return NotImplemented
        return torch.mul(given.x, given.s + 1)

    return residual


def _through(name: str, target: Any, arguments: Mapping[str, Sequence[Any]], shape: str) -> Rule:
    @made(
        f"scale_through_{name}",
        op((*MUL, *DIV), op(target, V("x"), *map(V, arguments)), V("s"), bind="how"),
        family="folding",
        numerics=Numerics.EXACT,
        shapes={"x": shape},
        constants={**arguments, "s": _NUMBERS, "how": (MUL[0], DIV[0])},
        always=True,
    )
    def through(given: SimpleNamespace) -> Any:
        """A number scales a view as it scales what is viewed, where it may be folded."""
        values = [getattr(given, n) for n in arguments]
        if not floating(given.x) or not sane(given.s):
            return NotImplemented
        if not all(known(v if isinstance(v, list | tuple) else [v]) for v in values):
            return NotImplemented
        return target(given.how(given.x, given.s), *values)

    return through


_VIEWS = (
    _through("squeeze", aten.squeeze.dims, {"dims": ([0], [1], [-1, 1])}, "1 1 m|m n 1"),
    _through("squeeze_of_dim", aten.squeeze.dim, {"dim": (0, 1, -1)}, "1 1 m|m n 1"),
    _through("unsqueeze", aten.unsqueeze.default, {"dim": (0, 1, -1)}, "m n"),
    _through("unflatten", aten.unflatten.int, {"dim": (1, -1), "sizes": ([2, -1], [-1, 1])}, "m 2*n"),
    _through("flatten", aten.flatten.using_ints, {"start": (0, 1), "end": (-1,)}, "l m n"),
    _through("permute", aten.permute.default, {"dims": ([1, 2, 0], [0, 2, 1])}, "l m n"),
    _through("transpose", aten.transpose.int, {"a": (0, 1), "b": (-1, 1)}, "l m n"),
)


@rule(
    op(DIV, V("x"), V("c")),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "*b m"},
    constants={"c": (2, 0.25, -8.0, 1024, 3, 0.1, 6)},
    always=True,
)
def division_by_power_of_two(x: Any, c: Any) -> Any:
    """x / 2ᵏ = 2⁻ᵏ x to the bit, where 2ᵏ and 2⁻ᵏ are normal numbers of every format."""
    if not floating(x) or not sane(c):
        return NotImplemented
    fraction, exponent = math.frexp(c)
    return torch.mul(x, 1 / c) if abs(fraction) == 0.5 and abs(exponent) < 14 else NotImplemented


@rule(
    op(aten.permute.default, op(aten.permute.default, V("x"), V("first")), V("second")),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "a b c"},
    constants={
        "first": ([1, 2, 0], [0, 2, 1], [2, 0, 1], [-1, 0, 1]),
        "second": ([1, 2, 0], [0, 2, 1], [2, 1, 0], [0, -1, 1]),
    },
    always=True,
)
def permuted_twice(x: Any, first: Any, second: Any) -> Any:
    """A permutation of a permutation is one permutation, or none."""
    if not known(first) or not known(second):
        return NotImplemented
    order = [first[d] % x.dim() for d in second]
    return x if order == list(range(x.dim())) else x.permute(order)


@rule(
    op(aten.transpose.int, op(aten.transpose.int, V("x"), V("a"), V("b")), V("c"), V("d")),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "l m n"},
    constants={"a": (0, 1, -1), "b": (1, 2, -2), "c": (0, 1, -1), "d": (1, 2, -2)},
    always=True,
)
def transposed_twice(x: Any, a: int, b: int, c: int, d: int) -> Any:
    """Exchanging the same two dims twice changes nothing."""
    return x if {a % x.dim(), b % x.dim()} == {c % x.dim(), d % x.dim()} else NotImplemented


@rule(
    op(
        (aten.t.default, aten.numpy_T.default),
        op((aten.t.default, aten.numpy_T.default), V("x"), bind="first"),
        bind="second",
    ),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "m n"},
    constants=dict.fromkeys(("first", "second"), (aten.t.default, aten.numpy_T.default)),
    always=True,
)
def matrix_transposed_twice(x: Any, first: Any, second: Any) -> Any:
    """(Aᵀ)ᵀ = A."""
    return x


_RESHAPES = (aten.view.default, aten.reshape.default)


@rule(
    op(_RESHAPES, op(_RESHAPES, V("x"), V("first"), bind="how"), V("second"), bind="last"),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "2 3 4"},
    constants={
        "first": ([6, 4], [24], [-1, 3], [2, 12]),
        "second": ([4, -1], [2, 3, 4], [12, 2], [24, 1]),
        "how": _RESHAPES,
        "last": _RESHAPES,
    },
    always=True,
)
def reshaped_twice(x: Any, first: Any, second: Any, how: Any, last: Any) -> Any:
    """Only the last of two reshapes counts, since neither reorders elements."""
    if not known(second):
        return NotImplemented
    return x if known(x.shape) and list(x.shape) == list(second) else x.reshape(second)


@rule(
    op(aten.squeeze.dim, op(aten.unsqueeze.default, V("x"), V("dim")), V("dim")),
    family="folding",
    numerics=Numerics.EXACT,
    shapes={"x": "m n"},
    constants={"dim": (0, 1, 2, -1)},
    always=True,
)
def squeezed_again(x: Any, dim: int) -> Any:
    """A dim put in and taken out."""
    return x


MERGING: tuple[Rule, ...] = (
    scaled_twice,
    shifted_twice,
    doubled,
    *(_residual(i, copy) for i, copy in enumerate(_COPIES)),
)
"""Elementwise steps that become one."""

MOVING: tuple[Rule, ...] = (
    *_VIEWS,
    division_by_power_of_two,
    permuted_twice,
    transposed_twice,
    matrix_transposed_twice,
    reshaped_twice,
    squeezed_again,
)
"""Scales moved through views, and views that cancel."""
