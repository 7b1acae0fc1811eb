"""Scales, shifts and norms folded into layers, and steps that merge: proofs, programs, what is left."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rewrite_proofs import MOOT, Several, With, close, held, left, proved, seen
from rewrite_samples import fired, forced, refuted, rewritten, targets
from torchstone.recipe import Numerics
from torchstone.rewrite.families.folding import RULES
from torchstone.rewrite.pattern import variables
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
NAMES = {rule.name: rule for rule in RULES}
SAME = {
    ("scale_through_unflatten", "dim"),
    ("matrix_transposed_twice", "first"),
    ("matrix_transposed_twice", "second"),
    ("reshaped_twice", "how"),
    ("reshaped_twice", "last"),
    ("reshaped_twice", "first"),
    ("squeezed_again", "dim"),
}
"""What makes no difference: two ways to say the same, and what is undone."""


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


def test_a_norm_without_its_epsilon_is_refuted() -> None:
    rule = NAMES["batch_norm_after_conv2d"]
    assert refuted(rule, lambda **given: rule.replacement(**{**given, "eps": 0.0}))


def test_a_norm_before_a_padded_convolution_is_refuted() -> None:
    def wrong(**given: Any) -> Any:  # the shift at the borders, where the input is zero after the norm
        bare = NAMES["batch_norm_before_conv1d"].replacement(**{**given, "padding": [0]})
        if bare is NotImplemented:
            return bare
        scale = torch.rsqrt(given["var"] + given["eps"])
        scale = scale if given["scale"] is None else scale * given["scale"]
        shift = -given["mean"] * scale
        shift = shift if given["shift"] is None else shift + given["shift"]
        groups, rows = given["groups"], given["weight"].shape[0]
        spread = [t.reshape(groups, 1, -1).expand(-1, rows // groups, -1) for t in (scale, shift)]
        scale, shift = (t.reshape(rows, -1, 1) for t in spread)
        taps = (given["weight"] * shift).sum((1, 2))
        bias = taps if given["bias"] is None else given["bias"] + taps
        settings = (given["stride"], given["padding"], given["dilation"], groups)
        return F.conv1d(given["x"], given["weight"] * scale, bias, *settings)

    assert refuted(NAMES["batch_norm_before_conv1d"], wrong)


def test_division_by_what_is_no_power_of_two_is_refuted() -> None:
    rule = NAMES["division_by_power_of_two"]
    assert rule.numerics is Numerics.EXACT
    assert refuted(rule, lambda x, c: torch.mul(x, 1 / c))


@settings(deadline=None)
@given(
    st.integers(-13, 12), st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64))
)
def test_division_by_powers_of_two_is_exact_in_every_format(exponent: int, dtype: torch.dtype) -> None:
    x = torch.cat(
        [torch.randn(64), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 6e-8])]
    ).to(dtype)
    got = NAMES["division_by_power_of_two"].replacement(x=x, c=2.0**exponent)
    assert got is not NotImplemented
    torch.testing.assert_close(got, x / 2.0**exponent, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True, allow_infinity=True))
def test_merged_scales_are_finite_or_not_merged(a: float, b: float) -> None:
    x = torch.ones(2)
    for first in (aten.mul.Tensor, aten.div.Tensor):
        for second in (aten.mul.Tensor, aten.div.Tensor):
            got = NAMES["scaled_twice"].replacement(x=x, a=a, b=b, first=first, second=second)
            if got is not NotImplemented:
                assert got.isfinite().all()
                assert got.all()


# ---- programs


def normed(norm: nn.Module) -> nn.Module:
    """In evaluation, with statistics that are not those of a new one."""
    assert isinstance(norm.running_mean, torch.Tensor)
    assert isinstance(norm.running_var, torch.Tensor)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm.eval()


def rows() -> nn.Module:
    return nn.Linear(40, 50)


def image(groups: int = 1) -> nn.Module:
    return nn.Conv2d(8, 12, 3, 2, 1, groups=groups)


def grown(groups: int = 1) -> nn.Module:
    return nn.ConvTranspose2d(8, 12, 3, 2, 1, 1, groups=groups)


PROGRAMS: dict[str, Any] = {
    "rows": (
        (30, 40),
        (With(rows(), lambda f, x, s: f(x) * s, (50,)), ["scale_after_linear"]),
        (With(rows(), lambda f, x, s: f(x) / s, ()), ["scale_after_linear"]),
        (With(rows(), lambda f, x, t: f(x) - t, (1, 50)), ["shift_after_linear"]),
        (With(rows(), lambda f, x, t: t - f(x), (50,)), ["linear_subtracted_from"]),
        (With(rows(), lambda f, x: 1 - f(x)), ["linear_subtracted_from_number"]),
        (With(rows(), lambda f, x, s: f(x * s), (40,)), ["scale_before_linear"]),
        (nn.Sequential(rows(), normed(nn.BatchNorm1d(50))), ["batch_norm_after_linear"]),
        (nn.Sequential(normed(nn.BatchNorm1d(40)), rows()), ["batch_norm_before_linear"]),
        (nn.Sequential(nn.Linear(40, 200), nn.Linear(200, 10)), ["linear_of_linear"]),
        (With(rows(), lambda f, x, w, b: torch.matmul(x, w) * 0.3 + b, (40, 50), (50,)), None),
    ),
    "images": (
        (5, 8, 15, 14),
        (With(image(), lambda f, x, s: f(x) * s, (12, 1, 1)), ["scale_after_conv2d"]),
        (With(image(), lambda f, x, s: f(x / s), (8, 1, 1)), ["scale_before_conv2d"]),
        (With(image(2), lambda f, x, t: f(x) + t, (1, 12, 1, 1)), ["shift_after_conv2d"]),
        (nn.Sequential(image(4), normed(nn.BatchNorm2d(12))), ["batch_norm_after_conv2d"]),
        (nn.Sequential(normed(nn.BatchNorm2d(8)), nn.Conv2d(8, 4, 3)), ["batch_norm_before_conv2d"]),
        (With(grown(), lambda f, x, s: f(x) * s, ()), ["scale_after_conv_transpose2d"]),
        (With(grown(4), lambda f, x, s: f(x) * s, (12, 1, 1)), ["scale_after_conv_transpose2d"]),
        (With(grown(2), lambda f, x, s: f(x * s), (8, 1, 1)), ["scale_before_conv_transpose2d"]),
        (With(grown(2), lambda f, x, t: t - f(x), (12, 1, 1)), ["conv_transpose2d_subtracted_from"]),
        (nn.Sequential(grown(2), normed(nn.BatchNorm2d(12))), ["batch_norm_after_conv_transpose2d"]),
    ),
}
LAYERS = {aten.linear.default, aten.matmul.default, aten.conv2d.default, aten.conv_transpose2d.input}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_but_the_layer_is_left(name: str) -> None:
    torch.manual_seed(0)
    shape, *cases = PROGRAMS[name]
    found = held(Several(*((layer, lambda h: h) for layer, _ in cases)), RULES, torch.randn(shape))
    assert set(targets(found.module)) <= LAYERS
    assert len(targets(found.module)) == len(cases)
    assert {n for _, names in cases for n in names or ()} <= set(fired(found))


STEPS = (
    (lambda h: h * 3 / 7 * 0.5, ["scaled_twice", "scaled_twice"], [aten.mul.Tensor]),
    (lambda h: (h + 2) - (-3.5), ["shifted_twice"], [aten.add.Tensor]),
    (lambda h: (h + h) * 3, ["doubled", "scaled_twice"], [aten.mul.Tensor]),
    (lambda h: h * 0.5 + h.clone().detach(), ["scaled_residual_of_copy_2"], [aten.mul.Tensor]),
    (lambda h: h + 0.5 * h, ["scaled_residual"], [aten.mul.Tensor]),
    (lambda h: h.permute(1, 2, 0).permute(2, 0, 1), ["permuted_twice"], []),
    (lambda h: h.transpose(1, 2).transpose(-1, -2), ["transposed_twice"], []),
    (lambda h: h.unsqueeze(1).squeeze(1), ["squeezed_again"], []),
    (lambda h: (h.transpose(1, 2) * 4).relu(), ["scale_through_transpose"], None),
    (lambda h: h / 8, ["division_by_power_of_two"], [aten.mul.Tensor]),
)


def test_steps_merge_and_cancel() -> None:
    torch.manual_seed(0)
    found = held(Several(*((nn.Tanh(), then) for then, *_ in STEPS)), RULES, torch.randn(5, 4, 6))
    assert set(fired(found)) >= {n for _, names, _ in STEPS for n in names}
    for then, names, calls in STEPS:
        alone = rewritten(Several((nn.Tanh(), then)), RULES, torch.randn(5, 4, 6))
        assert fired(alone) == names
        if calls is not None:
            assert targets(alone.module) == [aten.tanh.default, *calls]


def test_a_chain_of_scales_and_norms_is_one_convolution() -> None:
    torch.manual_seed(0)
    module = Several(
        (
            With(image(), lambda f, x, s, t: (f(x * 3) * s - t) / 5 + 0.5, (12, 1, 1), ()),
            lambda h: h,
        ),
    )
    found = held(module, RULES, torch.randn(5, 8, 15, 14))
    assert targets(found.module) == [aten.conv2d.default]


def test_half_precision_stays_half() -> None:
    module = Several((With(rows(), lambda f, x, s: f(x) * s, ()), lambda h: h * 3)).half()
    x = torch.randn(30, 40).half()
    found = rewritten(copy.deepcopy(module), RULES, x)
    assert targets(found.module) == [aten.linear.default]
    with torch.no_grad():
        close(found.module(x), module.double()(x.double()), 8 * torch.finfo(torch.half).eps)


# ---- what is left alone


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)
        self.norm = normed(nn.BatchNorm1d(20))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layer(x)
        n = self.norm(y)
        return h * 3, h, self.layer(n), n


def test_a_result_that_others_use_is_computed_anyway() -> None:
    left(Shared(), forced(*RULES), torch.randn(5, 20), torch.randn(5, 20))


class Given(nn.Module):
    """A layer beside a tensor of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 30)

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * s


