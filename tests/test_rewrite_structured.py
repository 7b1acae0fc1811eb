"""Matrix products with structure: less work, the same product."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rewrite_samples import agrees, fired, forced, named, refuted, rewritten, targets
from torchstone.rewrite import proof
from torchstone.rewrite.families.structured import RULES
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
PRODUCTS = {aten.matmul.default, aten.mm.default, aten.bmm.default, aten.linear.default}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_is_an_identity(rule: Rule) -> None:
    found = [proof.prove(rule, seed) for seed in range(2)]
    assert [f.counterexample for f in found] == [None] * 2
    assert sum(f.held for f in found) >= 20


WRONG: dict[str, Callable[..., Any]] = {
    "diagonal_left": lambda d, b, diag: d * b,
    "diagonal_right": lambda a, d, diag: a * d[:, None] if a.shape[-2:-1] == d.shape else a * d.flip(0),
    "diagonals_left": lambda d, b: d.unsqueeze(-2) * b,
    "diagonals_right": lambda a, d: a * d.flip(-1).unsqueeze(-2),
    "diagonal_linear": lambda x, d, bias, diag: x * d,
    "outer_left": lambda u, v, b: torch.outer(u, b.mT @ v.flip(0)),
    "outer_right": lambda u, v, a: torch.outer(a @ u, v) * (1 + 1e-9),
    "associate_right": lambda a, b, c: a @ (b @ c) * (1 + 1e-9),
    "associate_left": lambda a, b, c: a @ b @ c.flip(-1),
    "linear_of_expanded": lambda x, sizes, weight, bias: F.linear(x, weight).expand(*sizes[:-1], -1),
    "linear_of_repeated": lambda x, repeats, weight, bias: F.linear(x, weight).repeat(repeats),
    "one_right_factor": lambda a, b, sizes: torch.matmul(a[:1], b).expand(4, -1, -1),
    "lower_left": lambda a, b: a @ b,
    "upper_left": lambda a, b: a.triu(1) @ b,
    "lower_right": lambda a, b: a @ b.tril(-1),
    "upper_right": lambda a, b: a @ b.tril(),
    "lower_of_product": lambda a, b: (a @ b).tril(1),
    "upper_of_product": lambda a, b: a.triu() @ b.triu(),
    "gram_t": lambda a: (a @ a.mT).tril() + (a @ a.mT).tril().mT,
    "gram_transpose": lambda a, i, j: (a @ a.mT).tril() + (a @ a.mT).tril().mT,
    "scale_left": lambda a, b, s, times: a @ b * s,
    "scale_right": lambda a, b, s, times: a @ times(times(b, s), s),
    "scale_rows": lambda a, b, s, times: times(a, s.mT) @ b if a.shape[-1] == a.shape[-2] else a @ b,
    "scale_columns": lambda a, b, s, times: times(a @ b, s.flip(0)),
    "scale_matrices": lambda a, b, s, times: times(a, s[:1]) @ b,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_refuted(name: str) -> None:
    (rule,) = [r for r in RULES if r.name == name]

    def wrong(**given: Any) -> Any:
        refused = rule.replacement(**given) is NotImplemented
        try:
            return NotImplemented if refused else WRONG[name](**given)
        except RuntimeError:
            return torch.zeros(())  # no such sizes: not what it should be either

    assert refuted(rule, wrong)


def vectors(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum(0)


GENERAL: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a diagonal matrix times": (lambda x: torch.diag(vectors(x)) @ x.mT, ["diagonal_left"]),
    "times a diagonal matrix": (lambda x: x @ torch.diag(vectors(x)), ["diagonal_right"]),
    "times diagonal matrices": (lambda x: x[:, None] @ torch.diag_embed(x.cos()), ["diagonals_right"]),
    "diagonal matrices times": (
        lambda x: torch.diag_embed(x.cos()) @ x[:, :, None].sin(),
        ["diagonals_left"],
    ),
    "a diagonal layer": (
        lambda x: F.linear(x, torch.diag_embed(vectors(x)), vectors(x)),
        ["diagonal_linear"],
    ),
    "rank one on the left": (
        lambda x: torch.outer(vectors(x), vectors(x)) @ x.mT.sin(),
        ["outer_left"],
    ),
    "rank one on the right": (lambda x: x @ torch.outer(vectors(x), vectors(x)), ["outer_right"]),
}


@pytest.mark.parametrize("name", GENERAL)
def test_structure_is_used_where_it_pays(name: str) -> None:
    function, expected = GENERAL[name]
    found = rewritten(function, RULES, torch.randn(9, 64))
    assert [f for f in fired(found) if not found.fired[fired(found).index(f)].measured] == expected
    agrees(function, found.module, torch.randn(9, 64))
    agrees(function, found.module, torch.randn(5, 64))


def test_a_product_of_three_is_associated_by_cost() -> None:
    def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x @ (a @ b)

    def late(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x @ a @ b

    narrow = torch.randn(16, 128), torch.randn(128, 4), torch.randn(4, 128)
    wide = torch.randn(60, 128), torch.randn(128, 512), torch.randn(512, 2)
    for function, given, rule in ((low_rank, narrow, "associate_left"), (late, wide, "associate_right")):
        found = rewritten(function, named(RULES, "associate"), *given, fixed=2)
        assert fired(found) == [rule]  # and not back again
        agrees(function, found.module, *given)
        agrees(function, found.module, torch.randn(3, 128), *given[1:])
    assert fired(rewritten(late, named(RULES, "associate"), *narrow, fixed=2)) == []


SCALED: dict[str, Callable[..., Any]] = {
    "scale_left": lambda x, y: (x @ y.mT) * 0.25,
    "scale_rows": lambda x, y: (x @ y.mT) / x.exp().sum(-1, keepdim=True),
    "scale_right": lambda x, y: (y @ x.mT) * 0.25,
    "scale_columns": lambda x, y: (y @ x.mT) * x.sum(-1),
    "scale_matrices": lambda x, y: (x[:, None] @ y.mT) * x.sum((1,))[:, None, None],
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_moves_to_the_smaller_factor(name: str) -> None:
    given = torch.randn(5, 4), torch.randn(4096, 4)
    found = rewritten(SCALED[name], named(RULES, name), *given, fixed=1)
    assert fired(found) == [name]
    agrees(SCALED[name], found.module, *given)
    agrees(SCALED[name], found.module, torch.randn(9, 4), given[1])
    large = torch.randn(5, 4096), torch.randn(4, 4096)
    assert fired(rewritten(SCALED[name], named(RULES, name), *large, fixed=1)) == []


class Repeated(nn.Module):
    """A layer of the same input many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.unsqueeze(1).expand(-1, 50, -1)), self.layer(x.repeat(1, 30, 1))


