"""Which operation is named, what is said of it, and that the file beside it shows it on its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from differ_models import mark
from torchstone.diff import compare_modules
from torchstone.records import Divergence
from torchstone.verify.differ import align
from torchstone.verify.differ.between import between
from torchstone.verify.differ.explain import relation
from torchstone.verify.differ.measure import held
from torchstone.verify.differ.record import record

aten = torch.ops.aten
Body = Callable[["Layer", torch.Tensor], object]


class Layer(nn.Module):
    """One linear layer, and a body that uses it."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.l = nn.Linear(8, 8)
        self.body = body

    def forward(self, x: torch.Tensor) -> object:
        return self.body(self, x)


def found(a: Body, b: Body, reproduction: Path | None = None) -> Divergence:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    return compare_modules(Layer(a), Layer(b), (x,), reproduction=reproduction)


def ops(sites: Sequence[object]) -> list[str]:
    return [getattr(site, "op", "").rpartition(".")[0] for site in sites]


# --- what is said ---------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Body, Body, str, list[str], list[str]]] = {
    "a literal": (
        lambda s, x: F.layer_norm(s.l(x), (8,), eps=1e-5).tanh(),
        lambda s, x: F.layer_norm(s.l(x), (8,), eps=1e-3).tanh(),
        "aten.native_layer_norm has eps=0.001 in B, 1e-05 in A",
        ["aten.native_layer_norm"],
        ["aten.native_layer_norm"],
    ),
    "a constant that is made": (
        lambda s, x: s.l(x) + torch.full((8,), 0.5),
        lambda s, x: s.l(x) + torch.full((8,), 0.51),
        "aten.full has fill_value=0.51 in B, 0.5 in A",
        ["aten.full"],
        ["aten.full"],
    ),
    "operands swapped": (
        lambda s, x: (x - s.l(x)).tanh(),
        lambda s, x: (s.l(x) - x).tanh(),
        "B swaps the operands of aten.sub: B's result is A's negated",
        ["aten.sub"],
        ["aten.sub"],
    ),
    "a permuted result": (
        lambda s, x: s.l(x).relu(),
        lambda s, x: s.l(x).relu().t(),
        "only B does aten.t before the result output: B's result is A's with its dimensions "
        "permuted to (1, 0)",
        ["aten.t"],
        [],
    ),
    "a permuted intermediate": (
        lambda s, x: s.l(x).relu() @ x,
        lambda s, x: s.l(x).relu().flip(0) @ x,
        "only B does aten.flip before aten.mm: B's result is A's reversed along dimension 0",
        ["aten.flip"],
        [],
    ),
    "a missing mask": (
        lambda s, x: s.l(x).masked_fill(x > 0, float("-inf")).softmax(-1),
        lambda s, x: s.l(x).softmax(-1),
        "B lacks aten.masked_fill, which A does before aten._softmax",
        ["aten._softmax"],
        ["aten.masked_fill"],
    ),
    "a dropped cast": (
        lambda s, x: (x - x.bfloat16().float()) * 2,
        lambda s, x: (x - x) * 2,
        "B lacks a cast to bfloat16, which A does before aten.sub",
        ["aten.sub"],
        ["aten._to_copy"],
    ),
    "a precision drop": (
        lambda s, x: s.l(x).tanh(),
        lambda s, x: s.l(x).bfloat16().float().tanh(),
        "only B does a cast to bfloat16 before aten.tanh",
        ["aten._to_copy"],
        [],
    ),
    "a precision drop that fades": (
        lambda s, x: (x * 3 + s.l(x)).sigmoid() + 4,
        lambda s, x: (x * 3 + s.l(x).half().float()).sigmoid() + 4,
        "only B does a cast to float16 before aten.add",
        ["aten._to_copy"],
        [],
    ),
    "a product in 16 bits": (
        lambda s, x: (x @ x).tanh(),
        lambda s, x: (x.bfloat16() @ x.bfloat16()).float().tanh(),
        "only B does a cast to bfloat16, a cast to bfloat16 before aten.mm",
        ["aten._to_copy", "aten._to_copy"],
        [],
    ),
    "another function": (
        lambda s, x: F.gelu(s.l(x)).tanh(),
        lambda s, x: F.silu(s.l(x)).tanh(),
        "B does aten.silu where A does aten.gelu before aten.tanh",
        ["aten.silu"],
        ["aten.gelu"],
    ),
    "an approximation": (
        lambda s, x: F.gelu(s.l(x)).tanh(),
        lambda s, x: F.gelu(s.l(x), approximate="tanh").tanh(),
        "aten.gelu has approximate=tanh in B, None in A",
        ["aten.gelu"],
        ["aten.gelu"],
    ),
    "in place": (
        lambda s, x: s.l(x).relu_().add_(1).tanh(),
        lambda s, x: s.l(x).relu_().add_(2).tanh(),
        "aten.add_ has other=2 in B, 1 in A",
        ["aten.add_"],
        ["aten.add_"],
    ),
    "results exchanged": (
        lambda s, x: (s.l(x), x.cumsum(0)),
        lambda s, x: (x.cumsum(0), s.l(x)),
        "B returns another value as [0]",
        ["aten.cumsum"],
        ["aten.addmm"],
    ),
    "beside a huge mask": (
        lambda s, x: (s.l(x).bfloat16().float() + (x > 1) * -3e38).softmax(-1),
        lambda s, x: (s.l(x) + (x > 1) * -3e38).softmax(-1),
        "B lacks a cast to bfloat16, which A does before aten.add",
        ["aten.add"],
        ["aten._to_copy"],
    ),
    "a fault whose result stands elsewhere": (
        lambda s, x: ((s.l(x) * 2).sin(), s.l(x).cos()),
        lambda s, x: ((s.l(x) * 1).sin(), s.l(x).cos()),
        "aten.mul has other=1 in B, 2 in A: B's result is A's times 0.5",
        ["aten.mul"],
        ["aten.mul"],
    ),
    "scaled": (
        lambda s, x: s.l(x).relu(),
        lambda s, x: s.l(x).relu() * 1.01,
        "only B does aten.mul before the result output: B's result is A's times 1.01",
        ["aten.mul"],
        [],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_at_fault_is_named(name: str) -> None:
    a, b, text, named, instead_of = FAULTS[name]
    told = found(a, b)
    assert told.text == text
    assert ops(told.ops) == named
    assert ops(told.instead_of) == instead_of
    assert told.local_error is None or told.local_error > (told.bound or 0)


def test_written_through_a_view() -> None:
    def body(row: int) -> Body:
        def run(s: Layer, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros(8, 8)
            y[:, 0] = s.l(x)[:, 1]
            y[row].add_(3)
            return y.tanh()

        return run

    told = found(body(1), body(2))
    assert told.text.startswith("aten.select has index=2 in B, 1 in A")


def test_other_weights() -> None:
    a, b = Layer(lambda s, x: s.l(x).tanh()), Layer(lambda s, x: s.l(x).tanh())
    with torch.no_grad():
        b.l.weight[0, 0] += 0.5
    told = compare_modules(a, b, (torch.randn(8, 8),))
    assert told.text == "l.weight holds other values in B than in A"


def test_another_number_of_results() -> None:
    told = found(lambda s, x: (s.l(x), x.sin()), lambda s, x: (s.l(x),))
    assert (told.kind, told.text) == ("STRUCTURE", "B gives 1 results, A 2")


def test_operands_and_place_are_told() -> None:
    told = found(*FAULTS["a literal"][:2])
    assert told.kind == "OP"
    assert told.ops[0].code == (
        "aten.native_layer_norm.default(x0, normalized_shape=[8], weight=None, bias=None, eps=0.001)"
    )
    assert Path(told.ops[0].origin.file or "").name == Path(__file__).name
    assert "eps=1e-3" in told.ops[0].origin.text
    (operand,) = told.operands
    assert (operand.name, operand.shape, operand.dtype) == ("x0", (8, 8), "float32")
    assert operand.low is not None
    assert operand.high is not None
    assert operand.low < (operand.mean or 0) < operand.high


HARMLESS: dict[str, tuple[Body, Body]] = {
    "an operation undone": (lambda s, x: s.l(x).tanh(), lambda s, x: s.l(x).t().clone().t().tanh()),
    "nothing added": (lambda s, x: s.l(x).tanh(), lambda s, x: (s.l(x) + 0).tanh()),
    "a product the other way": (lambda s, x: x @ s.l(x), lambda s, x: (s.l(x).t() @ x.t()).t()),
    "a mean in two steps": (lambda s, x: s.l(x).mean(), lambda s, x: s.l(x).mean(0).mean()),
    "softmax by hand": (
        lambda s, x: s.l(x).softmax(-1),
        lambda s, x: (s.l(x) - s.l(x).logsumexp(-1, keepdim=True)).exp(),
    ),
    "variance from squares": (
        lambda s, x: F.layer_norm(s.l(x), (8,)),
        lambda s, x: (
            (s.l(x) - s.l(x).mean(-1, True))
            / (s.l(x).square().mean(-1, True) - s.l(x).mean(-1, True).square() + 1e-5).sqrt()
        ),
    ),
    "a mask that is added": (
        lambda s, x: s.l(x).masked_fill(x > 1, -3e38).softmax(-1),
        lambda s, x: (s.l(x) + (x > 1) * -3e38).softmax(-1),
    ),
    "another order": (lambda s, x: x.sin() + x.cos(), lambda s, x: x.cos() + x.sin()),
    "in another format where it is exact": (
        lambda s, x: s.l(x) * (x > 0).float(),
        lambda s, x: s.l(x) * (x > 0).bfloat16().float(),
    ),
    "random numbers of one seed": (
        lambda s, x: s.l(x) + torch.rand(8),
        lambda s, x: torch.rand(8) + s.l(x),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_only_done_otherwise_is_not_reported(name: str) -> None:
    told = found(*HARMLESS[name])
    assert (told.kind, told.text) == ("NONE", "no divergence beyond rounding")


# --- reproductions --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["a literal", "in place", "a constant that is made", "beside a huge mask"]
)
def test_the_file_shows_it_on_its_own(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shown.py"
    told = found(*FAULTS[name][:2], reproduction=path)
    assert told.reproduced
    text = path.read_text()
    assert "torchstone" not in text


@pytest.mark.slow
def test_the_file_says_so_once_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "shown.py"
    assert found(*FAULTS["a missing mask"][:2], reproduction=path).reproduced
    path.write_text(path.read_text().replace(", b_side(*given())", ", a_side(*given())"))
    done = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "B is right")


@pytest.mark.slow
def test_large_operands_are_drawn_from_a_seed_where_that_shows_it_too(tmp_path: Path) -> None:
    x, path = torch.randn(300, 300), tmp_path / "large.py"
    told = compare_modules(lambda x: x.softmax(-1), lambda x: x.softmax(0), (x,), reproduction=path)
    assert told.reproduced
    assert len(path.read_bytes()) < 8000


@pytest.mark.slow
def test_a_result_of_another_machine_is_in_the_file(tmp_path: Path) -> None:
    """What B's operations gave when they were recorded, and do not give here."""
    x = torch.randn(6, 6)
    a, b = record(lambda x: x.exp().sin(), (x,), "a"), record(lambda x: x.exp().sin(), (x,), "b")
    for op in b.ops:
        kept = b.values[op.outs[0] or 0].tensor
        assert kept is not None
        kept.mul_(1 + 1e-4)
    told = between(a, b, reproduction=tmp_path / "recorded.py")
    assert told.text.startswith("B's aten.exp is less precise than A's on the same operands")
    assert told.reproduced


# --- properties -----------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: max(s) > 1),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_a_permuted_tensor_never_matches(shape: list[int], seed: int, data: st.DataObject) -> None:
    """It has the same count, mean and deviation."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    order = data.draw(st.permutations(range(x.numel())))
    moved = x.flatten()[list(order)].reshape(shape)
    right = held(moved, x.double(), x).right
    assert right == torch.equal(moved, x)


@given(factor=st.floats(0.5, 2), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_a_scaled_tensor_never_matches(factor: float, seed: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    if abs(factor - 1) > 1e-4:
        assert not held(x * factor, x.double(), x).right
        assert not held(-x, x.double(), x).right
        assert not held(x + factor, x.double(), x).right


def test_a_relation_is_said_only_where_it_holds() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    assert relation(x.permute(2, 0, 1).contiguous().float(), x) == (
        "with its dimensions permuted to (2, 0, 1)"
    )
    assert relation(x.flip(1).float(), x) == "reversed along dimension 1"
    assert relation(x.roll(2, 0).float(), x) == "shifted by 2 along dimension 0"
    assert relation((x * 0.9).float(), x) == "times 0.9"
    assert relation((x + 3).float(), x) == "plus 3"
    assert relation(torch.randn(3, 4, 5), x) is None
    assert relation(x.float(), x) is None


Step = tuple[str, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "mul", "relu", "tanh", "mm", "t", "sum")),
        st.integers(0, 3),
        st.floats(0.5, 1.5).map(lambda f: round(f, 3)),
    ),
    min_size=3,
    max_size=14,
)


def built(steps: Sequence[Step], harmless: Sequence[int] = ()) -> fx.GraphModule:
    """A chain of operations on 4x4 matrices, some of which read earlier ones; line k is step k.

    :param harmless: steps after which something is put in that changes nothing.
    """
    graph = fx.Graph()
    made = [graph.placeholder("x")]
    for line, (name, back, number) in enumerate(steps):
        last, other = made[-1], made[max(0, len(made) - 1 - back)]
        calls: dict[str, tuple[object, tuple[object, ...]]] = {
            "add": (aten.add.Tensor, (last, number)),
            "mul": (aten.mul.Tensor, (other, number)),
            "relu": (aten.relu.default, (last,)),
            "tanh": (aten.tanh.default, (last,)),
            "mm": (aten.mm.default, (last, other)),
            "t": (aten.t.default, (other,)),
            "sum": (aten.add.Tensor, (last, other)),
        }
        node = graph.call_function(*calls[name])  # type: ignore[arg-type]
        mark(node, line)
        if line in harmless:
            for target in (aten.t.default, aten.clone.default, aten.t.default):
                node = graph.call_function(target, (node,))
                mark(node, 900)
        made.append(node)
    graph.output((made[-1],))
    return fx.GraphModule(nn.Module(), graph)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(11))


@given(steps=STEPS)
@settings(deadline=None, max_examples=40)
def test_the_alignment_of_a_graph_with_itself_is_the_identity(steps: list[Step]) -> None:
    graph = built(steps)
    a, b = record(graph, (X,), "a"), record(graph, (X,), "b")
    live = a.live()
    assert align.aligned(a, b, live, live) == {k: k for k in live}
    pairs = align.numbered(a, b, align.leaves_paired(a, b))
    assert set(pairs) == set(live)
    assert all(a.ops[i].target == b.ops[j].target for j, i in pairs.items())
    assert between(a, b).kind == "NONE"


@given(steps=STEPS, at=st.integers(0, 13), harmless=st.sets(st.integers(0, 13), max_size=5))
@example(steps=[*[("add", 0, 1.0)] * 9, ("mul", 0, 1.0), ("add", 0, 1.0)], at=10, harmless={0, 1, 9})
@settings(deadline=None, max_examples=60)
def test_harmless_operations_do_not_move_the_answer(
    steps: list[Step], at: int, harmless: set[int]
) -> None:
    at %= len(steps)
    planted = [*steps[:at], ("add", 0, 0.75), *steps[at:]]
    wrong = [*steps[:at], ("add", 0, 0.85), *steps[at:]]
    right = record(built(planted), (X,), "a")
    plain = between(right, record(built(wrong), (X,), "b"))
    padded = between(right, record(built(wrong, sorted(harmless)), (X,), "b"))
    assert (plain.kind == "NONE") == (padded.kind == "NONE")
    if plain.kind != "NONE":  # the place may have no way to the result, or be undone by a ReLU
        assert [site.origin.line for site in plain.ops] == [at]
        # where a value is there twice (times 1), what follows the place may be named with it
        assert padded.ops[0].origin.line == at
