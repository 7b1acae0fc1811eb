"""Failures seen in the wild, through the public door: the wrong candidate is never promoted.

Each test names the report that it reproduces. What is reproduced is a defect of the installed torch or
torchao: where a later version has mended it, the candidate is right, may be promoted, and the test says
so by its own assertion (``wrong`` accepts nothing else).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstone
from torchstone import Policy
from torchstone.errors import EnvelopeError
from torchstone.records import (
    Arrival,
    Build,
    Capture,
    Unverifiable,
    Verdict,
    VerdictEntry,
    Verified,
    Wrong,
)

pytestmark = pytest.mark.slow

QUICK = Policy(bench_s=3, load_s=0, rounds=5, call_s=60)


@pytest.fixture
def optimize(tmp_path: Path) -> Callable[..., torchstone.Run]:
    def call(model: nn.Module, inputs: Any, recipe: str, **options: Any) -> torchstone.Run:
        options.setdefault("policy", QUICK)
        return torchstone.optimize(
            model.eval(), inputs, recipes=[recipe], home=tmp_path / "home", **options
        )

    return call


def verdict_of(run: torchstone.Run, recipe: str) -> Verdict:
    entry = run.store.get(f"verdict/{recipe}", VerdictEntry)
    assert entry is not None
    return entry.verdict


def wrong(run: torchstone.Run, recipe: str, *reasons: str) -> Wrong:
    verdict = verdict_of(run, recipe)
    assert isinstance(verdict, Wrong), verdict
    assert verdict.reason in reasons, verdict
    assert run.decision is not None
    assert run.decision.kind == "KEEP_BASELINE"
    assert run.decision.recipe == "eager"  # the fallback was the only other, and is never promoted
    assert any(r.code == "WRONG" and r.recipe == recipe for r in run.decision.reasons)
    return verdict


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 + 0.1


def test_1_a_package_never_answers_for_a_shape_or_dtype_it_was_not_made_for(
    optimize: Callable[..., torchstone.Run], tmp_path: Path
) -> None:
    """pytorch#141115: one row came back for three, and a float64 input was read as float32."""
    run = optimize(Scale(), torch.randn(1, 2), "aotinductor")
    assert isinstance(verdict_of(run, "aotinductor"), Verified)
    bundle = torchstone.load(run.package(tmp_path / "bundle"))
    for outside in (torch.randn(3, 2), torch.randn(1, 2, dtype=torch.float64)):
        with pytest.raises(EnvelopeError):
            bundle(outside)
    x = torch.randn(1, 2)
    torch.testing.assert_close(bundle(x), Scale()(x))


class LargeProducts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        billion = torch.tensor([10**9], dtype=torch.int64)
        return torch.arange(0, 11, dtype=torch.int64) * billion + x