def test_what_differs_from_row_to_row_is_no_constant() -> None:
    left(Given(), forced(*RULES), torch.randn(5, 20), torch.randn(5, 30))
    left(Given(), forced(*RULES), torch.randn(5, 20), torch.randn(5, 1))


def test_operands_and_layers_that_are_not_meant() -> None:
    module = Several(
        (With(image(), lambda f, x, s: f(x) * s, (8, 7)), lambda h: h),
        (With(image(), lambda f, x, s: f(x) * s, (12, 8, 1)), lambda h: h),
        (With(image(), lambda f, x, s: f(x) * s.double(), (12, 1, 1)), lambda h: h),
        (With(image(), lambda f, x, s: f(x) * s, (2, 1, 12, 1, 1)), lambda h: h),
        (With(image(), lambda f, x, s: s / f(x), (12, 1, 1)), lambda h: h),
        (With(image(), lambda f, x: torch.add(f(x), 2, alpha=3)), lambda h: h),
        (With(image(), lambda f, x: torch.div(f(x), 3, rounding_mode="floor")), lambda h: h),
        (With(image(), lambda f, x: f(x) * 0), lambda h: h),
        (With(image(), lambda f, x: f(x) * 1e30), lambda h: h),
        (With(image(), lambda f, x, t: f(x + t), (8, 1, 1)), lambda h: h),
        (nn.Sequential(normed(nn.BatchNorm2d(8)), image()), lambda h: h),
        (nn.Identity(), lambda h: (h + 1e9) - 1e9),
        (nn.Identity(), lambda h: h * -0.9 + h),
        (nn.Identity(), lambda h: h / 3),
        (nn.Identity(), lambda h: h.permute(1, 0, 2, 3).transpose(2, 3)),
        (nn.Identity(), lambda h: h.unsqueeze(1).squeeze(2)),
    )
    left(module, forced(*RULES), torch.randn(5, 8, 15, 14))


class Integers(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + x, x * 3 * 2, x / 4, x + 1 + 2, x * 3 + x


def test_integers_are_left_alone() -> None:
    left(Integers(), forced(*RULES), torch.ones(5, 4, dtype=torch.int32))


def test_a_norm_in_training_keeps_its_statistics() -> None:
    torch.manual_seed(0)
    module = Several((nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), lambda h: h * 3))
    x = torch.randn(5, 3, 9, 9)
    found = rewritten(copy.deepcopy(module), forced(*RULES), x)
    assert fired(found) == []
    with torch.no_grad():
        close(found.module(x), module(x), 1e-6)
    state, after = dict(module.named_buffers()), dict(found.module.named_buffers())
    assert state.keys() == after.keys()
    assert all(torch.equal(state[n], after[n]) for n in state)


def test_layers_that_are_cheaper_apart_stay_apart() -> None:
    module = Several((nn.Sequential(nn.Linear(400, 8), nn.Linear(8, 400)), lambda h: h))
    found = rewritten(module, RULES, torch.randn(60, 400))
    assert fired(found) == []
    assert [d.rule for d in found.declined.values()] == ["linear_of_linear"]
    assert "would not pay" in next(iter(found.declined.values())).why
