"""Answers that are wrong because nothing was compiled again: found, and their cause named."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from recompile_models import Optimizer, Stepped, advance, workload
from torchstone.capture.compiled.stale import study_staleness
from torchstone.records import Arrival


@dataclass
class RegionInput:
    hidden: torch.Tensor


region_input = RegionInput(torch.tensor(0))


@torch.compiler.nested_compile_region
def region() -> torch.Tensor:
    return region_input.hidden + 1


class Regions(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        global region_input  # noqa: PLW0603  pytorch#191821
        for _ in range(2):
            region_input = RegionInput(hidden)
            hidden = region()
        return hidden


class Clamp(nn.Module):
    def forward(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        return x.clamp(min=-limit, max=limit) * limit


def hide_layer(module: nn.Module) -> None:
    object.__setattr__(module, "layer", nn.Identity())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The global that a model changes."""
    before = region_input
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        yield
    globals().update(region_input=before)


def test_a_global_assigned_between_calls_of_a_region() -> None:
    """pytorch#191821."""
    made = workload(Regions(), (torch.tensor(0),))
    found = study_staleness(made, made.module(), backend="eager")
    if found is None:
        pytest.skip("this torch reads the global again")
    assert found.cause == "REGION_GLOBAL"
    assert found.what == ("region_input",)
    assert "region(region_input)" in str(found.code)
    assert found.evidence[-1] == "without torch.compiler.nested_compile_region: right"
    assert hasattr(region, "__marked_compile_region_fn__")  # it was put back


def test_an_attribute_set_behind_the_module() -> None:
    """pytorch#197859: no guard sees it, so the module that was compiled is used again."""
    made = workload(Layer(), (torch.randn(2, 4),), perturb=hide_layer)
    found = study_staleness(made, made.module(), backend="eager")
    if found is None:
        pytest.skip("this torch guards it")
    assert found.call == 1
    assert found.cause == "MODULE_ATTRIBUTE"
    assert found.what == ("self.layer (hides what is registered under that name)",)


@pytest.mark.slow
def test_a_float_argument_baked_in() -> None:
    """pytorch#194976: once the float is symbolic, clamp keeps the value that it was compiled with."""
    traffic = tuple(Arrival(sizes={}, scalars={"limit": v}) for v in (0.25, 0.5, 1.0))
    made = workload(Clamp(), (torch.randn(8, 8), 0.25), traffic=traffic)
    found = study_staleness(made, made.module())
    if found is None:
        pytest.skip("this torch guards it")
    assert (found.call, found.cause, found.what) == (2, "FLOAT_ARGUMENT", ("limit",))
    assert found.relative is not None
    assert found.relative > 0.1
    assert "specialize_float=True: right" in found.evidence


@pytest.mark.slow
def test_a_number_out_of_a_break_baked_in() -> None:
    """pytorch#185382: wrong within one call, whose loop changes the number."""
    made = workload(Optimizer(), (torch.randn(16), torch.randn(16)))
    found = study_staleness(made, made.module())
    if found is None:
        pytest.skip("this torch guards it")
    assert found.cause == "BREAK_VALUE"
    assert "step = t.item()" in found.what[0]
    assert "recompile_models.py" in found.what[0]


def test_what_is_right_or_random_is_not_called_stale() -> None:
    for module in (nn.Linear(4, 4), nn.Dropout().train(), Stepped()):
        options = {"perturb": advance} if isinstance(module, Stepped) else {}
        made = workload(module, (torch.randn(2, 4),), **options)
        assert study_staleness(made, made.module(), backend="eager") is None
