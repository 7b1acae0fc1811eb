"""Removals that must be equal to the bit, and longhand forms that have a name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rewrite_samples import agrees, fired, leaves, refuted, rewritten, targets
from torchstone.recipe import Numerics
from torchstone.rewrite import pattern, proof
from torchstone.rewrite.families import longhand, simplify
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
ALL = (*simplify.RULES, *longhand.RULES)
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 0.5, -3.0, 7.0])


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.name)
def test_each_rule_is_an_identity(rule: Rule) -> None:
    found = [proof.prove(rule, seed, draws=40) for seed in range(2)]
    assert [f.counterexample for f in found] == [None] * 2
    assert sum(f.held for f in found) >= 5


def test_names_are_unique_and_every_rule_removes_work() -> None:
    assert len({rule.name for rule in ALL}) == len(ALL)
    assert all(rule.always for rule in ALL)
    assert {rule.numerics for rule in longhand.RULES} == {Numerics.REASSOCIATES}


def _not_exact() -> list[Rule]:
    return [r for r in simplify.RULES if r.numerics is Numerics.EXACT and not set(r.shapes) - {"x"}]


@pytest.mark.parametrize("rule", [r for r in _not_exact() if "_of_" in r.name or "positive" in r.name])
def test_exact_rules_hold_for_nan_infinities_and_signed_zeros(rule: Rule) -> None:
    values = {n: v for n, v in rule.constants.items() if not isinstance(v, str)}
    for i in range(3):
        given = {n: list(v)[i % len(v)] for n, v in values.items()}
        x = SPECIAL[None] if "dim" in given else SPECIAL
        if "dim" in given:
            given["dim"] = -1
        elif "unsqueeze" in rule.name:
            continue
        wanted, got = pattern.evaluate(rule.pattern, {"x": x, **given}), rule.replacement(x=x, **given)
        if got is NotImplemented:
            continue
        assert torch.equal(got.nan_to_num(9.0), wanted.nan_to_num(9.0))
        number = ~wanted.isnan()
        assert torch.equal(torch.signbit(got[number]), torch.signbit(wanted[number]))


def _nudged(rule: Rule) -> Callable[..., Any]:
    def wrong(**given: Any) -> Any:
        out = rule.replacement(**given)
        return out if out is NotImplemented else out * (1 + 1e-9)

    return wrong


@pytest.mark.parametrize("rule", longhand.RULES, ids=lambda r: r.name)
def test_forms_that_are_only_nearly_the_same_are_refuted(rule: Rule) -> None:
    assert refuted(rule, _nudged(rule))


WRONG = {
    "gelu_tanh_0": lambda x, **_: F.gelu(x),
    "gelu_over_0": lambda x, **_: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.mish(x) * 1.0,
    "hardswish_clamp_last": lambda x: F.silu(x) * 1.0,
    "mish": lambda x: x * torch.tanh(F.softplus(x, beta=2)),
    "log_of_softmax": lambda x, dim: torch.log_softmax(x, 1 - dim % 2),
    "logsumexp": lambda x, dims, keepdim: torch.logsumexp(x, [0], keepdim),
    "rms_norm_pow_rsqrt": lambda x, dims, eps: F.rms_norm(x, x.shape[-1:], None, 1e-5),
    "layer_norm_var_over": lambda x, dims, eps, unbiased: F.layer_norm(x, x.shape[-1:], None, None, eps),
    "rms_norm_weight": lambda x, shape, eps, weight: F.rms_norm(x, shape, weight + 1e-6, eps),
    "dropout_off": lambda x, p, train: x * (1 - p),
    "transpose_twice": lambda x, a, b, c, d: x,
    "permute_twice": lambda x, a, b: x,
    "squeeze_of_unsqueeze": lambda x, a, b: x,
    "flip_twice": lambda x, a, b: x,
    "unary_times_one": lambda inner, x: x,
    "already_positive": lambda inner, x: inner(x) + 0.5,
    "clamp_of_clamp": lambda x, low_in, high_in, low_out, high_out: x.clamp(low_out, high_out),
    "hardtanh_of_relu": lambda x, low_out, high_out: x.clamp(low_out, high_out),
    "softmax_plus_row": lambda x, c, dim, softmax: softmax(x, dim),
    "softmax_minus_row": lambda x, c, dim, softmax: softmax(x, dim),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_refuted(name: str) -> None:
    (rule,) = [r for r in ALL if r.name == name]
    assert refuted(rule, WRONG[name])


class Longhand(nn.Module):
    """Norms and activations as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        x = self.linear(x)
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6)
        x = x * F.relu6(x + 3) / 6
        x = x + x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        x = self.linear(x) * torch.sigmoid(self.linear(x))
        x = x / (1 + torch.exp(-x))
        return torch.log(torch.softmax(x * torch.tanh(F.softplus(x)), dim=-1))