def test_a_layer_of_what_is_repeated_is_computed_once() -> None:
    module = Repeated()
    found = rewritten(module, RULES, torch.randn(7, 64))
    assert set(fired(found)) >= {"linear_of_expanded", "linear_of_repeated"}
    agrees(module, found.module, torch.randn(7, 64))
    agrees(module, found.module, torch.randn(3, 64))


TRIANGULAR: dict[str, Callable[..., Any]] = {
    "lower_left": lambda x, y: torch.tril(x) @ y,
    "upper_left": lambda x, y: torch.triu(x) @ y,
    "lower_right": lambda x, y: y @ torch.tril(x),
    "upper_right": lambda x, y: torch.bmm(y, torch.triu(x)),
    "lower_of_product": lambda x, y: torch.tril(x @ y),
    "upper_of_product": lambda x, y: torch.triu(torch.bmm(x, y)),
    "gram_transpose": lambda x, y: (x.transpose(1, 2) @ x + y, x @ x.transpose(-1, -2) + y)[1],
    "gram_mT": lambda x, y: torch.matmul(x, x.mT) + y,
    "one_right_factor": lambda x, y: x @ y[:1].expand(x.shape[0], -1, -1) + y,
}


@pytest.mark.parametrize("name", TRIANGULAR)
def test_triangles_are_multiplied_by_blocks(name: str) -> None:
    function = TRIANGULAR[name]
    given = [torch.randn(3, 19, 19) for _ in range(2)]
    found = rewritten(function, forced(*named(RULES, name)), *given)
    assert fired(found)[0] == name
    agrees(function, found.module, *given)
    agrees(function, found.module, *[torch.randn(5, 19, 19) for _ in range(2)])
    blocks = sum(t in PRODUCTS for t in targets(found.module))
    assert blocks == (1 if name == "one_right_factor" else 8)


def test_what_a_triangle_hides_is_not_read() -> None:
    x, y = torch.randn(2, 16, 16), torch.randn(2, 16, 16)
    found = rewritten(TRIANGULAR["lower_of_product"], forced(*named(RULES, "lower_of")), x, y)
    y[..., 15] = math.nan  # only the last row of the product has this column
    out = found.module(x, y)
    assert not out[:, :14].isnan().any()
    assert out[:, 15, 15].isnan().all()


KEPT: dict[str, Callable[..., Any]] = {
    "a diagonal beside the main one": lambda x: torch.diag(vectors(x), 1)[:-1, :-1] @ x.mT,
    "the diagonal of a matrix": lambda x: torch.diag(x.mT @ x.sin()) @ x.mT,
    "a triangle with another diagonal": lambda x: torch.tril(x.mT @ x.sin(), -1),
    "a square, not a Gram matrix": lambda x: (y := x.mT @ x.sin()) @ y.sin(),
    "another tensor": lambda x: x @ x.sin().mT,
    "used twice": lambda x: ((y := torch.diag(vectors(x))) @ x.mT, y),
    "another dtype": lambda x: torch.diag(vectors(x)).double() @ x.mT.double(),
    "rows of what varies": lambda x: torch.tril(x) @ vectors(x),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_must_not_fire(name: str) -> None:
    chosen = [r for r in RULES if not r.name.startswith(("associate", "scale"))]
    assert fired(rewritten(KEPT[name], forced(*chosen), torch.randn(9, 12))) == []


def test_a_symbolic_number_of_rows_is_not_cut_into_blocks() -> None:
    found = rewritten(lambda x: torch.tril(x @ x.sin().mT), forced(*RULES), torch.randn(9, 12))
    assert "lower_of_product" not in fired(found)


def test_what_is_measured_is_right_whichever_way_was_quicker() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.triu(x @ y)

    given = [torch.randn(2, 48, 48) for _ in range(2)]
    found = rewritten(function, RULES, *given)
    assert all(one.measured for one in found.fired)
    agrees(function, found.module, *given)
