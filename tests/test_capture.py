"""Capture: what is exported, what is refused and why, and what a refused program would have held for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import treespec_loads

from backends_samples import (
    Attention,
    B,
    Branch,
    Counter,
    Dense,
    Picture,
    S,
    Sample,
    Scaled,
    Several,
    Stateful,
    Words,
    agree,
    sample,
)
from torchstone.capture import export
from torchstone.capture import program as programs
from torchstone.records import Dim, TensorSpec, WorkloadSpec


def runs(made: Sample, *args: torch.Tensor) -> None:
    """The stored program answers as the module does; engines compile it without its guards."""
    assert made.program is not None
    found = programs.load(made.program).module(check_guards=False)(*args)
    leaves = torch.utils._pytree.tree_leaves(found)
    agree(tuple(leaves), made.eager(*args), 1e-6)


def test_attention_is_one_program_for_every_batch_and_length(tmp_path: Path) -> None:
    made = sample(tmp_path, Attention(), (torch.randn(1, 1, 16),), (B, S), shapes={"x": ("B", "S", 16)})
    assert made.capture.mode == "export"
    assert made.capture.narrowed == ()
    assert made.capture.parameters == sum(p.numel() for p in made.module.parameters())
    assert made.capture.nodes > 5
    for sizes in [(1, 1), (1, 512), (8, 1), (8, 512), (3, 77)]:
        runs(made, torch.randn(*sizes, 16))


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    import hashlib

    made = sample(tmp_path, Dense(), (torch.randn(3, 8),))
    assert made.program is not None
    assert made.capture.program == hashlib.sha256(made.program.read_bytes()).hexdigest()


def test_inputs_of_several_kinds(tmp_path: Path) -> None:
    ids, mask = torch.randint(0, 11, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    shapes = {"ids": ("B", "S"), "mask": ("B", "S")}
    made = sample(tmp_path, Words(), (ids, mask), (B, S), shapes=shapes)
    assert made.capture.mode == "export"
    runs(made, torch.randint(0, 11, (1, 1)), torch.ones(1, 1, dtype=torch.int64))


def test_a_multiple_keeps_its_lowest_size(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, 8).sum(1)

    wide = Dim(name="K", low=16, high=160, multiple=16)
    made = sample(tmp_path, Rows(), (torch.randn(16),), (wide,), shapes={"x": ("K",)})
    assert made.capture.mode == "export"
    for size in (16, 48, 160):
        runs(made, torch.randn(size))


def test_sizes_tied_by_a_factor_keep_the_lowest_one(tmp_path: Path) -> None:
    """pytorch#181097: inputs (5b,) and (b,) with b from 1; only the program's guards reject b = 1."""

    class Tied(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.view(-1, 5) + y.unsqueeze(1)

    shapes = {"x": ("5*B",), "y": ("B",)}
    made = sample(tmp_path, Tied(), (torch.randn(15), torch.randn(3)), (B,), shapes=shapes)
    assert made.capture.mode == "export"
    for size in (1, 2, 8):
        runs(made, torch.randn(5 * size), torch.randn(size))


def test_a_dict_of_outputs_comes_with_its_structure(tmp_path: Path) -> None:
    made = sample(tmp_path, Several(), (torch.randn(3, 8),))
    assert made.capture.output_spec is not None
    spec = treespec_loads(made.capture.output_spec)
    assert torch.utils._pytree.tree_unflatten(list(range(6)), spec) == {
        "z": 0,
        "none": 1,
        "same": (2, 3),
        "width": 4,
        "positive": 5,
    }


def test_a_fixed_dim_is_fixed(tmp_path: Path) -> None:
    only = Dim(name="B", low=1, high=1)
    made = sample(tmp_path, Picture(), (torch.randn(1, 2, 5, 5),), (only,))
    assert made.capture.mode == "export"
    runs(made, torch.randn(1, 2, 5, 5))


def test_keyword_inputs_and_variable_arguments(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, *xs: torch.Tensor) -> torch.Tensor:
            return xs[0] + xs[1]

    args = (torch.randn(2, 3), torch.randn(2, 3))
    shapes = {"xs_0": ("B", 3), "xs_1": ("B", 3)}
    made = sample(tmp_path, Sum(), args, (B,), shapes=shapes)
    assert made.capture.mode == "export"
    runs(made, torch.randn(7, 3), torch.randn(7, 3))


def test_state_is_stored_as_it_was_before_capture(tmp_path: Path) -> None:
    made = sample(tmp_path, Stateful(), (torch.randn(3, 8),))
    assert made.program is not None
    assert torch.equal(programs.load(made.program).state_dict["seen"], torch.zeros(8))


@pytest.mark.parametrize(
    ("module", "mutates", "state"),
    [(Dense(), (), ()), (Counter(), (0,), ()), (Stateful(), (), ("seen",))],
)
def test_what_a_call_changes_is_known(
    tmp_path: Path, module: nn.Module, mutates: tuple[int, ...], state: tuple[str, ...]
) -> None:
    made = sample(tmp_path, module, (torch.randn(3, 8),))
    assert made.program is not None
    interface = programs.interface(programs.load(made.program))
    assert interface.mutates == mutates
    assert interface.state == state


def test_an_operation_in_place_on_an_intermediate_changes_nothing_outside(tmp_path: Path) -> None:
    made = sample(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), (torch.randn(3, 8),),
                  shapes={"input": ("B", 8)})  # fmt: skip
    assert made.program is not None
    assert programs.interface(programs.load(made.program)).mutates == ()


