"""Algebra of norms: proofs, programs, state that must change once, and what is left alone."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rewrite_proofs import MOOT, Several, With, close, held, left, proved, seen
from rewrite_samples import fired, forced, named, refuted, rewritten, targets
from torchstone.rewrite.families.norms import RULES
from torchstone.rewrite.pattern import variables
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
NAMES = {rule.name: rule for rule in RULES}
SAME = {("batch_norm_less_its_mean", "bias"), ("instance_norm_less_its_mean", "bias")}
"""What makes no difference: a shift of a channel is in its mean."""


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_rule_is_an_identity(rule: Rule) -> None:
    proved(rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_proof_sees_every_variable(rule: Rule) -> None:
    for name in variables(rule.pattern):
        if name not in MOOT and (rule.name, name) not in SAME:
            assert seen(rule, name) is not False, name


def test_a_variance_that_forgets_the_means_is_refuted() -> None:
    def wrong(**given: Any) -> Any:  # the mean of the channels' variances alone
        x, groups = given["x"], given["groups"]
        variance, mean = torch.var_mean(x.flatten(2), 2, correction=0)
        variance, mean = (t.unflatten(1, (groups, -1)) for t in (variance, mean))
        out = (mean - mean.mean(2, keepdim=True)) * torch.rsqrt(
            variance.mean(2, keepdim=True) + given["eps"]
        )
        out = out.flatten(1) * (1 if given["weight"] is None else given["weight"])
        out = out if given["bias"] is None else out + given["bias"]
        return out[:, :, None] if x.dim() == 3 and x.shape[1] >= 2 * groups else NotImplemented

    assert refuted(NAMES["global_pool_of_group_norm1d"], wrong)


def test_a_scale_that_misses_the_bias_is_refuted() -> None:
    def wrong(**given: Any) -> Any:
        out = NAMES["scale_after_group_norm"].replacement(**{**given, "bias": None})
        return out if given["bias"] is None else out + given["bias"].reshape(1, -1, 1)

    assert refuted(NAMES["scale_after_group_norm"], wrong)


# ---- programs


def group_norm() -> nn.Module:
    """With weights that are not those of a new one."""
    norm = nn.GroupNorm(2, 8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


IMAGES = (
    (group_norm(), lambda h: h.mean((2, 3)), "mean_of_group_norm"),
    (group_norm(), lambda h: h.mean((1, 2, 3), keepdim=True), "mean_of_group_norm"),
    (nn.GroupNorm(2, 8, affine=False), lambda h: h.mean((-1, -2)), "mean_of_group_norm"),
    (group_norm(), lambda h: F.adaptive_avg_pool2d(h, 1), "global_pool_of_group_norm2d"),
    (
        nn.InstanceNorm2d(8, affine=True),
        lambda h: h - h.mean((2, 3), keepdim=True),
        "instance_norm_less_its_mean",
    ),
    (
        nn.BatchNorm2d(8, track_running_stats=False),
        lambda h: h - h.mean((2, 3), keepdim=True),
        "batch_norm_less_its_mean",
    ),
    (
        With(group_norm(), lambda norm, x, s: norm(x) * s, (8, 1, 1)),
        lambda h: h,
        "scale_after_group_norm",
    ),
    (
        With(group_norm(), lambda norm, x, t: t + norm(x), (1, 8, 1, 1)),
        lambda h: h,
        "shift_after_group_norm",
    ),
    (nn.GroupNorm(2, 8, affine=False), lambda h: h / 3, "scale_after_group_norm"),
)
ROWS = (
    (
        With(nn.LayerNorm(12), lambda norm, x, s: norm(x) * s, (12,)),
        lambda h: h,
        "scale_after_layer_norm",
    ),
    (With(nn.LayerNorm(12), lambda norm, x, t: norm(x) - t, ()), lambda h: h, "shift_after_layer_norm"),
    (
        With(nn.LayerNorm((6, 12), elementwise_affine=False), lambda norm, x, s: norm(x) / s, (6, 1)),
        lambda h: h,
        "scale_after_layer_norm",
    ),
    (With(nn.RMSNorm(12), lambda norm, x, s: norm(x) * s, (12,)), lambda h: h, "scale_after_rms_norm"),
)


@pytest.mark.parametrize(
    ("cases", "shape"), [(IMAGES, (5, 8, 12, 11)), (ROWS, (5, 6, 12))], ids=["images", "rows"]
)
def test_rules_fire_and_the_program_computes_the_same(cases: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found = held(Several(*(case[:2] for case in cases)), RULES, torch.randn(shape))
    assert sorted(fired(found)) == sorted(case[2] for case in cases)


def test_large_means_do_not_cancel_small_variances() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 12, 11) + 1000
    module = Several((group_norm(), lambda h: h.mean((2, 3))))
    found = rewritten(copy.deepcopy(module), forced(*RULES), x)
    with torch.no_grad():
        wanted, plain = module.double()(x.double())[0], copy.deepcopy(module).float()(x)[0]
        own = float((plain.double() - wanted).norm() / wanted.norm())
        close(found.module(x)[0], wanted, 4 * own + 64 * torch.finfo(torch.float32).eps)


# ---- state, and what is left alone


def test_a_batch_norm_updates_its_statistics_once() -> None:
    torch.manual_seed(0)
    module = Several((nn.BatchNorm2d(8), lambda h: h - h.mean((2, 3), keepdim=True)))
    x = torch.randn(5, 8, 6, 7)
    found = rewritten(copy.deepcopy(module), forced(*RULES), x)
    assert fired(found) == []
    with torch.no_grad():
        got, wanted = found.module(x), module(x)
    close(got, wanted, 1e-6)
    assert targets(found.module).count(aten.batch_norm.default) == 1
    state, after = dict(module.named_buffers()), dict(found.module.named_buffers())
    assert state.keys() == after.keys()
    assert all(torch.equal(state[n], after[n]) for n in state)
    assert int(state["layers.0.num_batches_tracked"]) == 1


def test_means_and_scales_that_are_not_meant() -> None:
    module = Several(
        (group_norm(), lambda h: h.mean((1, 2))),
        (group_norm(), lambda h: h.mean((0, 2, 3))),
        (group_norm(), lambda h: h.mean((2, 3), dtype=torch.float64)),
        (group_norm(), lambda h: (h.mean((2, 3)), h)),
        (nn.GroupNorm(8, 8), lambda h: h.mean((2, 3))),
        (nn.GroupNorm(2, 8, affine=False), lambda h: h.mean((1, 2, 3))),
        (group_norm(), lambda h: F.adaptive_avg_pool2d(h, 2)),
        (With(group_norm(), lambda norm, x, s: norm(x) * s, (6, 7)), lambda h: h),
        (With(group_norm(), lambda norm, x, s: norm(x) * s, (8, 6, 1)), lambda h: h),
        (With(group_norm(), lambda norm, x, s: norm(x) * s.double(), (8, 1, 1)), lambda h: h),
        (nn.InstanceNorm2d(8), lambda h: h - h.mean((2, 3), keepdim=True) * 2),
        (nn.InstanceNorm2d(8), lambda h: h - h.mean(2, keepdim=True)),
        (With(nn.LayerNorm(7), lambda norm, x, s: norm(x) * s, (6, 1)), lambda h: h),
        (group_norm(), lambda h: h * h.mean()),
    )
    left(module, forced(*RULES), torch.randn(5, 8, 6, 7))


def test_running_statistics_are_not_the_inputs() -> None:
    """In evaluation a batch norm's output has not the mean that a norm's own statistics would give."""
    module = Several((nn.BatchNorm2d(8).eval(), lambda h: h - h.mean((2, 3), keepdim=True)))
    left(module, forced(*named(RULES, "batch_norm")), torch.randn(5, 8, 6, 7))
