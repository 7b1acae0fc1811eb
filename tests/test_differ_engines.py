"""Engines, whose intermediate values cannot be seen: bisection over the captured program."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import differ_models as models
import torchstone
from torchstone import Policy, compat, diff
from torchstone.recipe import parse
from torchstone.records import Divergence, VerdictEntry, Wrong
from torchstone.verify.differ.bisect import bisect
from torchstone.verify.differ.fused import ENGINES, source, told
from torchstone.verify.differ.parts import Graph, Part
from torchstone.workload import from_objects

aten = torch.ops.aten
Inputs = tuple[torch.Tensor, ...]


def graph_of(name: str) -> Graph:
    module, inputs = models.MODELS[name]()
    return Graph(models.graph_of(module, inputs), inputs)


def slightly_off(at: int) -> Callable[[fx.GraphModule, Inputs], Callable[..., Sequence[Any]]]:
    """A compiler with a fault: the result of the operation on one line is a per cent too large."""

    def compile_part(part: fx.GraphModule, _: Inputs) -> Callable[..., Sequence[Any]]:
        class Scales(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                result = super().run_node(n)
                here = n.op == "call_function" and f"line {at}," in n.meta.get("stack_trace", "")
                return result * 1.01 if here else result

        return Scales(part).run

    return compile_part


def folds_casts(part: fx.GraphModule, _: Inputs) -> Callable[..., Sequence[Any]]:
    """A compiler with Inductor's fault: a cast to a narrower format and back is folded away.

    Only where both casts are in one part, as fused kernels are.
    """

    class Folds(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            given = n.args[0] if n.args and isinstance(n.args[0], fx.Node) else None
            if n.target == aten.to.dtype and given is not None and given.target == aten.to.dtype:
                assert isinstance(given.args[0], fx.Node)
                return self.env[given.args[0]].to(n.args[1])
            return super().run_node(n)

    return Folds(part, garbage_collect_values=False).run


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_a_wrong_operation_is_found_in_about_2_log2_n_parts(name: str) -> None:
    graph = graph_of(name)
    usable = [n for n in graph.nodes if n.target in (aten.linear.default, aten.conv2d.default)]
    for node in (usable[0], usable[len(usable) // 2]):
        found = bisect(graph, slightly_off(models.line_of(node)), limit_s=100)
        assert found.part is not None
        assert [models.line_of(n) for n in found.part.nodes] == [models.line_of(node)]
        assert found.compiled <= 2 * math.ceil(math.log2(len(graph.nodes))) + 3
        assert not found.held.right
        assert not found.cut_short
        saw = told(found, ("float64", "engine"), ("engine", {}), None)
        assert saw.kind == "OP"
        assert saw.ops[0].origin.line == models.line_of(node)


class SplitMLP(nn.Module):
    """A product in two bfloat16 parts between other layers (peers, case 17)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(32, 8)
        high = (weight := torch.randn(64, 32)).bfloat16()
        self.register_buffer("parts", torch.cat([high, (weight - high.float()).bfloat16(), high]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        high = x.bfloat16()
        low = (x - high.float()).bfloat16()
        return self.last(torch.cat([high, high, low], 1).float() @ self.parts.float())


def split_graph() -> Graph:
    inputs = (torch.randn(16, 64, generator=torch.Generator().manual_seed(0)),)
    return Graph(models.graph_of(SplitMLP().eval(), inputs), inputs)


def test_what_only_goes_wrong_together_is_found_together() -> None:
    found = bisect(split_graph(), folds_casts, limit_s=100)
    assert found.part is not None
    assert [n.target for n in found.part.nodes] == [aten.to.dtype, aten.to.dtype]
    saw = told(found, ("float64", "engine"), ("engine", {}), None)
    assert saw.kind == "FUSED"
    assert "where it compiles them together" in saw.text


@pytest.mark.parametrize("name", ["convnet"])
def test_a_right_engine_takes_one_part(name: str) -> None:
    graph = graph_of(name)
    found = bisect(graph, lambda part, _: part, limit_s=100)
    assert found.part is None
    assert found.compiled == 1
    assert told(found, ("float64", "engine"), ("engine", {}), None).kind == "NONE"


class WritesToInputs(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x.index_put_((index,), value)
        return x.add_(x.flip(0)).sin()


def test_a_program_that_writes_to_its_inputs_can_be_cut_too() -> None:
    inputs = (torch.randn(8, 4), torch.tensor([1, 3]), torch.randn(2, 4))
    with torch.no_grad():
        program = torch.export.export(WritesToInputs(), inputs).run_decompositions({})
    graph = Graph(compat.flat_module(program), tuple(x.clone() for x in inputs))
    assert bisect(graph, lambda part, _: part, limit_s=100).part is None
    whole = graph.part(graph.nodes, graph.results)
    for given, kept in zip(inputs, whole.inputs, strict=True):
        torch.testing.assert_close(given, kept, rtol=0, atol=0)
    expected = WritesToInputs()(*(x.clone() for x in inputs))
    assert any(torch.equal(expected, result) for result in whole.module(*whole.inputs))


def test_parts_that_the_engine_refuses_are_not_held_against_it() -> None:
    graph = graph_of("recommender")
    line = models.line_of([n for n in graph.nodes if n.target == aten.linear.default][1])
    scales = slightly_off(line)

    def compile_part(part: fx.GraphModule, given: Inputs) -> Callable[..., Sequence[Any]] | None:
        whole = sum(n.op == "call_function" for n in part.graph.nodes) == len(graph.nodes)
        return scales(part, given) if whole else None

    found = bisect(graph, compile_part, limit_s=100)
    assert found.part is not None
    assert found.cut_short == "the engine refuses some of the parts"


def test_when_the_time_is_spent_what_is_known_is_told() -> None:
    graph = graph_of("recommender")
    line = models.line_of(next(n for n in graph.nodes if n.target == aten.linear.default))
    found = bisect(graph, slightly_off(line), limit_s=0)
    assert found.part is not None
    assert found.cut_short == "the time was spent"
    assert found.compiled <= 2


# --- real engines ---------------------------------------------------------------------------------


def found_by(recipe: str, module: nn.Module, inputs: Inputs, reproduction: Path | None) -> Divergence:
    state = {"workload": from_objects(module, inputs)}
    path = None if reproduction is None else str(reproduction)
    return diff.find(state, diff.Question(a="float64", b=recipe, reproduction=path))


@pytest.mark.slow
def test_17_inductor_folds_the_casts_of_a_split(tmp_path: Path) -> None:
    """Inside an MLP, pinned to the casts that it folds away, with a file that shows it."""
    saw = found_by("inductor", SplitMLP().eval(), (torch.randn(16, 64),), tmp_path / "split.py")
    assert saw.kind == "FUSED"
    assert {site.op for site in saw.ops} <= {"aten.to.dtype", "aten.sub.Tensor"}
    assert len(saw.ops) <= 4
    assert all("high" in site.origin.text for site in saw.ops)
    assert saw.local_error is not None
    assert saw.local_error > 1e-4
    assert saw.reproduced
    assert "torchstone" not in (tmp_path / "split.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet"])
def test_inductor_is_right_about_clean_models(name: str) -> None:
    saw = found_by("inductor", *models.MODELS[name](), None)
    assert (saw.kind, saw.compared) == ("NONE", 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["aotinductor", "onnxruntime", "openvino"])
def test_other_engines_compile_parts_too(engine: str, tmp_path: Path) -> None:
    if engine != "aotinductor":
        pytest.importorskip(engine)
    graph = split_graph()
    part = graph.part(graph.nodes[:2], [graph.nodes[1]])
    call = diff.compile_part(parse(engine), tmp_path)(part.module, part.inputs)
    assert call is not None
    torch.testing.assert_close(call(*part.inputs)[0], graph.values[graph.nodes[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_of_each_engine_runs_on_its_own(engine: str, tmp_path: Path) -> None:
    """Written of operations that the engine does right, it says so."""
    if not engine.endswith("inductor"):
        pytest.importorskip(engine)
    graph = split_graph()
    part: Part = graph.part(graph.nodes[:2], [graph.nodes[1]])
    path = tmp_path / "shown.py"
    path.write_text(source(part, 0, (engine, diff.engine_options(parse(engine)))))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "B is right"


# --- in a run -------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).tanh()


def sloppy(module: Plain) -> Callable[..., Any]:
    return lambda x: F.layer_norm(module.first(x), (8,), eps=0.05).tanh()


def shared(module: Plain) -> Callable[..., Any]:
    kept = torch.zeros(4, 8)
    return lambda x: kept.copy_(module(x))


@pytest.mark.slow
def test_every_wrong_verdict_is_told_where_it_diverges(tmp_path: Path) -> None:
    run = torchstone.optimize(
        Plain().eval(),
        torch.randn(4, 8),
        recipes=["custom(sloppy)", "custom(shared)"],
        candidates={"sloppy": sloppy, "shared": shared},
        home=tmp_path,
        policy=Policy(bench_s=1, load_s=0, rounds=5),
    )
    for name in ("sloppy", "shared"):
        entry = run.store.get(f"verdict/custom({name})", VerdictEntry)
        assert entry is not None
        assert isinstance(entry.verdict, Wrong)
    found = run.store.get("divergence/custom(sloppy)", Divergence)
    assert found is not None
    assert (found.kind, found.ops[0].op) == ("OP", "aten.native_layer_norm.default")
    assert "eps=0.05" in found.ops[0].origin.text
    assert found.reproduced
    assert found.case
    called = run.store.get("divergence/custom(shared)", Divergence)
    assert called is not None
    assert called.kind == "UNKNOWN"
    assert called.text == "what failed is not the result of an operation (RESULT_OVERWRITTEN)"
    page = run.report().read_text()
    assert "first diverges: aten.native_layer_norm has eps=0.05 in B, 1e-05 in A" in page