# --- refused --------------------------------------------------------------------------------------


def test_a_branch_on_values_gives_regions_with_the_source_line(tmp_path: Path) -> None:
    made = sample(tmp_path, Branch(), (torch.randn(3, 8),))
    capture = made.capture
    assert capture.mode == "dynamo"
    assert capture.program is None
    assert capture.graphs == 2
    assert capture.nodes >= 3
    assert any("if y.sum() > 0:" in b and "backends_samples.py" in b for b in capture.breaks)
    assert capture.refused is not None
    assert "data-dependent" in capture.refused
    assert "\n" not in capture.refused
    assert "if y.sum() > 0:" in capture.refused


def test_a_python_number_is_not_frozen(tmp_path: Path) -> None:
    made = sample(tmp_path, Scaled(), (torch.randn(3, 8), 2))
    assert made.capture.refused == "argument k is a Python number: export would freeze it"


def test_a_branch_on_a_size_says_which_sizes_would_hold(tmp_path: Path) -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] > 5 else x + 1

    made = sample(tmp_path, Long(), (torch.randn(3, 8),))
    assert made.capture.mode == "dynamo"
    assert made.capture.narrowed == ("B: 1..8 -> 2..5",)


def test_a_branch_on_size_one_is_not_lost(tmp_path: Path) -> None:
    class Single(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] * 2 if x.shape[0] == 1 else x

    made = sample(tmp_path, Single(), (torch.randn(3, 8),))
    assert made.capture.mode == "dynamo"
    assert made.capture.narrowed == ("B: 1..8 -> 2..8",)


def test_dims_that_must_be_equal_are_refused(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    other = Dim(name="C", low=1, high=8)
    shapes = {"x": ("B",), "y": ("C",)}
    made = sample(tmp_path, Sum(), (torch.randn(3), torch.randn(3)), (B, other), shapes=shapes)
    assert made.capture.mode == "dynamo"
    assert made.capture.refused is not None


def test_a_fixed_width_is_not_taken_for_a_dim(tmp_path: Path) -> None:
    """A layer's width cannot vary: declared as a dim it narrows to one size."""
    wide = Dim(name="W", low=4, high=8)
    made = sample(tmp_path, Dense(), (torch.randn(3, 8),), (B, wide), shapes={"x": ("B", "W")})
    assert made.capture.mode == "dynamo"


def test_a_print_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("hello", x.shape[1])
            return x + 1

    made = sample(tmp_path, Loud(), (torch.randn(3, 8),))
    assert made.capture.mode == "export"
    assert len(made.capture.breaks) == 1
    assert "hello" in made.capture.breaks[0]
    assert "hello" in capsys.readouterr().out


def test_a_model_that_nothing_captures_is_still_a_capture(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    made = sample(tmp_path, Broken(), (torch.randn(3, 8),))
    assert made.capture.mode == "dynamo"
    assert made.capture.graphs == 0
    assert "not today" in str(made.capture.refused)
    assert "not today" in made.capture.breaks[0]


# --- sizes ----------------------------------------------------------------------------------------


def spec(dims: tuple[Dim, ...], example: dict[str, int], fixed: int) -> WorkloadSpec:
    shape: tuple[Any, ...] = (*(d.name for d in dims), fixed)
    tensor = TensorSpec(name="x", dtype="float32", shape=shape)
    return WorkloadSpec(
        name="w",
        inputs=(tensor,),
        dims=dims,
        example_sizes=example,
        traffic=(),
        metric=None,
        digest="",
    )


@given(st.data())
def test_inner_sizes_are_legal_and_distinct_where_the_ranges_allow(data: st.DataObject) -> None:
    dims, example = [], {}
    for name in "AB":
        multiple = data.draw(st.sampled_from([1, 1, 4, 16]))
        low = data.draw(st.integers(0, 4)) * multiple
        high = low + data.draw(st.integers(8, 40)) * multiple
        dims.append(Dim(name=name, low=low, high=high, multiple=multiple))
        example[name] = data.draw(st.integers(low // multiple, high // multiple)) * multiple
    sizes = export.inner_sizes(spec(tuple(dims), example, data.draw(st.integers(1, 64))))
    for dim in dims:
        assert dim.low <= sizes[dim.name] <= dim.high
        assert sizes[dim.name] % dim.multiple == 0
        assert sizes[dim.name] // dim.multiple >= 2
    assert sizes["A"] != sizes["B"]


def test_a_dim_that_can_only_be_one_keeps_its_example() -> None:
    only = Dim(name="A", low=1, high=1)
    assert export.inner_sizes(spec((only,), {"A": 1}, 3)) == {"A": 1}
