"""``precision(bf16x3)`` and ``precision(bf16x6)``: which products are split, and what comes out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from torchstone import recipe
from torchstone import workload as workload_module
from torchstone.capture import program as programs
from torchstone.policy import Policy
from torchstone.quantize.split import split
from torchstone.records import VerdictEntry, Verified
from torchstone.report.progress import QuietProgress
from torchstone.run import Request, execute

aten = torch.ops.aten
LINEAR, MATMUL = "torchstone.split_linear.default", "torchstone.split_matmul.default"


def targets(module: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def captured(module: nn.Module, *args: torch.Tensor) -> torch.export.ExportedProgram:
    shapes = tuple({0: Dim("B", min=2, max=64)} for _ in args)
    return torch.export.export(module, args, dynamic_shapes=shapes)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tiny = (
            nn.Linear(64, 96),
            nn.Linear(96, 64, bias=False),
            nn.Linear(64, 8),
        )
        self.register_buffer("ones", torch.ones(48))
        self.matrix = nn.Parameter(torch.randn(64, 48) / 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.second(F.gelu(self.first(x), approximate="tanh"))
        return torch.addmm(self.ones, h, self.matrix), torch.relu(h @ self.matrix), self.tiny(h)


@pytest.mark.parametrize("parts", [2, 3])
def test_products_with_constants_are_split_with_what_follows(parts: int) -> None:
    torch.manual_seed(0)
    module = Layers().eval()
    found, count = split(captured(module, torch.randn(5, 64)), parts)
    assert count == 4
    assert targets(found).count(LINEAR) == 4
    assert targets(found).count("aten.linear.default") == 1  # too small to gain
    assert "torchstone.split_parts.default" not in targets(found)  # computed ahead
    assert "aten.gelu.default" not in targets(found)
    assert "aten.relu.default" not in targets(found)
    x = torch.randn(9, 64)
    got = found(x)
    exact = module.double()(x.double())
    bound = 1e-6 if parts == 3 else 3e-5
    assert max(relative(a, b) for a, b in zip(got, exact, strict=True)) < bound


def test_a_result_that_others_read_keeps_what_follows_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.linear(x)
            return torch.relu(h), h

    found, count = split(captured(Twice(), torch.randn(5, 64)), 2)
    assert count == 1
    assert "aten.relu.default" in targets(found)


def test_products_of_inputs_are_split_as_they_come() -> None:
    class Batched(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.bmm(a, b.transpose(1, 2)))

    module = Batched()
    found, count = split(captured(module, torch.randn(3, 40, 64), torch.randn(3, 48, 64)), 3)
    assert (count, targets(found).count(MATMUL)) == (1, 1)
    a, b = torch.randn(4, 40, 64), torch.randn(4, 48, 64)
    assert relative(found(a, b), module(a.double(), b.double())) < 1e-6


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point, self.strided = nn.Conv2d(40, 48, 1), nn.Conv2d(40, 48, 1, stride=2)
        self.wide = nn.Conv2d(40, 48, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(self.point(x)), self.strided(x), self.wide(x)


def test_a_convolution_of_size_one_is_a_product() -> None:
    torch.manual_seed(0)
    module = Convolutions().eval()
    found, count = split(captured(module, torch.randn(3, 40, 6, 5)), 3)
    assert count == 1
    assert targets(found).count("torchstone.split_pointwise.default") == 1
    assert "aten.relu.default" not in targets(found)
    x = torch.randn(4, 40, 6, 5)
    got = found(x)
    exact = module.double()(x.double())
    assert max(relative(a, b) for a, b in zip(got, exact, strict=True)) < 1e-6


class Other(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((64, 64), float("inf")),
        torch.full((64, 64), float("nan")),
        torch.full((64, 64), 3e38),
        torch.randn(64, 64, dtype=torch.float64),
        torch.randn(64, 16),
    ],
    ids=["infinite", "NaN", "too large", "float64", "narrow"],
)
def test_what_has_no_parts_is_left(weight: torch.Tensor) -> None:
    x = torch.randn(5, weight.shape[1], dtype=weight.dtype)
    found, count = split(captured(Other(weight), x), 2)
    assert count == 0
    torch.testing.assert_close(found(x), F.linear(x, weight), equal_nan=True)


def test_a_stored_program_with_split_products_is_read_in_another_process(tmp_path: Any) -> None:
    import subprocess
    import sys

    module, count = split(captured(Layers(), torch.randn(5, 64)), 2)
    assert count
    x = torch.randn(7, 64)
    again = torch.export.export(module, (x,), dynamic_shapes=({0: Dim("B", min=2, max=64)},))
    programs.save(again, tmp_path / "program.pt2")
    torch.save((x, module(x)), tmp_path / "expected.pt")
    code = (
        "import sys, torch; from torchstone.capture import program as p; "
        "m = p.load(sys.argv[1]).module(check_guards=False); x, want = torch.load(sys.argv[2]); "
        "print(all(torch.allclose(a, b) for a, b in zip(m(x), want)))"
    )
    files = [str(tmp_path / name) for name in ("program.pt2", "expected.pt")]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_the_class_is_declared() -> None:
    assert recipe.parse("inductor + precision(bf16x3)").numerics is recipe.Numerics.LOSSY
    assert recipe.parse("inductor + precision(bf16x6)").numerics is recipe.Numerics.REASSOCIATES


@pytest.mark.slow
def test_a_run_proves_them(tmp_path: Any) -> None:
    recipes = ("inductor + precision(bf16x3)", "inductor + rewrite(pooling) + precision(bf16x6)")
    workload = workload_module.from_objects(
        summed, torch.randn(8, 64), dims={"B": "1..32"}, policy=Policy(), shapes={"x": ["B", 64]}
    )
    request = Request(
        workload=workload, recipes=tuple(map(recipe.parse, recipes)), home=tmp_path, until="verify"
    )
    run = execute(request, QuietProgress())
    for text in recipes:
        entry = run.store.get(f"verdict/{text}", VerdictEntry)
        assert entry is not None
        assert isinstance(entry.verdict, Verified), entry.verdict


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 128), nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x))).sum(-1)


def summed() -> nn.Module:
    torch.manual_seed(0)
    return Summed().eval()
