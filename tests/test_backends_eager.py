"""Candidates that run the user's Python: eager, its number formats, the user's implementations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends_samples import (
    Attention,
    B,
    Branch,
    Counter,
    Dense,
    S,
    Scaled,
    Several,
    agree,
    exercise,
    sample,
)
from torchstone.records import Build, Unsupported

SIZES = ((1,), (3,), (8,))


@pytest.mark.parametrize("module", [Dense(), Several(), Branch()])
@pytest.mark.parametrize("recipe", ["eager", "eager(program)"])
def test_it_answers_as_the_module_does(tmp_path: Path, module: nn.Module, recipe: str) -> None:
    made = sample(tmp_path, module, (torch.randn(3, 8),))
    state: dict[str, Any] = {}
    built, call = made.build(recipe, **state)
    if made.program is None and recipe == "eager(program)":
        assert isinstance(built, Unsupported)
        return
    assert isinstance(built, Build)
    assert built.recipe == recipe
    assert built.artifact is None
    assert built.recompiles is None
    assert built.peak_memory_bytes > 2**26
    assert built.seconds > 0
    assert built.first_call_s > 0
    exercise(made, call, [(torch.randn(*n, 8),) for n in SIZES], 1e-6)


def test_the_job_leaves_the_users_module(tmp_path: Path) -> None:
    made = sample(tmp_path, Dense(), (torch.randn(3, 8),))
    state: dict[str, Any] = {"workload": made.workload}
    from torchstone.backends import jobs

    jobs.build(state, "eager", None, str(tmp_path))
    x = torch.randn(2, 8)
    with torch.no_grad():
        state["module"].linear.bias += 1
    (found,) = state["call"](x)
    assert not torch.equal(found, made.eager(x)[0])


def test_gradients_are_off_and_numbers_pass(tmp_path: Path) -> None:
    made = sample(tmp_path, Scaled(), (torch.randn(3, 8), 2))
    _, call = made.build("eager")
    with torch.enable_grad():
        (found,) = call(torch.randn(3, 8, requires_grad=True), 3)
    assert not found.requires_grad


def test_an_input_changed_in_place_is_changed(tmp_path: Path) -> None:
    made = sample(tmp_path, Counter(), (torch.randn(3, 8),))
    _, call = made.build("eager")
    x = torch.zeros(2, 8)
    call(x)
    assert torch.equal(x, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        ("eager + precision(bf16)", 2e-2),
        ("eager + precision(bf16_autocast)", 2e-2),
        ("eager + precision(fp16)", 5e-3),
        ("eager + quantize(int8_weight_only)", 3e-2),
        ("eager + quantize(int8_dynamic)", 5e-2),
    ],
)
def test_a_number_format_keeps_dtypes_and_is_not_exact(
    tmp_path: Path, recipe: str, bound: float
) -> None:
    made = sample(tmp_path, Attention(), (torch.randn(2, 7, 16),), (B, S), shapes={"x": ("B", "S", 16)})
    before = copy.deepcopy(made.module.state_dict())
    built, call = made.build(recipe)
    assert isinstance(built, Build)
    x = torch.randn(4, 9, 16)
    agree(call(x), made.eager(x), bound)
    assert not torch.equal(call(x)[0], made.eager(x)[0])
    assert all(torch.equal(before[n], t) for n, t in made.module.state_dict().items())


def test_a_converted_module_keeps_the_modes_of_its_parts(tmp_path: Path) -> None:
    from torchstone.quantize import precision

    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    module.eval()
    module[1].train()
    cast = precision.convert(module, "bf16", (torch.randn(2, 4),))
    assert [m.training for m in cast.modules()] == [False, False, False, True]


def test_integers_are_not_cast(tmp_path: Path) -> None:
    from backends_samples import Words

    ids, mask = torch.randint(0, 11, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    shapes = {"ids": ("B", "S"), "mask": ("B", "S")}
    made = sample(tmp_path, Words(), (ids, mask), (B, S), shapes=shapes)
    _, call = made.build("eager + precision(bf16)")
    agree(call(ids, mask), made.eager(ids, mask), 2e-2)


def test_a_users_own_implementation_is_called_with_a_module_of_its_own(tmp_path: Path) -> None:
    candidates = {"twice": lambda module: lambda x: {"out": module(x) * 2}}
    made = sample(tmp_path, Dense(), (torch.randn(3, 8),), candidates=candidates)
    built, call = made.build("custom(twice)")
    assert isinstance(built, Build)
    x = torch.randn(2, 8)
    agree(call(x), [made.eager(x)[0] * 2], 0)


def test_an_unknown_implementation_names_those_there_are(tmp_path: Path) -> None:
    made = sample(tmp_path, Dense(), (torch.randn(3, 8),), candidates={"one": lambda m: m})
    built, _ = made.build("custom(other)")
    assert isinstance(built, Unsupported)
    assert "'other'" in built.text
    assert "one" in built.text
