"""Inductor, just in time and ahead of it: one graph for the whole range, and files that suffice."""

from __future__ import annotations

import subprocess
import sys
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
    Sample,
    Several,
    agree,
    exercise,
    sample,
    strided,
)
from torchstone.records import Arrival, Build, Unsupported

FRESH = """
import sys, torch
from pathlib import Path
from typing import Any
from torchstone import backends, recipe
directory, program, data = map(Path, sys.argv[2:])
call = backends.load_artifact(recipe.parse(sys.argv[1]), directory, program)
pairs = torch.load(data)
for x, expected in pairs:
    (found,) = call(x)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert (found - expected).norm() <= 1e-5 * expected.norm(), x.shape
print("answered", len(pairs))
"""
"""Loads from files alone, without the workload."""


def attention(directory: Path) -> Sample:
    return sample(directory, Attention(), (torch.randn(1, 1, 16),), (B, S), shapes={"x": ("B", "S", 16)})


def every_kind_of_size() -> list[tuple[torch.Tensor]]:
    batches, lengths = (1, 2, 3, 7, 8), (1, 2, 3, 16, 255, 512)
    return [(torch.randn(b, s, 16),) for b in batches for s in lengths]


def answers_in_a_fresh_process(made: Sample, recipe: str, call: Any) -> None:
    """Files alone give another process what ``call`` gives here."""
    inputs = [x for (x,) in every_kind_of_size()[::4]]
    data = made.directory / "pairs.pt"
    torch.save([(x, call(x)[0]) for x in inputs], data)
    folder = made.directory / recipe.replace(" ", "")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, recipe, str(folder), str(made.program), str(data)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == f"answered {len(inputs)}", done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["inductor", "aotinductor"])
def test_one_graph_serves_every_batch_and_length(tmp_path: Path, recipe: str) -> None:
    made = attention(tmp_path)
    built, call = made.build(recipe)
    assert isinstance(built, Build)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    exercise(made, call, every_kind_of_size())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert built.recompiles == (1 if recipe == "inductor" else None)
    folder = Path(str(built.artifact))
    assert built.files
    assert all((folder / name).is_file() for name in built.files)
    before = {name: (folder / name).read_bytes() for name in built.files}
    answers_in_a_fresh_process(made, recipe, call)
    assert before == {name: (folder / name).read_bytes() for name in built.files}


@pytest.mark.slow
def test_a_package_copes_with_odd_weights_and_outputs(tmp_path: Path) -> None:
    """Tied weights, a weight in other strides, a lifted constant, an output that is no tensor."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight
            self.inner = Several()

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            shift = torch.tensor([1.5])
            return {**self.inner(self.second(self.first(x)) + shift), "given": x}

    made = sample(tmp_path, Odd(), (torch.randn(3, 8),))
    assert made.capture.mode == "export"
    built, call = made.build("aotinductor")
    assert isinstance(built, Build), built
    assert "weights.safetensors" in built.files
    exercise(made, call, [(torch.randn(n, 8),) for n in (1, 3, 8)])


@pytest.mark.slow
def test_weights_in_other_strides_stay_right(tmp_path: Path) -> None:
    module = Dense()
    module.linear.weight = nn.Parameter(strided(module.linear.weight.detach()))
    made = sample(tmp_path, module, (torch.randn(3, 8),))
    built, call = made.build("aotinductor")
    assert isinstance(built, Build)
    exercise(made, call, [(torch.randn(n, 8),) for n in (1, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["inductor", "aotinductor"])
def test_an_input_in_other_strides_is_changed_in_place(tmp_path: Path, recipe: str) -> None:
    made = sample(tmp_path, Counter(), (torch.randn(3, 8),))
    built, call = made.build(recipe)
    assert isinstance(built, Build)
    for x in (torch.zeros(2, 8), strided(torch.zeros(1, 8))):
        (found,) = call(x)
        assert torch.equal(x, torch.ones_like(x))
        assert torch.equal(found, 2 * torch.ones_like(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        ("inductor + precision(bf16)", 2e-2),
        ("inductor + quantize(int8_dynamic)", 8e-2),
        ("aotinductor(freezing) + quantize(pt2e_static)", 0.3),
    ],
)
def test_number_formats_compose_with_compilation(tmp_path: Path, recipe: str, bound: float) -> None:
    made = attention(tmp_path)
    built, call = made.build(recipe)
    assert isinstance(built, Build), built
    for x in (torch.randn(8, 64, 16), strided(torch.randn(3, 16, 16))):
        (found,) = call(x)
        agree((found,), made.eager(x), bound)
        assert not torch.equal(found, made.eager(x)[0])
    assert call(torch.randn(1, 1, 16))[0].shape == (1, 1, 16)
    answers_in_a_fresh_process(made, recipe, call)


@pytest.mark.slow
def test_a_model_that_export_refuses_is_compiled_in_regions(tmp_path: Path) -> None:
    traffic = tuple(Arrival(sizes={"B": n}) for n in (3, 5, 1))
    made = sample(tmp_path, Branch(), (torch.randn(3, 8),), traffic=traffic)
    assert made.program is None
    built, call = made.build("inductor")
    assert isinstance(built, Build)
    assert built.recompiles is not None
    assert built.recompiles >= 2
    assert built.artifact is None
    exercise(made, call, [(torch.randn(n, 8),) for n in (1, 3, 8)])


@pytest.mark.slow
def test_plain_torch_compile_is_counted_over_the_traffic(tmp_path: Path) -> None:
    traffic = tuple(Arrival(sizes={"B": n}) for n in (3, 5, 1))
    made = sample(tmp_path, Dense(), (torch.randn(3, 8),), traffic=traffic)
    built, call = made.build("inductor(module)")
    assert isinstance(built, Build)
    assert built.recompiles == 3  # for 3 as it is, for 5 with a symbol, and for 1, which is special
    exercise(made, call, [(torch.randn(n, 8),) for n in (1, 3, 8)])


@pytest.mark.parametrize(
    "recipe",
    [
        "aotinductor",
        "aotinductor(freezing) + quantize(pt2e_static)",
        "inductor + quantize(pt2e_dynamic)",
    ],
)
def test_what_needs_a_program_says_so(tmp_path: Path, recipe: str) -> None:
    made = sample(tmp_path, Branch(), (torch.randn(3, 8),))
    built, call = made.build(recipe)
    assert isinstance(built, Unsupported)
    assert call is None


def test_a_package_returns_no_sizes(tmp_path: Path) -> None:
    class Size(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x + 1, x.shape[0]

    made = sample(tmp_path, Size(), (torch.randn(3, 8),))
    built, _ = made.build("aotinductor")
    assert isinstance(built, Unsupported)
    assert "size" in built.text