def test_2_integer_products_that_wrap(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#175966: an int64 product computed as int32."""
    run = optimize(LargeProducts(), torch.zeros(1, dtype=torch.int64), "inductor(module)")
    wrong(run, "inductor(module)", "INTEGER_MISMATCH")


class FiveToOne(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 5) + y.unsqueeze(1)


def test_3_a_range_that_export_narrows_silently(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#181097: inputs (5b,) and (b,) with b >= 1; the exported program rejects b = 1."""
    run = optimize(
        FiveToOne(),
        (torch.randn(15), torch.randn(3)),
        "inductor",
        dims={"b": "1..8"},
        shapes={"x": ("5*b",), "y": ("b",)},
    )
    capture = run.store.get("capture", Capture)
    assert capture is not None
    verdict = verdict_of(run, "inductor")
    if capture.mode == "export":  # b = 1 must then be among what was proven, or be told
        assert isinstance(verdict, Verified | Wrong)
        if isinstance(verdict, Wrong):
            assert verdict.reason == "RAISES"
    else:
        assert capture.refused is not None
    x, y = torch.randn(5), torch.randn(1)
    torch.testing.assert_close(run.model(x, y), FiveToOne()(x, y))


def test_5_int8_weights_that_overflow_half_precision(optimize: Callable[..., torchstone.Run]) -> None:
    """ao#1662: int8 weight-only, fp16 Linear(4096, 64), weights times 200: infinities."""
    torch.manual_seed(0)
    model = nn.Linear(4096, 64).half()
    model.weight.data.mul_(200)
    recipe = "inductor + quantize(int8_weight_only)"
    run = optimize(model, torch.randn(4, 4096, dtype=torch.float16), recipe)
    wrong(run, recipe, "NON_FINITE")


class TimesStep(nn.Module):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for _ in range(step):  # the loop is unrolled: a graph for each value
            x = torch.relu(x) + 1
        return x


def test_6_recompiles_over_the_traffic_are_counted_and_gated(
    optimize: Callable[..., torchstone.Run],
) -> None:
    """TensorRT-LLM#6142: an integer argument of ten values makes a graph each, up to the limit."""
    traffic = tuple(
        Arrival(sizes={"B": 2 + i % 3}, scalars={"step": float(1 + i % 10)}) for i in range(30)
    )
    run = optimize(
        TimesStep(),
        (torch.randn(4, 8), 3),
        "inductor",
        dims={"B": "1..16"},
        shapes={"x": ("B", 8)},
        traffic=traffic,
        policy=Policy(bench_s=3, load_s=0, rounds=5, max_recompiles=3),
    )
    capture = run.store.get("capture", Capture)
    assert capture is not None
    assert "step" in (capture.refused or "")  # export would freeze the number
    build = run.store.get("build/inductor", Build)
    assert build is not None
    assert build.recompiles is not None
    assert build.recompiles >= 8
    assert run.decision is not None
    assert run.decision.recipe == "eager"
    codes = {r.code for r in run.decision.reasons if r.recipe == "inductor"}
    assert codes & {"RECOMPILES_ABOVE", "SLOWER", "NOT_FASTER"}


class Rope(nn.Module):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def test_7_closer_to_the_truth_than_eager_is_accepted(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#159239: compiled bf16 RoPE differs from eager by 0.0156 and is the better of the two."""
    torch.manual_seed(0)
    angle = torch.randn(16, 64)
    inputs = (torch.randn(2, 16, 64).bfloat16(), angle.cos().bfloat16(), angle.sin().bfloat16())
    compiled = torch.compile(Rope())(*inputs)
    assert not torch.equal(compiled, Rope()(*inputs))  # the trap is set
    run = optimize(Rope(), inputs, "inductor")
    verdict = verdict_of(run, "inductor")
    assert isinstance(verdict, Verified)
    assert verdict.relative <= verdict.eager_relative


class Condition(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cond(torch.arctan(x))


def test_8_where_eager_is_the_outlier(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#150114: the matrix is singular; eager says 3.7e7, compiled and float64 infinity."""
    run = optimize(Condition(), torch.ones(2, 2), "inductor")
    verdict = verdict_of(run, "inductor")
    if isinstance(verdict, Verified):
        assert any("eager" in note and "outlier" in note for note in verdict.notes)
    else:
        assert isinstance(verdict, Unverifiable)
        assert run.decision is not None
        assert run.decision.recipe == "eager"


class ViewThenMutate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        x[:, 2:5] = 2
        return y.view(torch.int64)


def test_13_a_view_read_after_a_later_mutation(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#198101."""
    run = optimize(ViewThenMutate(), torch.arange(-12, 12).reshape(4, 6), "inductor(module)")
    wrong(run, "inductor(module)", "INTEGER_MISMATCH")


class AddFlipped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([x], [x.flip(0)])
        return x


def test_14_an_update_that_reads_what_it_writes(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#198033: half of the elements are wrong."""
    run = optimize(AddFlipped(), torch.randn(8, 8), "inductor(module)")
    wrong(run, "inductor(module)", "ERROR_ABOVE_BOUND", "ELEMENT_ABOVE_BOUND", "MUTATION_DIFFERS")


class PutThenAdd(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x.index_put_((index,), value)
        return x.add_(x.flip(0))


def test_15_an_update_after_index_put(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#198270."""
    inputs = (torch.randn(8, 4), torch.tensor([1, 3]), torch.randn(2, 4))
    run = optimize(PutThenAdd(), inputs, "inductor(module)")
    wrong(run, "inductor(module)", "ERROR_ABOVE_BOUND", "ELEMENT_ABOVE_BOUND", "MUTATION_DIFFERS")


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sub = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sub(x)


def shadow(model: nn.Module) -> None:
    replacement = nn.Linear(4, 4, bias=False)
    replacement.weight.data.fill_(5.0)
    object.__setattr__(model, "sub", replacement)


def test_16_module_state_that_changes_under_a_compiled_model(
    optimize: Callable[..., torchstone.Run],
) -> None:
    """pytorch#197859: ``object.__setattr__`` shadows a submodule, and the old answer comes back."""
    run = optimize(Wrapper(), torch.randn(3, 4), "inductor(module)", perturb=shadow)
    wrong(run, "inductor(module)", "STALE_STATE")


class SplitProduct(nn.Module):
    """A product in two bf16 parts, as fp32 GEMM on tensor cores is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(256, 64)
        high = weight.bfloat16()
        self.register_buffer("parts", torch.cat([high, (weight - high.float()).bfloat16(), high]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x.float().bfloat16()
        low = (x.float() - high.float()).bfloat16()
        return torch.cat([high, high, low], 1).float() @ self.parts.float()


def test_17_a_split_whose_casts_are_folded_away(optimize: Callable[..., torchstone.Run]) -> None:
    """Inductor drops the low part: the error rises from 4e-6 to 1.7e-3."""
    run = optimize(SplitProduct(), torch.randn(32, 256), "inductor")
    verdict = wrong(run, "inductor", "ERROR_ABOVE_BOUND", "ELEMENT_ABOVE_BOUND")
    assert verdict.relative is not None
    assert verdict.relative > 1e-4


class ResizeAndInvert(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = nn.functional.interpolate(x, size=(64, 64), mode="bilinear")
        return torch.linalg.inv(large)


def test_18_what_no_reference_can_tell(optimize: Callable[..., torchstone.Run]) -> None:
    """pytorch#150165: a singular matrix; eager and compiled are both far from float64."""
    torch.manual_seed(0)
    run = optimize(ResizeAndInvert(), torch.randn(1, 1, 32, 32), "inductor")
    verdict = verdict_of(run, "inductor")
    assert isinstance(verdict, Unverifiable), verdict
    assert run.decision is not None
    assert run.decision.recipe == "eager"
