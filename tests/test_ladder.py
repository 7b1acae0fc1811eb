"""The ladder of dynamic shapes, climbed with real compilers; times are recorded, never asserted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
import torch._dynamo
from torch import nn

import shapes_samples
from backends_samples import Attention, Stateful
from shapes_samples import ONE, Shapes, on_length, on_single, on_value, workload
from torchstone import compat
from torchstone.capture.shapes.ladder import climb, code_for
from torchstone.compat import shapes
from torchstone.records import Attempt, Dim, LadderStudy
from torchstone.workload import Workload

pytestmark = pytest.mark.skipif(
    shapes.bounds_unavailable() is not None, reason="this torch marks no size unbacked with bounds"
)
B = Dim(name="B", low=1, high=8)
S = Dim(name="S", low=1, high=32)
ROWS: Shapes = {"x": ("B", "S", 16)}


def made_of(module: nn.Module, inputs: Sequence[torch.Tensor], shaped: Shapes) -> Workload:
    used = {size for shape in shaped.values() for size in shape}
    return Workload(
        name="m",
        model=lambda: module,
        inputs=lambda: tuple(inputs),
        dims=tuple(d for d in (B, S) if d.name in used),
        shapes=dict(shaped),
    )


def climbed(
    forward: Callable[..., Any],
    shaped: Shapes = ONE,
    inputs: Sequence[torch.Tensor] = (),
    **options: Any,
) -> LadderStudy:
    inputs = inputs or [torch.randn(4, 4)]
    loaded = workload(forward, inputs, shaped, dims=(options.pop("dim", B), S))
    study = climb(loaded, loaded.module(), **{"backend": "eager", **options})
    assert msgspec.json.decode(msgspec.json.encode(study), type=LadderStudy) == study
    return study


def attempt(study: LadderStudy, **rungs: str) -> Attempt:
    return next(a for a in study.attempts if a.rungs == rungs)


@pytest.mark.slow
def test_attention_is_one_unbacked_graph() -> None:
    module = Attention().eval()
    loaded = made_of(module, [torch.randn(4, 7, 16)], ROWS)
    study = climb(loaded, module, backend="eager")
    assert study.chosen == {"B": "unbacked", "S": "unbacked"}
    one = attempt(study, B="unbacked", S="unbacked")
    assert one.graphs == 1
    assert {"B": 1, "S": 1} in [trial.sizes for trial in one.trials]
    assert all(trial.relative is not None and trial.relative < 1e-5 for trial in one.trials)
    backed = attempt(study, B="backed", S="backed")
    assert backed.graphs == 4, "one for each of the two sizes that may be 1, and for both"
    assert study.graphs_without is not None
    assert study.graphs_without >= 4
    assert len(one.trials) == len(backed.trials) >= 10
    assert backed.against_backed == 1.0
    assert one.against_backed is not None
    assert one.against_backed > 0
    assert "1 graph for" in study.why
    assert not study.not_tried


def test_a_branch_on_one_goes_a_rung_down() -> None:
    study = climbed(on_single)
    assert study.chosen == {"B": "unbacked-2"}
    fallen = attempt(study, B="unbacked")
    assert fallen.failed is not None
    assert fallen.failed.code == "SIZE_BRANCH"
    assert fallen.failed.bound == "B >= 2"
    assert fallen.failed.where is not None
    assert fallen.failed.where.file == shapes_samples.__file__
    assert fallen.failed.where.text == "if x.shape[0] == 1:"
    held = attempt(study, B="unbacked-2")
    assert held.graphs == 2
    assert "B unbacked fell: the code asks whether B == 1" in study.why
    assert "if x.shape[0] >= 2:" in study.code
    assert "min=2, max=8" in study.code


@pytest.mark.slow
def test_only_the_dim_at_fault_goes_down() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(1) * 3 if x.shape[1] == 1 else x.sum(1)

    study = climbed(forward, ROWS, [torch.randn(4, 7, 16)])
    assert study.chosen == {"B": "unbacked", "S": "unbacked-2"}
    assert attempt(study, B="unbacked", S="unbacked-2").graphs == 2


@pytest.mark.slow
def test_a_branch_inside_the_range_is_left_to_torch() -> None:
    study = climbed(on_length, dim=Dim(name="B", low=1, high=256))
    assert study.chosen == {"B": "automatic"}
    codes = [a.failed.code for a in study.attempts if a.failed is not None]
    assert codes == ["SIZE_BRANCH", "SIZE_BRANCH", "RANGE_NARROWED"]
    assert all("x.shape[0] > 128" in str(a.failed) for a in study.attempts if a.failed is not None)
    assert study.code == "compiled = torch.compile(model)"


@pytest.mark.slow
def test_a_range_on_one_side_of_the_branch_is_unbacked() -> None:
    study = climbed(on_length, dim=Dim(name="B", low=1, high=128))
    assert study.chosen == {"B": "unbacked"}


@pytest.mark.slow
def test_size_zero_has_a_graph_of_its_own() -> None:
    study = climbed(lambda self, x: x.sum(0), dim=Dim(name="B", low=0, high=8))
    assert study.chosen == {"B": "unbacked"}
    tried = {trial.sizes["B"] for trial in attempt(study, B="unbacked").trials}
    assert {0, 1, 8} <= tried
    assert attempt(study, B="unbacked").graphs == 2
    assert "if x.shape[0] >= 1:" in study.code


@pytest.mark.slow
def test_a_dim_of_two_inputs_has_one_shape_id() -> None:
    def forward(self: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y], 1) if x.shape[0] == y.shape[0] else x

    shaped = {"x": ("B", 4), "y": ("B", 4)}
    study = climbed(forward, shaped, [torch.randn(4, 4), torch.randn(4, 4)])
    assert study.chosen == {"B": "unbacked"}, study.why
    assert attempt(study, B="unbacked").graphs == 1
    assert study.code.count("shape_id='B'") == 2


def test_an_answer_that_is_not_eagers_falls() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() and x.dim() == 2 else x

    study = climbed(forward)
    assert study.chosen == {}
    assert study.code == ""
    assert all(a.wrong is not None for a in study.attempts)
    assert "the answer is not eager's at B = 3" in study.why


def test_a_model_that_breaks_says_so() -> None:
    study = climbed(on_value)
    assert study.chosen == {}
    assert {a.failed.code for a in study.attempts if a.failed is not None} == {"VALUE_BRANCH"}
    assert "No rung holds." in study.why
    assert "if x.sum() > 0:" in study.why


def test_without_bounds_the_ladder_begins_at_backed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "bounds_unavailable", lambda: "torch 2.11.0: no bounds")
    study = climbed(lambda self, x: x.relu())
    assert study.chosen == {"B": "backed"}
    assert "no bounds" in study.why


def test_no_dims_no_ladder() -> None:
    study = climbed(lambda self, x: x, {"x": (4, 4)})
    assert study.chosen == {}
    assert study.attempts == ()
    assert "one graph is enough" in study.why


@pytest.mark.slow
def test_state_is_as_it_was() -> None:
    module = Stateful().eval()
    loaded = made_of(module, [torch.randn(3, 8)], {"x": ("B", 8)})
    study = climb(loaded, module, backend="eager")
    assert study.chosen == {"B": "unbacked"}, study.why
    assert torch.equal(module.seen, torch.zeros(8))


@pytest.mark.slow
def test_sizes_that_the_model_does_not_take_are_said() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2, 4)

    study = climbed(forward)
    assert study.chosen
    assert any("the model itself raises" in text for text in study.not_tried)
    assert all(t.sizes["B"] % 2 == 0 for a in study.attempts for t in a.trials)


def test_what_the_limit_leaves_out_is_listed() -> None:
    study = climbed(on_single, limit_s=0.0)
    assert study.chosen == {}
    assert study.not_tried


@pytest.mark.slow
def test_the_code_that_is_said_does_what_was_tried() -> None:
    loaded = workload(on_single, [torch.randn(4, 4)], ONE, dims=(B,))
    model = loaded.module()
    names: dict[str, Any] = {"torch": torch, "model": model}
    torch._dynamo.reset()
    exec(code_for(loaded.spec(), {"B": "unbacked-2"}), names)
    before = compat.graphs_compiled()
    with torch._dynamo.config.patch(automatic_dynamic_local_pgo=False):
        for rows in (4, 8, 1, 3, 2, 1):
            given = torch.randn(rows, 4)
            assert torch.equal(names["call"](given), model(given))
    assert compat.graphs_compiled() - before == 2
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "graphs"), [("automatic", 4), ("backed", 3), ("unbacked", 1)])
def test_graphs_of_five_shapes(way: str, graphs: int) -> None:
    """Of a transformer block: four graphs left alone, three marked dynamic, one unbacked."""
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with shapes.recompiling(64), torch.no_grad():
        call = torch.compile(block, backend="eager", fullgraph=True)
        before = compat.graphs_compiled()
        for sizes in ((4, 16), (8, 32), (2, 64), (1, 16), (1, 1)):
            given = torch.randn(*sizes, 16)
            for axis in (0, 1):
                if way == "backed":
                    torch._dynamo.mark_dynamic(given, axis)
                elif way == "unbacked":
                    shapes.mark_unbacked(given, axis, 1, 64)
            assert torch.allclose(call(given), block(given), atol=1e-5)
        assert compat.graphs_compiled() - before == graphs


class Causal(nn.Module):
    """Attention written out, with a mask of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        later = torch.ones(s, s, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_inductor_asks_more_than_the_tracer() -> None:
    """Written-out attention traces from 1; Inductor then asks whether S is 1, to lay out a bmm."""
    module = Causal().eval()
    loaded = made_of(module, [torch.randn(4, 7, 16)], ROWS)
    study = climb(loaded, module, backend="inductor", limit_s=240)
    assert study.chosen == {"B": "unbacked", "S": "unbacked-2"}, study.why
    fallen = attempt(study, B="unbacked", S="unbacked")
    assert fallen.failed is not None
    assert fallen.failed.text.startswith("Inductor asks whether S == 1")
    assert fallen.failed.bound == "S >= 2"
    assert fallen.failed.where is not None
    assert "@" in fallen.failed.where.text
    held = attempt(study, B="unbacked", S="unbacked-2")
    assert held.graphs == 2
    assert {"B": 1, "S": 1} in [trial.sizes for trial in held.trials]
    assert held.median_s
