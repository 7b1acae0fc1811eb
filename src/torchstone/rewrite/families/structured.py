"""Matrix products with structure: diagonal, triangular, rank one, repeated, scaled, or of three.

A product whose structure shows in the graph (``tril(A) @ B``, ``triu(A @ B)``, ``A @ A.T``) is computed
in blocks of rows, without those that are zero or not wanted: right for any input. What is triangular
only by its values needs a guard at run time. In plain ATen that is a copy to the host, or both branches
computed, so it is left to kernels, which can look at a block's values where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchstone.rewrite.families.arguments import is_one, known, made, number, same_dtype
from torchstone.rewrite.pattern import Op, V, op
from torchstone.rewrite.rule import Rule

__all__ = ["RULES"]

aten = torch.ops.aten
_Function = Callable[[SimpleNamespace], Any]
_PRODUCT = (aten.matmul.default, aten.mm.default, aten.bmm.default)
_DIAGONAL = (aten.diag_embed.default, aten.diag.default)
_A, _B = V("a"), V("b")
_BLOCKS = 8
"""Blocks of rows of a triangle: 9 of 16 parts of the work are left, and products stay large."""


def _structured(
    name: str, pattern: Op, shapes: dict[str, str], *, measured: bool = False, **constants: Any
) -> Callable[[_Function], Rule]:
    """A rule of this family; measured where the gain is less work in smaller products."""
    return made(
        name, pattern, family="structured", shapes=shapes, constants=constants, measured=measured
    )


def _matrices(*tensors: Any) -> bool:
    return same_dtype(*tensors) and all(t.dim() >= 2 for t in tensors)


# Diagonal


def _one_diagonal(d: Any, like: Any) -> bool:
    """Whether a diagonal is a vector, to be multiplied with a tensor of its dtype."""
    return same_dtype(d, like) and d.dim() == 1


@_structured(
    "diagonal_left",
    op(_PRODUCT, op(_DIAGONAL, V("d"), bind="diag"), _B),
    {"d": "k", "b": "*b k n"},
    diag=_DIAGONAL,
)
def _diagonal_left(call: SimpleNamespace) -> Any:
    """Diag(d) B = d[:, None] * B."""
    if not _one_diagonal(call.d, call.b):
        return NotImplemented
    return call.d * call.b if call.b.dim() == 1 else call.d[:, None] * call.b


@_structured(
    "diagonal_right",
    op(_PRODUCT, _A, op(_DIAGONAL, V("d"), bind="diag")),
    {"d": "k", "a": "*b k"},
    diag=_DIAGONAL,
)
def _diagonal_right(call: SimpleNamespace) -> Any:
    """A diag(d) = A * d."""
    return call.a * call.d if _one_diagonal(call.d, call.a) else NotImplemented


@_structured(
    "diagonals_left",
    op(_PRODUCT, op(aten.diag_embed.default, V("d")), _B),
    {"d": "*b k", "b": "c *b k n"},
)
def _diagonals_left(call: SimpleNamespace) -> Any:
    """Diag(d[i]) B[i] = d[i][:, None] * B[i]."""
    return call.d.unsqueeze(-1) * call.b if _matrices(call.b, call.d) else NotImplemented


@_structured(
    "diagonals_right",
    op(_PRODUCT, _A, op(aten.diag_embed.default, V("d"))),
    {"d": "*b k", "a": "c *b m k"},
)
def _diagonals_right(call: SimpleNamespace) -> Any:
    """A[i] diag(d[i]) = A[i] * d[i]."""
    return call.a * call.d.unsqueeze(-2) if _matrices(call.a, call.d) else NotImplemented


@_structured(
    "diagonal_linear",
    op(aten.linear.default, V("x"), op(_DIAGONAL, V("d"), bind="diag"), V("bias")),
    {"d": "k", "x": "*b k", "bias": "k?"},
    diag=_DIAGONAL,
)
def _diagonal_linear(call: SimpleNamespace) -> Any:
    """X diag(d)ᵀ + b = x * d + b."""
    if not _one_diagonal(call.d, call.x):
        return NotImplemented
    out = call.x * call.d
    return out if call.bias is None else out + call.bias


# Rank one


@_structured(
    "outer_left",
    op(_PRODUCT, op(aten.outer.default, V("u"), V("v")), _B),
    {"u": "m", "v": "k", "b": "k n"},
)
def _outer_left(call: SimpleNamespace) -> Any:
    """(u vᵀ) B = u (vᵀ B)."""
    if not same_dtype(call.u, call.v, call.b) or call.b.dim() != 2:
        return NotImplemented
    return torch.outer(call.u, call.v @ call.b)


@_structured(
    "outer_right",
    op(_PRODUCT, _A, op(aten.outer.default, V("u"), V("v"))),
    {"u": "k", "v": "n", "a": "m k"},
)
def _outer_right(call: SimpleNamespace) -> Any:
    """A (u vᵀ) = (A u) vᵀ."""
    if not same_dtype(call.u, call.v, call.a) or call.a.dim() != 2:
        return NotImplemented
    return torch.outer(call.a @ call.u, call.v)


# Products of three


@_structured(
    "associate_right",
    op(_PRODUCT, op(_PRODUCT, _A, _B), V("c")),
    {"a": "*b m k", "b": "*b k n", "c": "*b n p"},
)
def _associate_right(call: SimpleNamespace) -> Any:
    """(A B) C = A (B C)."""
    if not _matrices(call.a, call.b, call.c):
        return NotImplemented
    return torch.matmul(call.a, torch.matmul(call.b, call.c))


@_structured(
    "associate_left",
    op(_PRODUCT, _A, op(_PRODUCT, _B, V("c"))),
    {"a": "*b m k", "b": "*b k n", "c": "*b n p"},
)
def _associate_left(call: SimpleNamespace) -> Any:
    """A (B C) = (A B) C."""
    if not _matrices(call.a, call.b, call.c):
        return NotImplemented
    return torch.matmul(torch.matmul(call.a, call.b), call.c)


# Scaled


def _scales(scale: Any, like: Any, dim: int) -> bool:
    """Whether it is one number for each row (``dim`` -1), or each column (-2), or for all."""
    if number(scale):
        return True
    if not isinstance(scale, torch.Tensor) or scale.dtype != like.dtype or scale.dim() > like.dim():
        return False
    return scale.dim() < -dim or statically_known_true(scale.shape[dim] == 1)


def _scale_left(call: SimpleNamespace) -> Any:
    """(A B) * s = (A * s) B for a number s for each row."""
    if not _matrices(call.a, call.b) or not _scales(call.s, call.a, -1):
        return NotImplemented
    return torch.matmul(call.times(call.a, call.s), call.b)


def _scale_right(call: SimpleNamespace) -> Any:
    """(A B) * s = A (B * s) for a number s for each column."""
    if not _matrices(call.a, call.b) or not _scales(call.s, call.b, -2):
        return NotImplemented
    return torch.matmul(call.a, call.times(call.b, call.s))


def _scale(name: str, function: _Function, shape: str | None) -> Rule:
    """Of a product that is scaled by a tensor of a shape, or a number."""
    targets = (aten.mul.Tensor, aten.div.Tensor)
    shapes = {"a": "b m k", "b": "b k n"}
    pattern = op(targets, op(_PRODUCT, _A, _B), V("s"), bind="times")
    if shape is None:
        return _structured(name, pattern, shapes, times=targets, s=(0.5, 3, -1e-3))(function)
    return _structured(name, pattern, {**shapes, "s": shape}, times=targets)(function)


# Repeated


@_structured(
    "linear_of_expanded",
    op(aten.linear.default, op(aten.expand.default, V("x"), V("sizes")), V("weight"), V("bias")),
    {"x": "k 1 3", "weight": "n 3", "bias": "n?"},
    sizes=([-1, 4, 3], [2, -1, 4, -1], [5, 3]),
)
def _linear_of_expanded(call: SimpleNamespace) -> Any:
    """(x for all) Wᵀ + b = (x Wᵀ + b) for all."""
    if not known(call.sizes) or call.sizes[-1] not in (-1, call.x.shape[-1]):
        return NotImplemented
    return F.linear(call.x, call.weight, call.bias).expand(*call.sizes[:-1], -1)


@_structured(
    "linear_of_repeated",
    op(aten.linear.default, op(aten.repeat.default, V("x"), V("repeats")), V("weight"), V("bias")),
    {"x": "k 3", "weight": "n 3", "bias": "n?"},
    repeats=([2, 1], [3, 2, 1], [1, 2]),
)
def _linear_of_repeated(call: SimpleNamespace) -> Any:
    """(x again and again) Wᵀ + b = (x Wᵀ + b) again and again."""
    if not known(call.repeats) or call.repeats[-1] != 1:
        return NotImplemented
    return F.linear(call.x, call.weight, call.bias).repeat(call.repeats)


@_structured(
    "one_right_factor",
    op((aten.bmm.default, aten.matmul.default), _A, op(aten.expand.default, _B, V("sizes"))),
    {"a": "4 m k", "b": "1 k n"},
    measured=True,
    sizes=([4, -1, -1],),
)
def _one_right_factor(call: SimpleNamespace) -> Any:
    """A[i] B for all i = one product of all rows with B."""
    if not _matrices(call.a, call.b) or call.a.dim() != 3 or len(call.sizes) != 3:
        return NotImplemented
    if call.b.dim() == 3 and not is_one(call.b.shape[0]):
        return NotImplemented
    return torch.matmul(call.a, call.b[0] if call.b.dim() == 3 else call.b)


# Triangular


def _spans(size: Any) -> list[tuple[int, int]] | None:
    """Where blocks of rows begin and end; None where there is nothing to divide."""
    if type(size) is not int or size < 2:
        return None
    count = min(_BLOCKS, size)
    edges = [size * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _lower_left(call: SimpleNamespace) -> Any:
    """Tril(A) B: each block of rows meets only the columns up to its end."""
    spans = _spans(call.a.shape[-2]) if _matrices(call.a, call.b) else None
    if spans is None:
        return NotImplemented
    full = call.a.tril()
    return torch.cat([full[..., i:j, :j] @ call.b[..., :j, :] for i, j in spans], -2)


def _upper_left(call: SimpleNamespace) -> Any:
    """Triu(A) B: each block of rows meets only the columns from its start."""
    spans = _spans(call.a.shape[-2]) if _matrices(call.a, call.b) else None
    if spans is None:
        return NotImplemented
    full = call.a.triu()
    return torch.cat([full[..., i:j, i:] @ call.b[..., i:, :] for i, j in spans], -2)


def _lower_right(call: SimpleNamespace) -> Any:
    """A tril(B): each block of columns meets only the rows from its start."""
    spans = _spans(call.b.shape[-1]) if _matrices(call.a, call.b) else None
    if spans is None:
        return NotImplemented
    full = call.b.tril()
    return torch.cat([call.a[..., i:] @ full[..., i:, i:j] for i, j in spans], -1)


def _upper_right(call: SimpleNamespace) -> Any:
    """A triu(B): each block of columns meets only the rows up to its end."""
    spans = _spans(call.b.shape[-1]) if _matrices(call.a, call.b) else None
    if spans is None:
        return NotImplemented
    full = call.b.triu()
    return torch.cat([call.a[..., :j] @ full[..., :j, i:j] for i, j in spans], -1)


def _lower_blocks(a: Any, b: Any) -> Any:
    """A B where a lower triangle needs it, by blocks of rows; NotImplemented for unknown sizes."""
    spans, columns = _spans(a.shape[-2]), b.shape[-1]
    if spans is None or type(columns) is not int or a.dim() != b.dim():
        return NotImplemented
    parts = [a[..., i:j, :] @ b[..., :j] for i, j in spans]
    wide = [F.pad(p, (0, columns - min(j, columns))) for p, (_, j) in zip(parts, spans, strict=True)]
    return torch.cat(wide, -2)


def _lower_of_product(call: SimpleNamespace) -> Any:
    """Tril(A B): each block of rows needs only the columns up to its end."""
    found = _lower_blocks(call.a, call.b) if _matrices(call.a, call.b) else NotImplemented
    return found if found is NotImplemented else found.tril()


def _upper_of_product(call: SimpleNamespace) -> Any:
    """Triu(A B): each block of rows needs only the columns from its start."""
    spans = _spans(call.a.shape[-2]) if _matrices(call.a, call.b) else None
    columns = call.b.shape[-1]
    if spans is None or type(columns) is not int or call.a.dim() != call.b.dim():
        return NotImplemented
    parts = [call.a[..., i:j, :] @ call.b[..., i:] for i, j in spans]
    wide = [F.pad(p, (min(i, columns), 0)) for p, (i, _) in zip(parts, spans, strict=True)]
    return torch.cat(wide, -2).triu()


def _gram(call: SimpleNamespace) -> Any:
    """A Aᵀ is symmetric: its lower triangle, mirrored."""
    if not _matrices(call.a) or not _turned(call):
        return NotImplemented
    found = _lower_blocks(call.a, call.a.mT)
    if found is NotImplemented:
        return found
    return found.tril() + found.tril(-1).mT


def _turned(call: SimpleNamespace) -> bool:
    """Whether a transpose that is written with dims is one of the last two."""
    if not hasattr(call, "i"):
        return True
    dims: int = call.a.dim()
    return {call.i % dims, call.j % dims} == {dims - 1, dims - 2}


def _triangular() -> list[Rule]:
    shapes = {"a": "b m k", "b": "b k n"}
    product = op(_PRODUCT, _A, _B)
    patterns: dict[str, tuple[Op, _Function]] = {
        "lower_left": (op(_PRODUCT, op(aten.tril.default, _A), _B), _lower_left),
        "upper_left": (op(_PRODUCT, op(aten.triu.default, _A), _B), _upper_left),
        "lower_right": (op(_PRODUCT, _A, op(aten.tril.default, _B)), _lower_right),
        "upper_right": (op(_PRODUCT, _A, op(aten.triu.default, _B)), _upper_right),
        "lower_of_product": (op(aten.tril.default, product), _lower_of_product),
        "upper_of_product": (op(aten.triu.default, product), _upper_of_product),
    }
    found = [_structured(n, p, shapes, measured=True)(f) for n, (p, f) in patterns.items()]
    turned = {"t": aten.t.default, "mT": aten.mT.default, "numpy_T": aten.numpy_T.default}
    for name, target in turned.items():
        pattern = op(_PRODUCT, _A, op(target, _A))
        shape = "m k" if name != "mT" else "b m k"
        found.append(_structured(f"gram_{name}", pattern, {"a": shape}, measured=True)(_gram))
    pattern = op(_PRODUCT, _A, op(aten.transpose.int, _A, V("i"), V("j")))
    dims = {"i": (1, -1, 2), "j": (2, -2, 1)}
    found.append(_structured("gram_transpose", pattern, {"a": "2 2 k"}, measured=True, **dims)(_gram))
    return found


RULES: tuple[Rule, ...] = (
    _diagonal_left,
    _diagonal_right,
    _diagonals_left,
    _diagonals_right,
    _diagonal_linear,
    _outer_left,
    _outer_right,
    _linear_of_expanded,
    _linear_of_repeated,
    _one_right_factor,
    *_triangular(),
    _associate_right,
    _associate_left,
    _scale("scale_left", _scale_left, None),
    _scale("scale_right", _scale_right, None),
    _scale("scale_rows", _scale_left, "b m 1"),
    _scale("scale_columns", _scale_right, "n"),
    _scale("scale_matrices", _scale_left, "b 1 1"),
)
"""Products with structure."""
