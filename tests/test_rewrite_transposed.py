"""Transposed convolutions as ordinary ones, layouts, and convolutions of one tap."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from rewrite_samples import WEIGHER, agrees, fired, forced, named, refuted, rewritten, targets
from torchstone.rewrite import driver, graph, proof
from torchstone.rewrite.families.transposed import RULES
from torchstone.rewrite.rule import Rule

aten = torch.ops.aten
LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_is_an_identity(rule: Rule) -> None:
    found = [proof.prove(rule, seed) for seed in range(3)]
    assert [f.counterexample for f in found] == [None] * 3
    assert sum(f.held for f in found) >= 8


def _unflipped(rule: Rule, given: dict[str, Any]) -> Any:
    weight = given["weight"]
    return rule.replacement(**{**given, "weight": weight.flip(tuple(range(2, weight.dim())))})


def _bias_once(rule: Rule, given: dict[str, Any]) -> Any:
    out = rule.replacement(**{**given, "bias": None})
    if out is NotImplemented or given["bias"] is None:
        return out
    return out + torch.nn.functional.pad(given["bias"][:1], (0, len(given["bias"]) - 1))[:, None]


def _shifted(rule: Rule, given: dict[str, Any]) -> Any:
    out = rule.replacement(**given)
    return out if out is NotImplemented else out.roll(1, -1)


def _other_groups(rule: Rule, given: dict[str, Any]) -> Any:
    out = rule.replacement(**given)
    return out if out is NotImplemented or given["groups"] == 1 else out.roll(1, 1)


@pytest.mark.parametrize("mutation", [_unflipped, _shifted, _other_groups], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", [r for r in RULES if "pointwise" not in r.name], ids=lambda r: r.name)
def test_wrong_variants_are_refuted(rule: Rule, mutation: Any) -> None:
    assert refuted(rule, lambda **given: mutation(rule, given))


def test_a_bias_that_reaches_one_channel_only_is_refuted() -> None:
    (rule,) = named(RULES, "pointwise_conv_1d")
    assert refuted(rule, lambda **given: _bias_once(rule, given))


FLIPPED = [
    (1, {"kernel_size": 3}),
    (1, {"kernel_size": 3, "dilation": 3, "padding": 2, "output_padding": 2, "groups": 2}),
    (2, {"kernel_size": (3, 5), "padding": (1, 3), "bias": False}),
    (2, {"kernel_size": 1, "groups": 4}),
    (3, {"kernel_size": (3, 1, 2), "padding": (2, 0, 1), "groups": 2}),
]
STRIDED = [
    (1, {"kernel_size": 4, "stride": 2, "padding": 1}),
    (1, {"kernel_size": 7, "stride": 3, "padding": 5, "output_padding": 1, "groups": 2}),
    (2, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}),
    (2, {"kernel_size": (3, 5), "stride": (1, 3), "padding": (0, 2), "bias": False}),
    (3, {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 4}),
    (
        3,
        {
            "kernel_size": (2, 3, 4),
            "stride": (2, 1, 3),
            "padding": (1, 0, 2),
            "output_padding": (0, 0, 1),
        },
    ),
]


def layer(dims: int, options: dict[str, Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    made = LAYERS[dims](4, 8, **options).eval()
    return made, [torch.randn(batch, 4, *(6, 7, 5)[:dims]) for batch in (3, 5)]


@pytest.mark.parametrize(("dims", "options"), FLIPPED)
def test_stride_one_is_an_ordinary_convolution(dims: int, options: dict[str, Any]) -> None:
    module, (x, other) = layer(dims, options)
    found = rewritten(module, forced(*named(RULES, "flipped")), x)
    assert fired(found) == [f"flipped_conv_{dims}d"]
    assert not any("transpose" in str(t) for t in targets(found.module))
    agrees(module, found.module, x)
    agrees(module, found.module, other)


@pytest.mark.parametrize("how", ["subpixel_conv", "phase_convs"])
@pytest.mark.parametrize(("dims", "options"), STRIDED)
def test_a_stride_is_split_into_phases(dims: int, options: dict[str, Any], how: str) -> None:
    module, (x, other) = layer(dims, options)
    found = rewritten(module, forced(*named(RULES, how)), x)
    assert fired(found) == [f"{how}_{dims}d"]
    assert not any("transpose" in str(t) for t in targets(found.module))
    agrees(module, found.module, x)
    agrees(module, found.module, other)


def test_dilated_strides_are_split_by_convolutions_of_their_own() -> None:
    module, (x, other) = layer(2, {"kernel_size": 3, "stride": 2, "dilation": 3, "padding": 2})
    assert fired(rewritten(module, forced(*named(RULES, "subpixel")), x)) == []
    found = rewritten(module, forced(*named(RULES, "phase")), x)
    assert fired(found) == ["phase_convs_2d"]
    agrees(module, found.module, other)


@pytest.mark.parametrize("options", [FLIPPED[2][1], STRIDED[2][1]])
def test_spatial_sizes_may_be_symbols(options: dict[str, Any]) -> None:
    module, (x, _) = layer(2, options)
    dims = {0: Dim("B", min=2, max=64), 2: Dim("H", min=4, max=64), 3: Dim("W", min=4, max=64)}
    for rules in (named(RULES, "flipped", "subpixel"), named(RULES, "flipped", "phase")):
        program = torch.export.export(module, (x,), dynamic_shapes=(dims,))
        found = driver.Rewriter(graph.of(program), forced(*rules), WEIGHER)
        found.run()
        assert len(found.fired) == 1, found.declined
        agrees(module, found.module, torch.randn(2, 4, 9, 4))


def test_a_stride_beyond_the_kernel_leaves_holes_that_only_padding_fills() -> None:
    module, (x, other) = layer(2, {"kernel_size": 1, "stride": 2})
    assert fired(rewritten(module, forced(*named(RULES, "phase")), x)) == []
    found = rewritten(module, forced(*named(RULES, "subpixel")), x)
    assert fired(found) == ["subpixel_conv_2d"]
    agrees(module, found.module, other)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(*[st.integers(1, 5)] * 2, st.integers(0, 3), st.integers(0, 2), st.integers(1, 3)),
    st.integers(1, 6),
)
def test_any_numbers_agree(numbers: tuple[int, ...], length: int) -> None:
    kernel, stride, padding, extra, dilation = numbers
    x, w, b = (
        torch.randn(2, 4, length).double(),
        torch.randn(4, 3, kernel).double(),
        torch.randn(6).double(),
    )
    call = {"stride": [stride], "padding": [padding], "output_padding": [extra], "dilation": [dilation]}
    try:
        wanted = torch.nn.functional.conv_transpose1d(x, w, b, groups=2, **call)
    except RuntimeError:
        return  # no such call
    for rule in named(RULES, "flipped_conv_1d", "subpixel_conv_1d", "phase_convs_1d"):
        got = rule.replacement(x=x, weight=w, bias=b, groups=2, **call)
        if got is not NotImplemented:
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(4, 8, 3, padding=1, groups=2), (3, 4, 6, 7)),
        (nn.Conv3d(4, 8, (1, 2, 3), stride=2, dilation=(1, 2, 1)), (3, 4, 5, 6, 7)),
        (nn.ConvTranspose2d(4, 8, 3, stride=2, output_padding=1), (3, 4, 6, 7)),
        (nn.ConvTranspose3d(4, 8, 2), (3, 4, 3, 6, 7)),
    ],
    ids=lambda v: v.__class__.__name__ if isinstance(v, nn.Module) else str(v),
)
def test_channels_last_is_another_layout_of_the_same(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = rewritten(module, forced(*named(RULES, "channels_last")), x)
    assert len(found.fired) == 1  # and not again on its own result
    agrees(module, found.module, x)
    agrees(module, found.module, torch.randn(5, *shape[1:]))
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    kernel = next(v for v in found.module.state_dict().values() if v.dim() == len(shape))
    assert kernel.is_contiguous(memory_format=layout)  # laid out once, ahead of time


def test_neighbours_pass_channels_last_on() -> None:
    module = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    found = rewritten(module, forced(*named(RULES, "channels_last")), torch.randn(3, 4, 8, 8))
    assert len(found.fired) == 2
    out = found.module(torch.randn(3, 4, 8, 8))
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(4, 6, 1, bias=False), (3, 4, 7)),
        (nn.Conv2d(4, 6, 1), (3, 4, 5, 7)),
        (nn.Conv2d(4, 6, 1, stride=(2, 3)), (3, 4, 5, 7)),
        (nn.Conv3d(4, 6, 1), (3, 4, 5, 2, 3)),
    ],
    ids=lambda v: v.__class__.__name__ if isinstance(v, nn.Module) else str(v),
)
def test_a_convolution_of_one_tap_is_a_product(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = rewritten(module, forced(*named(RULES, "pointwise")), x)
    assert len(found.fired) == 1
    assert aten.matmul.default in targets(found.module)
    agrees(module, found.module, x)
    agrees(module, found.module, torch.randn(5, *shape[1:]))


@pytest.mark.parametrize(
    ("module", "shape", "kind"),
    [
        (nn.Conv2d(4, 6, 1, padding=1), (3, 4, 5, 7), "pointwise"),
        (nn.Conv2d(4, 6, 1, groups=2), (3, 4, 5, 7), "pointwise"),
        (nn.Conv2d(4, 6, (1, 2)), (3, 4, 5, 7), "pointwise"),
        (nn.Conv2d(1, 6, 3), (3, 1, 5, 7), "channels_last"),
        (
            nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
            (3, 4, 5, 7),
            "channels_last",
        ),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (3, 4, 5, 7), "flipped"),
        (nn.ConvTranspose2d(4, 6, 3), (3, 4, 5, 7), "subpixel"),
    ],
)
def test_what_must_not_fire(module: nn.Module, shape: tuple[int, ...], kind: str) -> None:
    x = torch.randn(shape)
    if module.weight.is_contiguous(memory_format=torch.channels_last):
        x = x.to(memory_format=torch.channels_last)
    assert fired(rewritten(module, forced(*named(RULES, kind)), x)) == []


def test_a_call_without_a_batch_is_left() -> None:
    module = nn.ConvTranspose2d(4, 6, 3)
    graphed = graph.of(torch.export.export(module, (torch.randn(4, 5, 7),)))
    assert targets(graphed) == [aten.conv_transpose2d.input]
    (call,) = [n for n in graphed.graph.nodes if n.op == "call_function"]
    (rule,) = named(RULES, "flipped_conv_2d")
    given = dict(zip(("weight", "bias"), module.parameters(), strict=True))
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    numbers = dict(zip(names, call.args[3:], strict=True))
    assert rule.replacement(x=torch.randn(4, 5, 7), **given, **numbers) is NotImplemented


def test_what_is_measured_is_right_whichever_way_was_quicker() -> None:
    module = nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 4, stride=2))
    x = torch.randn(3, 4, 9, 9)
    found = rewritten(module, RULES, x)
    assert all(one.measured for one in found.fired)
    assert {d.why.partition(":")[0] for d in found.declined.values()} <= {"it would not pay"}
    agrees(module, found.module, torch.randn(5, 4, 9, 9))


def test_each_rule_is_measured() -> None:
    assert all(rule.measured and not rule.always for rule in RULES)
