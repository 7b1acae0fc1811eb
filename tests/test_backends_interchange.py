"""ONNX Runtime and OpenVINO against eager, and what they refuse."""

from __future__ import annotations

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
    Picture,
    S,
    Several,
    Stateful,
    Words,
    agree,
    exercise,
    sample,
)
from torchstone import backends
from torchstone import recipe as recipes
from torchstone.records import Build, Unsupported

ENGINES = ("onnxruntime", "openvino")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    absent = backends.probe(recipes.parse(name))
    if absent is not None:
        pytest.skip(absent.why)
    return name


@pytest.mark.slow
def test_attention_at_every_kind_of_size(tmp_path: Path, engine: str) -> None:
    made = sample(tmp_path, Attention(), (torch.randn(1, 1, 16),), (B, S), shapes={"x": ("B", "S", 16)})
    built, call = made.build(engine)
    assert isinstance(built, Build)
    inputs = [(torch.randn(b, s, 16),) for b, s in [(1, 1), (1, 9), (8, 1), (3, 77), (8, 512)]]
    exercise(made, call, inputs)
    loaded, again = made.build(engine, load=True)
    assert isinstance(loaded, Build)
    assert built.files == loaded.files
    exercise(made, again, inputs[:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "width"), [(Dense(), (8,)), (Picture(), (2, 6, 6)), (Several(), (8,))]
)
def test_models_of_several_kinds(
    tmp_path: Path, engine: str, module: nn.Module, width: tuple[int, ...]
) -> None:
    made = sample(tmp_path, module, (torch.randn(3, *width),))
    built, call = made.build(engine)
    assert isinstance(built, Build), built
    exercise(made, call, [(torch.randn(n, *width),) for n in (1, 2, 8)])


@pytest.mark.slow
def test_integer_inputs(tmp_path: Path, engine: str) -> None:
    ids, mask = torch.randint(0, 11, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    shapes = {"ids": ("B", "S"), "mask": ("B", "S")}
    made = sample(tmp_path, Words(), (ids, mask), (B, S), shapes=shapes)
    _, call = made.build(engine)
    exercise(made, call, [(torch.randint(0, 11, (b, s)), torch.randint(0, 2, (b, s)))
                          for b, s in [(1, 1), (4, 3)]])  # fmt: skip


@pytest.mark.slow
def test_an_input_that_the_model_ignores(tmp_path: Path, engine: str) -> None:
    class Ignores(nn.Module):
        def forward(self, unused: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            return y, y - 1

    shapes = {"unused": ("B",), "x": ("B", 8)}
    made = sample(tmp_path, Ignores(), (torch.randn(3), torch.randn(3, 8)), shapes=shapes)
    built, call = made.build(engine)
    assert isinstance(built, Build)
    x = torch.randn(2, 8)
    agree(call(torch.randn(2), x), made.eager(torch.randn(2), x), 1e-6)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Counter(), "changes its input x in place"),
        (Stateful(), "changes its own state (seen)"),
        (Branch(), "export refused"),
        (Dense().to(torch.bfloat16), "bfloat16"),
    ],
)
def test_what_it_refuses(tmp_path: Path, engine: str, module: nn.Module, said: str) -> None:
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    made = sample(tmp_path, module, (torch.randn(3, 8).to(dtype),))
    built, call = made.build(engine)
    assert isinstance(built, Unsupported)
    assert said in built.text
    assert call is None


@pytest.mark.slow
def test_a_result_returned_twice_is_right_or_refused(tmp_path: Path, engine: str) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            return y, y

    made = sample(tmp_path, Twice(), (torch.randn(3, 8),))
    built, call = made.build(engine)
    if isinstance(built, Unsupported):
        assert "OpenVINO cannot convert" in built.text
        return
    x = torch.randn(2, 8)
    agree(call(x), made.eager(x), 1e-6)


@pytest.mark.slow
def test_an_operation_that_no_engine_knows_is_a_refusal(tmp_path: Path, engine: str) -> None:
    class Rare(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.linalg.eigvalsh(x.transpose(-1, -2) @ x)

    made = sample(tmp_path, Rare(), (torch.randn(3, 8, 4),), shapes={"x": ("B", 8, 4)})
    built, _ = made.build(engine)
    assert isinstance(built, Unsupported)
    assert "\n" not in built.text


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["bf16", "f16", "auto"])
def test_a_precision_that_the_processor_lacks_is_refused_and_never_replaced(
    tmp_path: Path, hint: str
) -> None:
    openvino = pytest.importorskip("openvino")
    made = sample(tmp_path, Dense(), (torch.randn(3, 8),))
    built, call = made.build(f"openvino({hint})")
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if {"bf16": "BF16", "f16": "FP16"}.get(hint, "FP32") in capabilities:
        x = torch.randn(3, 8)
        agree(call(x), made.eager(x), 3e-2)
    else:
        assert isinstance(built, Unsupported)
        assert hint in built.text