def test_longhand_is_named() -> None:
    module = Longhand()
    found = rewritten(module, ALL, torch.randn(3, 4, 6))
    called = set(targets(found.module))
    for name in ("rms_norm", "gelu", "layer_norm", "hardswish", "silu", "mish", "log_softmax"):
        assert any(t._schema.name == f"aten::{name}" for t in called if hasattr(t, "_schema")), name
    for name in ("tanh", "erf", "pow", "rsqrt", "exp", "softplus", "relu6", "log"):
        assert not any(t._schema.name == f"aten::{name}" for t in called if hasattr(t, "_schema")), name
    agrees(module, found.module, torch.randn(3, 4, 6))
    agrees(module, found.module, torch.randn(5, 4, 6))


def nothing(x: torch.Tensor) -> torch.Tensor:
    """A chain of operations of which one is left."""
    x = torch.relu(torch.tanh(x) * 1)
    x = F.dropout(F.dropout(x, 0.4, training=False), 0.0, training=True)
    x = torch.clamp(torch.clamp(F.relu(torch.abs(x)), min=-1.0), 0, 2).relu().clamp_max(1.5)
    x = (
        x.transpose(0, 1)
        .transpose(1, 0)
        .unsqueeze(1)
        .squeeze(1)
        .expand_as(x)
        .permute(1, 0)
        .permute(1, 0)
    )
    return x.view(x.shape).to(x.dtype).flip([0]).flip([-2])


def test_what_computes_nothing_goes_to_the_bit() -> None:
    x = torch.randn(3, 5)
    found = rewritten(nothing, ALL, x)
    for (
        node
    ) in found.module.graph.nodes:  # what export asserts of a cast stays; it holds for float32 only
        if node.target is aten._assert_tensor_metadata.default:
            found.module.graph.erase_node(node)
    found.module.recompile()
    left = targets(found.module)
    assert left == [aten.tanh.default, aten.clamp.default, aten.clone.default], found.module.graph
    agrees(nothing, found.module, x, exact=True)
    agrees(nothing, found.module, torch.randn(7, 5), exact=True)


def test_what_was_new_memory_stays_new_memory() -> None:
    def copies(x: torch.Tensor) -> Any:
        return x * 1, x / 1, x - 0, x.clone(), x + 0, x.flip([1]).flip([1])

    x = torch.randn(3, 5)
    found = rewritten(copies, ALL, x)
    for one in leaves(found.module(x)):
        one.zero_()
    assert x.abs().min() > 0
    agrees(copies, found.module, torch.tensor([[0.0, -0.0, 1.0, -1.0, 2.0]] * 3), exact=True)


KEPT: dict[str, Callable[..., Any]] = {
    "live dropout": lambda x: F.dropout(x, 0.5, training=True),
    "another shape": lambda x: x.view(-1, 5, 1).expand(-1, 5, 2),
    "another dtype": lambda x: x.double(),
    "negative": lambda x: torch.relu(torch.tanh(x)),
    "another dim": lambda x: torch.softmax(x + x.mean(0, keepdim=True), 1),
    "bounds the wrong way round": lambda x: torch.clamp(torch.clamp(x, 1.0, 0.0), -1, 1),
    "another constant": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "twice used": lambda x: ((y := torch.sigmoid(x)), x * y),
    "a sample variance": lambda x: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)
    ),
    "over another dim": lambda x: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5),
    "integers": lambda x: torch.relu((x > 0).long()) * 1.0,
    "two flips": lambda x: x.flip([0]).flip([1]),
    "a broadcast": lambda x: x.unsqueeze(1).squeeze(0),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_must_not_fire(name: str) -> None:
    found = rewritten(KEPT[name], ALL, torch.randn(3, 5))
    assert fired(found) == [], found.module.graph


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.inf, -math.inf])),
        min_size=4,
        max_size=4,
    )
)
def test_two_clamps_are_one_for_any_bounds(bounds: list[float | None]) -> None:
    a, b, c, d = bounds
    if (a is None and b is None) or (c is None and d is None):
        return
    (rule,) = [r for r in simplify.RULES if r.name == "clamp_of_clamp"]
    x = torch.cat([SPECIAL, torch.linspace(-3, 3, 61)])
    got = rule.replacement(x=x, low_in=a, high_in=b, low_out=c, high_out=d)
    if got is NotImplemented:
        return
    wanted = torch.clamp(torch.clamp(x, a, b), c, d)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
