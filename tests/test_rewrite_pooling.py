"""Sums, means and pools pushed through products and convolutions: proofs, programs, what is left."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rewrite_proofs import MOOT, Several, close, held, left, proved, seen
from rewrite_samples import fired, forced, named, refuted, rewritten, targets
from torchstone.rewrite import proof
from torchstone.rewrite.families.pooling import RULES
from torchstone.rewrite.pattern import variables
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
NAMES = {rule.name: rule for rule in RULES}
SAME = {("reduction_over_one", "reduce"), ("extreme_of_one", "reduce")}
"""What makes no difference: all reductions of one number are that number."""


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_rule_is_an_identity(rule: Rule) -> None:
    proved(rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_proof_sees_every_variable(rule: Rule) -> None:
    for name in variables(rule.pattern):
        if name not in MOOT and (rule.name, name) not in SAME:
            assert seen(rule, name) is not False, name


def test_names_are_unique() -> None:
    assert len(NAMES) == len(RULES)


def without_bias(**given: Any) -> Any:
    return NAMES["mean_of_conv2d"].replacement(**{**given, "bias": None})


def test_a_bias_that_is_lost_is_refuted() -> None:
    assert refuted(NAMES["mean_of_conv2d"], without_bias)


def test_a_sum_without_borders_is_refuted() -> None:
    def whole(**given: Any) -> Any:  # as if every tap met every input
        out = given["x"].sum(2, keepdim=True)
        weight = given["weight"].sum(2, keepdim=True)
        groups = given["groups"]
        return F.conv1d(out, weight, None, groups=groups).squeeze(2)

    rule = replace(
        NAMES["sum_of_conv1d"], constants={**NAMES["sum_of_conv1d"].constants, "dims": ([2],)}
    )
    rule = replace(rule, constants={**rule.constants, "keepdim": (False,)})
    rule = replace(rule, shapes={"x": "b g<4*i<4 h", "weight": "g*o<4 i k<5", "bias": "1?"})
    assert refuted(rule, whole)


# ---- programs


def linear(bias: bool = True) -> nn.Module:
    return nn.Linear(200, 300, bias=bias)


class Product(nn.Module):
    """A matrix product with a weight that is stored as a linear layer's, or the other way round."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 200) if transposed else torch.randn(200, 300))
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight.T if self.transposed else self.weight)


