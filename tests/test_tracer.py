"""torchstone.trace: one graph for all sizes; what no graph can hold is refused by its line."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import torchstone
from torchstone.capture.tracer.sizes import Axis, Ledger, Size, evaluate, expression_of
from torchstone.errors import CaptureError, EnvelopeError

BS = ({0: "B", 1: "S"},)
SCALE = 0.5
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # torch's word at what export adds: sizes
OFFSET = torch.ones(3)
SEEN: list[int] = []
counter = 0


def agrees(fn: Any, program: torchstone.Program, *inputs: torch.Tensor) -> bool:
    with torch.no_grad():
        expected, found = pytree.tree_leaves(fn(*inputs)), pytree.tree_leaves(program(*inputs))
    return all(
        torch.allclose(a, b, atol=1e-6) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(expected, found, strict=True)
    )


def refusal(fn: Any, *inputs: torch.Tensor, **options: Any) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        torchstone.trace(fn, *inputs, **options)
    return caught.value


def marked(fn: Any) -> int:
    """The line that ends in ``# HERE``."""
    lines, first = inspect.getsourcelines(fn)
    (position,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# HERE")]
    return first + position


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        scores = torch.einsum("bshd,bthd->bhst", q, k) * (width // self.heads) ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return x + torch.einsum("bhst,bthd->bshd", weights, v).reshape(batch * length, width).view_as(x)


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.stem(x)
        pooled = h.sum((2, 3)) / 4
        return {"logits": self.head(pooled), "flat": h.flatten(2), "rows": h.reshape(h.shape[0], -1)}


MODELS: list[
    tuple[Callable[[], nn.Module], tuple[int, ...], tuple[dict[int, str], ...], list[tuple[int, ...]]]
] = [
    (Attention, (2, 7, 16), BS, [(1, 1, 16), (3, 2, 16), (5, 33, 16)]),
    (Convnet, (2, 3, 17, 21), ({0: "B", 2: "H", 3: "W"},), [(1, 3, 9, 9), (4, 3, 40, 11)]),
    (lambda: nn.LSTM(8, 6, batch_first=True), (2, 7, 8), BS, [(1, 1, 8), (3, 20, 8)]),
    (lambda: nn.GRU(8, 6, num_layers=2), (7, 2, 8), ({0: "S", 1: "B"},), [(1, 1, 8), (20, 3, 8)]),
    (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        (2, 7, 16),
        BS,
        [(1, 1, 16), (4, 30, 16)],
    ),
]


@pytest.mark.parametrize(("make", "shape", "dims", "others"), MODELS)
def test_one_graph_stands_for_all_sizes(make: Any, shape: Any, dims: Any, others: Any) -> None:
    model = make().eval()
    program = torchstone.trace(model, torch.randn(shape), dims=dims)
    for other in (shape, *others):
        assert agrees(model, program, torch.randn(other)), other
    assert not any(
        n.target._schema.is_mutable for n in program.module.graph.nodes if hasattr(n.target, "_schema")
    )


@pytest.mark.parametrize(("make", "shape", "dims", "others"), MODELS[:2])
def test_export_of_the_graph_proves_it_and_keeps_names(
    make: Any, shape: Any, dims: Any, others: Any
) -> None:
    model = make().eval()
    exported = torchstone.trace(model, torch.randn(shape), dims=dims).exported()
    assert set(exported.state_dict) <= set(model.state_dict())
    for other in others:
        x = torch.randn(other)
        with torch.no_grad():
            torch.testing.assert_close(exported.module()(x), model(x))
    assert any(__file__ in (n.meta.get("stack_trace") or "") for n in exported.graph.nodes)
    known = [n.meta["nn_module_stack"] for n in exported.graph.nodes if "stack_trace" in n.meta]
    paths = {path for stack in known for path, _ in stack.values()} - {_NO_MODULE}
    assert len(paths) > 1
    assert paths <= {name for name, _ in model.named_modules()}


def test_named_dims_tie_inputs_and_take_multiples() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.view(b.shape[0], -1) * b.unsqueeze(1)

    program = torchstone.trace(fn, torch.randn(20), torch.randn(4), dims=({0: "5*b"}, {0: "b"}))
    assert agrees(fn, program, torch.randn(35), torch.randn(7))
    with pytest.raises(EnvelopeError, match="size 8 in axis 0"):
        program(torch.randn(35), torch.randn(8))


def test_a_call_outside_of_what_was_traced_is_an_error_that_says_so() -> None:
    program = torchstone.trace(
        lambda x: x + 1, torch.randn(3, 4), dims=({0: "B"},), ranges={"B": (1, 8)}
    )
    with pytest.raises(EnvelopeError, match=r"size 9 in axis 0.*\n.*B in 1\.\.8"):
        program(torch.randn(9, 4))
    with pytest.raises(EnvelopeError, match="float64"):
        program(torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(EnvelopeError, match="takes 1 inputs"):
        program()


def test_without_ranges_what_python_asked_becomes_a_guard() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x

    program = torchstone.trace(fn, torch.randn(8), dims=({0: "N"},))
    assert [guard.text for guard in program.guards] == ["N > 4"]
    assert program.guards[0].site is not None
    assert program.guards[0].site.line == inspect.getsourcelines(fn)[1] + 1
    with pytest.raises(EnvelopeError, match="N > 4"):
        program(torch.randn(3))


def test_with_ranges_a_question_with_one_answer_is_no_obstacle() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] <= 64
        return x.view(max(x.shape[0], 1), -1)

    program = torchstone.trace(fn, torch.randn(8, 3), dims=({0: "N"},), ranges={"N": (1, 64)})
    assert program.guards == ()
    refused = refusal(fn, torch.randn(8, 3), dims=({0: "N"},), ranges={"N": (1, 65)})
    assert "N <= 64" in str(refused)
    assert "N = 65" in str(refused)


def test_an_expression_is_not_taken_for_a_constant() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[: x.shape[0] // 16 * 16].view(x.shape[0] // 16, 16)

    program = torchstone.trace(fn, torch.randn(37), dims=({0: "N"},), ranges={"N": (32, 200)})
    assert agrees(fn, program, torch.randn(160))
    # 2 at all of these sizes: a constant
    narrow = torchstone.trace(fn, torch.randn(37), dims=({0: "N"},), ranges={"N": (32, 47)})
    assert agrees(fn, narrow, torch.randn(46))


def test_what_cannot_be_told_from_a_constant_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[x.shape[0] % 2 :] + (x.shape[0] // 100)

    refused = refusal(fn, torch.randn(37), dims=({0: "N"},), ranges={"N": (30, 130)})
    assert "cannot be told from a constant" in str(refused)


def test_a_nested_result_keeps_its_structure_and_plain_data() -> None:
    @dataclass
    class Config:
        name: str = "x"

    config = Config()

    def fn(x: torch.Tensor) -> Any:
        return {"a": (x + 1, None, 3), "b": [x.sum(), config.name]}

    program = torchstone.trace(fn, torch.randn(3), dims=({0: "N"},))
    found = program(torch.zeros(5))
    assert found["a"][1:] == (None, 3)
    assert found["b"][1] == "x"
    assert found["a"][0].shape == (5,)


def test_the_digest_is_of_graph_and_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    first = torchstone.trace(model, torch.randn(2, 3), dims=({0: "B"},)).digest
    assert torchstone.trace(model, torch.randn(5, 3), dims=({0: "B"},)).digest == first
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert torchstone.trace(model, torch.randn(2, 3), dims=({0: "B"},)).digest != first


def test_weights_stay_what_they_were_and_nothing_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torchstone.trace(model, torch.full((2, 4), float("nan")), dims=({0: "B"},))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_traces_in_threads_do_not_disturb_each_other_and_leave_torch_as_it_was() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from torch._subclasses.fake_tensor import FakeTensor

    def traced(width: int) -> str:
        x = torch.randn(2, 5, width)
        return str(torchstone.trace(lambda v: v.reshape(v.shape[0], -1).sum(), x, dims=BS).module.graph)

    widths = [3, 4, 6, 8] * 3
    alone = [traced(width) for width in widths]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(traced, widths)) == alone
    assert "shape" not in FakeTensor.__dict__


# --- what is refused ---------------------------------------------------------------------------------


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 16:  # HERE
            return x.relu()
        return x


class Loops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[:, 0]
        for i in range(1, x.shape[1]):
            total = total + x[:, i].tanh()  # HERE
        return total


class OnValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # HERE
            return x.relu()
        return x


class Items(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.max())  # HERE


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]  # HERE


class ReadsTensor(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + OFFSET  # HERE


class ReadsList(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + len(SEEN)  # HERE


class ReadsCounter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + counter  # HERE


class WritesGlobal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global counter  # noqa: PLW0603  it is what is refused
        counter = 1  # HERE
        return x + 1


class Counts(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # HERE
        return x + 1


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(x)  # HERE
        return x + 1


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("shape", x.shape)  # HERE
        return x + 1


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + random.random()  # HERE


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)  # HERE


class Trains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)  # HERE


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)  # HERE


class WritesInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)  # HERE


class WritesView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0].zero_()  # HERE
        return y


