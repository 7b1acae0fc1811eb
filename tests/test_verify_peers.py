"""Cases in which comparing with eager misleads: see the issues of pytorch named with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchstone.records import Unverifiable, Verified, Wrong
from verify_desk import EXACT, REASSOCIATES, Bench, of_module


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99)).to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rope(nn.Module):
    """pytorch#159239 and pytorch#183122: rotary embedding in bfloat16."""

    def forward(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return q * cos.unsqueeze(1) + rotate_half(q) * sin.unsqueeze(1)


class Condition(nn.Module):
    """pytorch#150114: a singular matrix that float32 rounding makes regular."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cond(torch.arctan(x))


class Inverse(nn.Module):
    """pytorch#150165: the inverse of an upsampled image, whose rank is half its size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.inverse(F.interpolate(x, size=(64, 64), mode="bilinear", align_corners=True))


class SplitProduct(nn.Module):
    """A float32 product in three bfloat16 ones: the low half is what the high half lost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            high = t.bfloat16()
            return high.float(), (t - high.float()).bfloat16().float()

        (xh, xl), (wh, wl) = split(x), split(self.weight)
        return xh @ wh + (xh @ wl + xl @ wh)


def fused(module: nn.Module) -> Callable[..., torch.Tensor]:
    """What a fused kernel computes: everything in float32, rounded once."""
    return lambda *inputs: module(*(t.float() for t in inputs)).to(inputs[0].dtype)


def rope_workload() -> Any:
    return of_module(
        Rope(), *(seeded(*s, dtype=torch.bfloat16) for s in ((2, 3, 5, 8), (2, 5, 8), (2, 5, 8)))
    )


def test_closer_to_float64_than_eager_is_accepted(tmp_path: Path) -> None:
    bench = Bench(rope_workload(), tmp_path)
    entry = bench.entry(fused)
    assert isinstance(entry.verdict, Verified), entry.verdict
    assert entry.verdict.relative < entry.verdict.eager_relative
    assert "closer to float64 than eager" in entry.verdict.notes
    differing = [e.differing for c in entry.cases for e in c.errors]
    assert max(differing) > 10  # it would not be equal to eager


@pytest.mark.slow
def test_compiled_rope_is_accepted(tmp_path: Path) -> None:
    verdict = Bench(rope_workload(), tmp_path).verdict(torch.compile)
    assert isinstance(verdict, Verified), verdict


def test_rope_with_a_wrong_sign_is_not_accepted(tmp_path: Path) -> None:
    def wrong(module: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda q, cos, sin: module(q, cos, -sin)

    assert isinstance(Bench(rope_workload(), tmp_path).verdict(wrong), Wrong)


def test_singular_matrix_names_eager_as_the_outlier(tmp_path: Path) -> None:
    bench = Bench(of_module(Condition(), torch.ones(2, 2)), tmp_path)
    eager = bench.known[0].errors[0]
    if eager.non_finite == 0:
        pytest.skip("this machine's float32 sees that the matrix is singular")

    def in_float64(module: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda x: module(x.double()).float()

    verdict = bench.verdict(in_float64)
    assert isinstance(verdict, Verified), verdict
    assert any(note.startswith("eager is the outlier: case example") for note in verdict.notes)
    assert isinstance(bench.verdict(lambda module: module, EXACT), Unverifiable)


def test_singular_inverse_is_unverifiable(tmp_path: Path) -> None:
    bench = Bench(of_module(Inverse(), seeded(1, 3, 32, 32)), tmp_path)
    for recipe in (EXACT, REASSOCIATES):
        verdict = bench.verdict(lambda module: module, recipe)
        assert isinstance(verdict, Unverifiable), verdict
        assert verdict.case == "example"
        assert "eager itself is" in verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("module", [Condition, Inverse])
def test_compiled_outliers_are_never_wrong(module: Callable[[], nn.Module], tmp_path: Path) -> None:
    example = torch.ones(2, 2) if module is Condition else seeded(1, 3, 32, 32)
    verdict = Bench(of_module(module(), example), tmp_path).verdict(torch.compile)
    if isinstance(verdict, Verified):
        assert any("eager is the outlier" in note for note in verdict.notes)
    else:
        assert isinstance(verdict, Unverifiable), verdict


def test_lost_low_half_of_a_split_product_is_wrong(tmp_path: Path) -> None:
    def folded(module: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda x: x.bfloat16().float() @ module.weight.bfloat16().float()

    bench = Bench(of_module(SplitProduct(), seeded(16, 32)), tmp_path)
    assert isinstance(bench.verdict(lambda module: module), Verified)
    verdict = bench.verdict(folded)
    assert isinstance(verdict, Wrong)
    assert verdict.reason == "ERROR_ABOVE_BOUND"


@pytest.mark.parametrize("scale", [10**9, 10**12])
def test_integers_that_wrap_are_wrong(scale: int, tmp_path: Path) -> None:
    """pytorch#175966: 64-bit indices computed in 32 bits."""

    class Indices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.arange(11, dtype=torch.int64) * x

    def wraps(_: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda x: (torch.arange(11, dtype=torch.int32) * x.int()).long()

    bench = Bench(of_module(Indices(), torch.tensor([scale])), tmp_path)
    assert isinstance(bench.verdict(lambda module: module), Verified)
    verdict = bench.verdict(wraps)
    assert isinstance(verdict, Wrong)
    assert verdict.reason == "INTEGER_MISMATCH"
