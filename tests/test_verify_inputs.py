"""Which inputs are tried, and that they are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.records import Arrival, Case, Dim, ScalarSpec, TensorSpec, WorkloadSpec
from torchstone.verify.drive import digest
from torchstone.verify.inputs import cases, materialize
from torchstone.workload import Workload
from verify_desk import Identity, block_workload


@st.composite
def dims(draw: st.DrawFn) -> Dim:
    multiple = draw(st.sampled_from([1, 1, 2, 8, 16]))
    low = draw(st.integers(0, 4)) * multiple
    high = low + draw(st.integers(0, 300)) * multiple
    name = draw(st.sampled_from(["B", "S", "H", "W"]))
    return Dim(name=name, low=low, high=max(high, multiple), multiple=multiple)


@st.composite
def specs(draw: st.DrawFn) -> WorkloadSpec:
    chosen = tuple({d.name: d for d in draw(st.lists(dims(), max_size=3))}.values())

    def sizes() -> dict[str, int]:
        return {
            d.name: draw(st.integers(d.low // d.multiple, d.high // d.multiple)) * d.multiple
            for d in chosen
        }

    example = sizes()
    arrivals = tuple(Arrival(sizes=sizes()) for _ in range(draw(st.integers(0, 8))))
    return WorkloadSpec(
        name="w",
        inputs=(
            TensorSpec(name="x", dtype="float32", shape=(*(d.name for d in chosen), 4)),
            ScalarSpec(name="n", kind="int", low=1, high=3),
        ),
        dims=chosen,
        example_sizes=example,
        traffic=arrivals or (Arrival(sizes=example),),
        metric=None,
        perturbs=draw(st.booleans()),
        digest="",
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 1000))
def test_sizes_lie_in_range_and_names_are_unique(spec: WorkloadSpec, seed: int) -> None:
    found = cases(spec, seed)
    assert len({c.name for c in found}) == len(found)
    assert len({c.seed for c in found}) == len(found)
    for case in found:
        assert set(case.sizes) == {d.name for d in spec.dims}
        for dim in spec.dims:
            assert dim.low <= case.sizes[dim.name] <= dim.high
            assert case.sizes[dim.name] % dim.multiple == 0
    assert found == cases(spec, seed)
    assert found[0].name == "example"
    assert len(found) <= 22 + 4 * len(spec.dims)


@settings(deadline=None)
@given(specs())
def test_ends_one_zero_and_odd_are_tried(spec: WorkloadSpec) -> None:
    found = cases(spec, 0)
    for dim in spec.dims:
        tried = {c.sizes[dim.name] for c in found}
        assert {dim.low, dim.high} <= tried
        assert not dim.low <= 1 <= dim.high or dim.multiple > 1 or 1 in tried
        assert dim.low > 0 or 0 in tried
        if dim.high // dim.multiple >= max(3, dim.low // dim.multiple + 2):
            steps = {size // dim.multiple for size in tried}
            assert any(n % 2 for n in steps)
    largest = {d.name: d.high for d in spec.dims}
    if any(d.low < d.high for d in spec.dims):
        assert sum(c.sizes == largest and c.kind == "dims" for c in found) == 1
    assert {"repeat", "hold", "mutate"} <= {c.protocol for c in found}
    assert (found[-1].protocol == "perturb") == spec.perturbs
    assert {"strided", "offset"} <= {c.layout for c in found}


@settings(deadline=None)
@given(specs())
def test_traffic_is_covered_to_its_largest(spec: WorkloadSpec) -> None:
    found = [c.sizes for c in cases(spec, 0) if c.kind in ("traffic", "example")]
    size = {str(a.sizes): torch.tensor(list(a.sizes.values())).prod().item() for a in spec.traffic}
    largest = max(size.values())
    tried = max(torch.tensor(list(sizes.values())).prod().item() for sizes in found)
    assert tried >= largest
    assert len(found) <= 5


class Sum(torch.nn.Module):
    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, scale: float, weights: torch.Tensor
    ) -> torch.Tensor:
        return (ids * mask).sum(-1) * scale + weights.sum(-1)


def mixed(**more: Any) -> Workload:
    facts: dict[str, Any] = {
        "name": "mixed",
        "model": Sum,
        "inputs": lambda: (
            torch.tensor([[3, 9, 4, 5], [7, 8, 3, 3]]),
            torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
            2.0,
            torch.tensor([[0.5, 1.0, 2.0, 0.1]] * 2),
        ),
        "dims": (Dim(name="B", low=1, high=5), Dim(name="S", low=1, high=9)),
        "shapes": {"ids": ("B", "S"), "mask": ("B", "S"), "weights": ("B", "S")},
    }
    return Workload(**(facts | more))


def by_name(workload: Workload) -> dict[str, tuple[Any, ...]]:
    return {c.name: materialize(workload, c) for c in cases(workload.spec(), 3)}


def test_integers_stay_in_range_and_masks_keep_their_pattern() -> None:
    workload = mixed()
    for case in cases(workload.spec(), 3):
        ids, mask, scale, weights = materialize(workload, case)
        assert ids.shape == mask.shape == weights.shape == (case.sizes["B"], case.sizes["S"])
        assert ids.dtype == torch.int64
        assert 3 <= ids.min() <= ids.max() <= 9
        assert set(mask.unique().tolist()) <= {0, 1}
        assert scale == 2.0
        if case.kind != "values":
            assert mask[:, 0].all()
    ids = by_name(workload)
    assert ids["values-ties"][0].unique().numel() == 1
    assert ids["values-random"][0].unique().numel() > 2
    assert not torch.equal(ids["values-random"][0], ids["values-random-again"][0])


def test_floats_are_filled_as_the_case_says() -> None:
    made = {name: inputs[3] for name, inputs in by_name(mixed()).items()}
    assert (made["values-zeros"] == 0).all()
    assert made["values-ties"].unique().numel() == 1
    assert made["values-tiny"].abs().max() < 0.01
    assert made["values-large"].abs().max() > 20
    assert (made["dims-high"] >= 0).all()  # as in the example: counts and pixels stay what they are
    assert torch.equal(made["example"], mixed().example()[3])


def test_a_stated_range_holds_for_every_value() -> None:
    made = by_name(mixed(ranges={"weights": (0.0, 4.0)}))
    for name, inputs in made.items():
        assert 0 <= inputs[3].min() <= inputs[3].max() <= 4, name
    assert made["values-high"][3].min() > 3.9
    assert made["values-low"][3].max() < 0.1
    assert "values-large" not in made


def test_layouts_hold_the_same_values_elsewhere() -> None:
    workload = block_workload()
    made = by_name(workload)
    (plain,), (strided,), (offset,) = made["example"], made["layout-strided"], made["layout-offset"]
    assert torch.equal(plain, strided)
    assert torch.equal(plain, offset)
    assert not strided.is_contiguous()
    assert offset.is_contiguous()
    assert offset.storage_offset() == 1


def generate(sizes: dict[str, int], generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.rand(sizes["B"], sizes["S"], 16, generator=generator) + 5,)


def test_a_size_may_be_a_multiple_of_a_dim() -> None:
    workload = Workload(
        name="scaled",
        model=Identity,
        inputs=lambda: (torch.ones(15, 2),),
        dims=(Dim(name="B", low=1, high=7),),
        shapes={"x": ("5*B", 2)},
    )
    for case in cases(workload.spec(), 0):
        assert materialize(workload, case)[0].shape == (5 * case.sizes["B"], 2)


def test_generate_makes_the_values_and_layouts_still_apply() -> None:
    workload = block_workload(generate=generate)
    made = by_name(workload)
    assert made["dims-high"][0].shape == (6, 24, 16)
    assert all((inputs[0] >= 5).all() for name, inputs in made.items() if name.startswith("dims"))
    again = by_name(block_workload(generate=generate))
    assert digest(made["dims-odd"]) == digest(again["dims-odd"])


def test_example_is_new_storage_every_time() -> None:
    kept = torch.ones(2, 2)
    workload = Workload(name="kept", model=Identity, inputs=lambda: (kept,))
    case = Case(name="example", kind="example", sizes={}, values="example")
    materialize(workload, case)[0].zero_()
    assert (kept == 1).all()


@pytest.mark.slow
def test_inputs_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from test_verify_inputs import *; "
        "print(*[digest(i) for i in by_name(mixed()).values()])"
    )
    paths = [p for p in sys.path if p]
    ran = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ran.stdout.split() == [digest(i) for i in by_name(mixed()).values()]


def test_listing_cases_loads_no_torch() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import torchstone.verify.inputs, "
        "torchstone.verify.budget, torchstone.verify.run; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *[p for p in sys.path if p]], check=True)