class Floats(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[1] ** -0.5  # HERE


class Builds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] + torch.tensor([float(i) for i in range(x.shape[1])])  # HERE


class Returns(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, int(x.shape[1])


REFUSED: list[tuple[type[nn.Module], str, bool]] = [
    (Branches, "S > 16", True),
    (Loops, "a branch or a loop depends on a size", True),
    (OnValues, "needs the value of a tensor", True),
    (Items, "needs the value of a tensor", True),
    (Nonzero, "depends on values", True),
    (ReadsTensor, "global OFFSET, a tensor", False),
    (ReadsList, "global SEEN, a list", True),
    (ReadsCounter, "global counter, which a function rebinds", True),
    (WritesGlobal, "writes to the global counter", True),
    (Counts, "changes its own attribute calls", True),
    (Keeps, "changes its own attribute log", True),
    (Prints, "prints", True),
    (Draws, "random numbers from Python", True),
    (Noise, "draws random numbers", True),
    (Trains, "writes to norm.num_batches_tracked", True),
    (Drops, "draws random numbers", True),
    (WritesInput, "writes to x", True),
    (WritesView, "memory that another tensor shows", True),
    (Floats, "float is computed from a size", True),
    (Builds, "made from Python values", True),
    (Returns, "number that depends on sizes", True),
]


@pytest.mark.parametrize(("kind", "reason", "dynamic"), REFUSED)
def test_what_no_graph_can_hold_is_refused_with_its_line(
    kind: type[nn.Module], reason: str, dynamic: bool
) -> None:
    model = kind()
    before = {name: str(value) for name, value in vars(model).items()}
    refused = refusal(
        model,
        torch.randn(4, 12 if dynamic else 3)[:, : 3 if kind is Trains else None],
        dims=BS if dynamic and kind is not Trains else ({0: "B"},),
        ranges={"S": (1, 64)} if dynamic and kind is not Trains else None,
    )
    assert reason in str(refused)
    if kind is not Returns:
        assert (refused.where, refused.line) == (__file__, marked(kind))
    assert {
        name: str(value) for name, value in vars(model).items()
    } == before  # and nothing is left behind


def test_what_only_looks_like_state_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    class Honest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widths = [2, 3]
            self.table = torch.arange(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * SCALE
            h += self.table
            return h.relu_().clamp_(max=float(self.widths[1])) + torch.tensor([1.0, 2.0, 3.0])

    model = Honest().eval()
    program = torchstone.trace(model, torch.randn(4, 3), dims=({0: "B"},))
    assert agrees(model, program, torch.randn(9, 3))
    assert capsys.readouterr().out == ""


def test_misuse_says_what_and_what_to_do() -> None:
    assert "is no tensor" in str(refusal(lambda x, n: x * n, torch.ones(2), 3))  # type: ignore[arg-type]
    assert "names axis 5" in str(refusal(lambda x: x, torch.ones(2), dims=({5: "B"},)))
    assert "is not B" in str(refusal(lambda x: x, torch.ones(2, 3), dims=({0: "B", 1: "B"},)))
    unknown = refusal(lambda x: x, torch.ones(2), dims=({0: "B"},), ranges={"C": (1, 2)})
    assert "no axis has" in str(unknown)
    outside = refusal(lambda x: x, torch.ones(9), dims=({0: "B"},), ranges={"B": (1, 8)})
    assert "outside 1..8" in str(outside)


def test_a_shape_error_of_the_model_is_its_refusal() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0], 5)  # HERE

    refused = refusal(Broken(), torch.randn(4, 6), dims=({0: "B"},))
    assert refused.line == marked(Broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["Bert", "DistilBert", "GPT2", "Llama", "T5Encoder", "ViT", "ConvNext", "Swin"]
)
def test_models_of_the_transformers_library(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "Bert": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        },
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
        "Llama": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "use_cache": False,
        },
        "T5Encoder": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        "ViT": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
        "ConvNext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
        "Swin": {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    }[kind]
    config = kind.removesuffix("Encoder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        settings_ = getattr(transformers, f"{config}Config")(**small)
        model = getattr(transformers, f"{kind}Model")(settings_).eval()
        if "use_cache" in small:  # a cache among the results is no tensor
            inner = model
            model = lambda ids: inner(ids)[0]  # noqa: E731
        if "image_size" in small or kind == "ConvNext":
            x, other = torch.randn(2, 3, 32, 32), torch.randn(5, 3, 32, 32)
            program = torchstone.trace(model, x, dims=({0: "B"},))
        else:
            x, other = torch.randint(0, 90, (2, 9)), torch.randint(0, 90, (5, 31))
            program = torchstone.trace(model, x, dims=BS)
        assert agrees(model, program, x)
        assert agrees(model, program, other)


# --- sizes -------------------------------------------------------------------------------------------

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=2, max_size=3),
    others=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5), st.booleans()
        ),
        max_size=6,
    ),
)
def test_a_size_computes_as_an_int_and_its_expression_holds_elsewhere(
    sizes: list[int], others: list[int], steps: list[Any]
) -> None:
    ledger = Ledger(lambda: None)
    known: list[int] = [ledger.size(n, Axis(i, 0)) for i, n in enumerate(sizes)]
    plain = list(sizes)
    elsewhere = others[: len(sizes)]
    for sign, i, j, constant in steps:
        a, b = i % len(known), j % len(known)
        right = (j + 1, j + 1, j + 1) if constant else (known[b], plain[b], elsewhere[b])
        if sign in "//%" and 0 in (right[1], right[2]):
            continue
        operate = OPERATIONS[sign]
        known.append(operate(known[a], right[0]))
        plain.append(operate(plain[a], right[1]))
        elsewhere.append(operate(elsewhere[a], right[2]))
    assert [int(size) for size in known] == plain
    there = {Axis(i, 0): n for i, n in enumerate(others)}
    assert [evaluate(expression_of(size), there) for size in known] == elsewhere
    assert all(isinstance(size, Size) for size in known)


@given(a=st.integers(0, 9), b=st.integers(0, 9))
def test_every_comparison_is_written_down_with_its_outcome(a: int, b: int) -> None:
    ledger = Ledger(lambda: None)
    size = ledger.size(a, Axis(0, 0))
    outcomes = [size == b, size != b, size < b, size <= b, size > b, size >= b, bool(size)]
    assert outcomes == [a == b, a != b, a < b, a <= b, a > b, a >= b, a != 0]
    there = {Axis(0, 0): a}
    assert all(q.answer(there) is q.outcome for q in ledger.questions)
    assert {a: 1}[size] == 1