PROGRAMS = {
    "rows": (
        (5, 200),
        (linear(), lambda h: h.sum(-1), "sum_of_linear"),
        (linear(bias=False), lambda h: h.mean(-1, keepdim=True), "mean_of_linear"),
        (linear(), lambda h: h.mean(0), "mean_of_linear"),
        (Product(transposed=True), lambda h: h.sum(1, keepdim=True), "sum_of_matmul"),
        (Product(transposed=False), lambda h: h.mean(1), "mean_of_matmul"),
        (
            linear(),
            lambda h: F.avg_pool1d(h.unsqueeze(1), 4, 3, padding=1).squeeze(1),
            "avg_pool_of_lifted_linear",
        ),
        (Product(transposed=True), lambda h: F.avg_pool1d(h[:, None], 4), "avg_pool_of_lifted_product"),
        (nn.Sigmoid(), lambda h: (h / 3).mean(1), "reduction_of_scaled"),
    ),
    "sequences": (
        (5, 7, 200),
        (linear(), lambda h: h.sum((1, 2), keepdim=True), "sum_of_linear"),
        (linear(), lambda h: h.mean(1), "mean_of_linear"),
        (linear(), lambda h: F.avg_pool1d(h, 4), "avg_pool_of_linear"),
        (nn.Conv1d(7, 16, 5, 2, 2), lambda h: h.mean(2), "mean_of_conv1d"),
        (nn.Conv1d(7, 16, 5, 2, 2), lambda h: F.avg_pool1d(h, 3, 2), "avg_pool_of_conv1d"),
        (nn.ConvTranspose1d(7, 16, 5, 3, 1), lambda h: h.sum(2), "sum_of_conv_transpose1d"),
    ),
    "images": (
        (5, 8, 33, 30),
        (nn.Conv2d(8, 16, 3, 2, 1, 2, 4), lambda h: h.sum((2, 3)), "sum_of_conv2d"),
        (nn.Conv2d(8, 16, 3, 1, 1), lambda h: h.mean((-1, -2), keepdim=True), "mean_of_conv2d"),
        (nn.Conv2d(8, 32, 3), lambda h: h.mean(1, keepdim=True), "mean_of_conv2d"),
        (nn.Conv2d(8, 32, 3), lambda h: h.mean(3), "mean_of_conv2d"),
        (nn.Conv2d(8, 16, 3), lambda h: F.adaptive_avg_pool2d(h, 1), "global_pool_of_conv2d"),
        (nn.Conv2d(8, 16, 3), lambda h: F.avg_pool2d(h, 2), "avg_pool_of_conv2d"),
        (
            nn.ConvTranspose2d(8, 16, 3, 2, 1, 1),
            lambda h: h.mean((2, 3), keepdim=True),
            "mean_of_conv_transpose2d",
        ),
        (
            nn.ConvTranspose2d(8, 16, 4, stride=2, groups=2),
            lambda h: F.avg_pool2d(h, 4),
            "avg_pool_of_conv_transpose2d",
        ),
        (nn.AvgPool2d(2), lambda h: F.avg_pool2d(h, 3, 2), "avg_pool_of_avg_pool2d"),
    ),
    "volumes": (
        (5, 4, 8, 9, 10),
        (nn.Conv3d(4, 8, 3), lambda h: F.adaptive_avg_pool3d(h, (1, 1, 1)), "global_pool_of_conv3d"),
        (nn.ConvTranspose3d(4, 8, 3, groups=2), lambda h: h.sum((2, 3, 4)), "sum_of_conv_transpose3d"),
        (
            nn.ConvTranspose3d(4, 16, 3, stride=2, padding=1),
            lambda h: F.avg_pool3d(h, 2),
            "avg_pool_of_conv_transpose3d",
        ),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rules_fire_and_the_program_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    shape, *cases = PROGRAMS[name]
    module = Several(*((layer, then) for layer, then, _ in cases))
    names = fired(held(module, RULES, torch.randn(shape)))
    small = ("reduction_over_one", "reduction_of_scaled")  # also met in what others leave
    assert sorted(n for n in names if n not in small) == sorted(n for *_, n in cases if n not in small)
    assert set(names) >= {n for *_, n in cases}


def test_reductions_over_what_another_left_vanish() -> None:
    def then(h: torch.Tensor) -> torch.Tensor:
        h = torch.max(h.sum(1, keepdim=True), dim=1, keepdim=True)[0].mean(1, keepdim=True)
        return torch.logsumexp(h, 1, keepdim=True).amin(1)

    module = Several((linear(), then))
    found = held(module, RULES, torch.randn(5, 200))
    assert fired(found).count("sum_of_linear") == 1
    assert [t for t in targets(found.module) if t is not aten.squeeze.dims] == [aten.linear.default]


def test_means_of_half_precision_stay_in_range() -> None:
    """A sum over the input's positions would be infinite: its mean is taken instead."""
    module = Several((nn.ConvTranspose2d(2, 3, 3, padding=1), lambda h: h.mean((2, 3)))).half()
    x = torch.rand(2, 2, 200, 200).half() + 4
    found = rewritten(module, named(RULES, "mean_of"), x)
    assert fired(found) == ["mean_of_conv_transpose2d"]
    with torch.no_grad():
        close(found.module(x), module.double()(x.double()), 8 * torch.finfo(torch.half).eps)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(
        st.integers(1, 40), st.integers(1, 7), st.integers(1, 4), st.integers(0, 6), st.integers(1, 3)
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_box_sums_at_any_size(sizes: tuple[int, ...], more: int, transposed: bool) -> None:
    size, kernel, stride, padding, dilation = sizes
    x, weight = torch.randn(2, 4, size).double(), torch.randn(4, 2, kernel).double()
    settings_ = {"stride": [stride], "padding": [padding], "dilation": [dilation], "groups": 2}
    try:
        if transposed:
            settings_["output_padding"] = [more]
            out = F.conv_transpose1d(x, weight, **settings_)  # type: ignore[arg-type]
        else:
            out = F.conv1d(x, weight, **settings_)  # type: ignore[arg-type]
    except RuntimeError:  # no such convolution
        return
    rule = NAMES["sum_of_conv_transpose1d" if transposed else "sum_of_conv1d"]
    got = rule.replacement(x=x, weight=weight, bias=None, **settings_, dims=[2], keepdim=False)
    if got is NotImplemented:  # no tap meets an input
        assert not out.any()
        return
    torch.testing.assert_close(got, out.sum(2), rtol=1e-11, atol=1e-11)


# ---- what is left alone


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(200, 300)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, c = self.layer(x), self.conv(image)
        return h.sum(-1), h, F.avg_pool2d(c, 2), c


def test_a_result_that_others_use_is_computed_anyway() -> None:
    left(Twice(), forced(*RULES), torch.randn(5, 200), torch.randn(5, 3, 20, 20))


def test_reductions_that_are_not_meant() -> None:
    module = Several(
        (nn.Linear(20, 30), lambda h: h.sum((0, 2))),  # the bias as often as the batch is large
        (nn.Linear(20, 30), lambda h: h.sum(-1, dtype=torch.float64)),
        (nn.Linear(20, 30), lambda h: h.mean(-1, dtype=torch.float64)),
        (nn.Linear(20, 30), lambda h: h.sum()),
        (nn.Linear(20, 30), lambda h: h.amax(-1)),
        (nn.Linear(20, 30), lambda h: h.cumsum(-1)),
    )
    left(module, forced(*RULES), torch.randn(5, 4, 20))


def test_pools_that_are_not_meant() -> None:
    module = Several(
        (nn.Conv2d(3, 4, 3), lambda h: F.avg_pool2d(h, 2, padding=1)),
        (nn.Conv2d(3, 4, 3), lambda h: F.avg_pool2d(h, 2, ceil_mode=True)),
        (nn.Conv2d(3, 4, 3), lambda h: F.avg_pool2d(h, 2, divisor_override=3)),
        (nn.Conv2d(3, 4, 3, dilation=2), lambda h: F.avg_pool2d(h, 2)),
        (nn.Conv2d(3, 4, 3, padding="same"), lambda h: F.avg_pool2d(h, 2)),
        (nn.ConvTranspose2d(3, 4, 3, stride=3), lambda h: F.avg_pool2d(h, 2)),
        (nn.Conv2d(3, 4, 3), lambda h: F.adaptive_avg_pool2d(h, 2)),
        (nn.Conv2d(3, 4, 3), lambda h: h.mean((0, 2, 3))),
        (nn.AvgPool2d(3, 2), lambda h: F.avg_pool2d(h, 2)),
    )
    left(module, forced(*RULES), torch.randn(5, 3, 20, 21))


class Integers(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(1), torch.amax(x + 2, 1), (x * 2).sum(1, keepdim=True)


def test_integers_are_left_alone() -> None:
    left(Integers(), forced(*RULES), torch.ones(5, 1, dtype=torch.int32))


class Changed(nn.Module):
    """What is summed is the input itself, and what was summed is changed through a view."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.sum(1, keepdim=True)
        seen = h.view(-1)
        h.add_(1)
        return seen, x * 2


class Overtaken(nn.Module):
    """The weight changes between the product and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.weight)
        self.weight.add_(1)
        return h.sum(1)


def test_what_is_changed_in_place_is_left_alone() -> None:
    left(Changed(), forced(*RULES), torch.randn(5, 1))
    left(Overtaken(), forced(*RULES), torch.randn(5, 4))


def test_a_dim_that_may_be_one_is_not_one() -> None:
    left(Several((nn.Tanh(), lambda h: h.sum(0))), forced(*RULES), torch.randn(5, 4))


def test_the_proof_counts_what_it_could_not_draw() -> None:
    found = proof.prove(NAMES["avg_pool_of_conv2d"], 0, draws=100)
    assert found.held + found.refused == 100
    assert found.worst < 1e-12
