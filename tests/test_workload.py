"""Workloads: the grammar of dims, the file door, the objects door, and the way to another process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchstone import workload
from torchstone.errors import EnvironmentLacksError, InputError, PolicyError, RecipeError, WorkloadError
from torchstone.policy import Policy
from torchstone.recipe import parse as parse_recipe
from torchstone.records import Arrival, Dim, ScalarSpec, TensorSpec
from torchstone.workload import Workload, from_objects, parse_dim

PYTHON = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, times):
        return self.linear(x) * times

def build():
    torch.manual_seed(0)
    return Scale().eval()

def example():
    return torch.ones(4, 3), 2

def labelled():
    for i in range(3):
        yield (torch.full((1, 3), float(i)), 1), float(i)

def closeness(outputs, targets):
    return -sum(abs(o.sum().item() - t) for o, t in zip(outputs, targets))

def shake(module):
    module.linear.bias.data += 1

def own(module):
    return lambda x, times: module(x, times)
"""
TOML = """\
[workload]
name = "scale"
model = "user:build"
inputs = "user:example"
holdout = "user:labelled"
metric = "user:closeness"
perturb = "user:shake"
traffic = "traffic.jsonl"
recipes = ["inductor", "custom(mine)"]

[dims]
B = "1..64"

[inputs.x]
shape = ["B", 3]
low = -1.0
high = 1.0

[candidates]
mine = "user:own"

[policy]
max_relative_error = 0.02
"""
TRAFFIC = '{"B": 4, "at": 0.0}\n{"B": 1, "times": 5, "at": 0.5}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(PYTHON)
    (tmp_path / "torchstone.toml").write_text(TOML)
    (tmp_path / "traffic.jsonl").write_text(TRAFFIC)
    return tmp_path


def edit(folder: Path, old: str, new: str, name: str = "torchstone.toml") -> Path:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    return folder


def refused(
    action: Callable[[], object], *parts: str, kind: type[InputError] = WorkloadError
) -> InputError:
    """The action's error, whose message has all the parts and a hint."""
    with pytest.raises(kind) as caught:
        action()
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def two(
    x: object = None,
    y: object = None,
    shapes: dict[str, tuple[int | str, ...]] | None = None,
    **more: object,
) -> Workload:
    dims = {"B": "1..8"} if shapes is None else {}
    inputs = (torch.ones(4, 3) if x is None else x, torch.ones(4, 3) if y is None else y)
    given_shapes = {"x": ("B", 3), "y": ("B", 3)} if shapes is None else shapes
    return from_objects(Sum(), inputs, **{"dims": dims, "shapes": given_shapes, **more})  # type: ignore[arg-type] # kwargs of many types


# --- dims -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        ("1..64", Dim(name="B", low=1, high=64)),
        (" 0 .. 3 ", Dim(name="B", low=0, high=3)),
        ("16*k", Dim(name="B", low=16, high=1024, multiple=16)),
        ("16*k, 32..512", Dim(name="B", low=32, high=512, multiple=16)),
        ("16*k, 20..100", Dim(name="B", low=32, high=96, multiple=16)),
        (7, Dim(name="B", low=7, high=7)),
        ("64", Dim(name="B", low=64, high=64)),
        (Dim(name="other", low=2, high=9, multiple=4), Dim(name="B", low=4, high=8, multiple=4)),
    ],
)
def test_dims_are_read(text: str | int | Dim, dim: Dim) -> None:
    assert parse_dim("B", text) == dim


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("8..4", "'4..8'"),
        ("-3..4", "negative"),
        ("-3", "negative"),
        (-3, "negative"),
        ("16*k, 17..31", "no multiple of 16"),
        ("0*k", "multiple must be 1"),
        ("1-64", "'1..64'"),
        ("", "'1..64'"),
        ("*k", "'1..64'"),
        (True, "'1..64'"),
        (1.5, "'1..64'"),
    ],
)
def test_bad_ranges_are_refused(text: str | int, part: str) -> None:
    refused(lambda: parse_dim("B", text), "B", part)


@pytest.mark.parametrize("name", ["2B", "batch size", "", "class", "at"])
def test_names_of_dims_are_identifiers(name: str) -> None:
    refused(lambda: parse_dim(name, "1..2"), repr(name), "identifier")


@given(st.integers(1, 50), st.integers(0, 500), st.integers(0, 500))
def test_the_ends_of_a_dim_are_the_outermost_multiples_in_its_range(m: int, low: int, high: int) -> None:
    inside = [n for n in range(low, high + 1) if n % m == 0]
    text = f"{m}*k, {low}..{high}"
    if not inside:
        refused(lambda: parse_dim("S", text), "empty")
        return
    dim = parse_dim("S", text)
    assert (dim.low, dim.high, dim.multiple) == (inside[0], inside[-1], m)


# --- the file door --------------------------------------------------------------------------------


def test_a_folder_is_read(folder: Path) -> None:
    read = workload.read(folder)
    assert read.dims == (Dim(name="B", low=1, high=64),)
    assert read.shapes == {"x": ("B", 3)}
    assert read.ranges == {"x": (-1.0, 1.0)}
    assert read.policy == Policy(max_relative_error=0.02)
    assert [str(r) for r in read.recipes] == ["inductor", "custom(mine)"]
    assert read.traffic == (
        Arrival(sizes={"B": 4}, at_s=0.0),
        Arrival(sizes={"B": 1}, scalars={"times": 5.0}, at_s=0.5),
    )
    assert Path(read.origin or "") == folder / "torchstone.toml"


def test_what_was_read_runs(folder: Path) -> None:
    read = workload.read(folder)
    module = read.module()
    x, times = read.example()
    assert module(x, times).shape == (4, 2)
    spec = read.spec()
    assert spec.inputs == (
        TensorSpec(name="x", dtype="float32", shape=("B", 3), low=-1.0, high=1.0),
        ScalarSpec(name="times", kind="int", low=2.0, high=5.0),
    )
    assert spec.example_sizes == {"B": 4}
    assert spec.metric == "closeness"
    assert spec.candidates == ("mine",)
    assert spec.perturbs
    pairs = list(read.labelled())
    outputs = [(module(*inputs),) for inputs, _ in pairs]
    expected = -sum(abs(o.sum().item() - t) for (o,), (_, t) in zip(outputs, pairs, strict=True))
    assert read.score(outputs, [t for _, t in pairs]) == pytest.approx(expected)
    bias = module.linear.bias.clone()
    read.disturb(module)
    assert torch.equal(module.linear.bias, bias + 1)
    assert torch.equal(read.implementation("mine", module)(x, times), module(x, times))


@pytest.mark.parametrize(
    ("old", "new", "line", "parts"),
    [
        ("metric =", "metrics =", 6, ["unknown key 'metrics' in [workload]", "did you mean 'metric'"]),
        ("[policy]", "[polcy]", 22, ["unknown section [polcy]", "'policy'"]),
        ("low = -1.0", "lo = -1.0", 16, ["unknown key 'lo' in [inputs.x]", "'low'"]),
        ("max_relative_error", "max_relativ_error", 23, ["max_relativ_error", "'max_relative_error'"]),
        ("= 0.02", "= -1", 23, ["policy.max_relative_error", ">= 0"]),
        ("= 0.02", '= "small"', 23, ["policy.max_relative_error", "Expected `float"]),
        ("= 0.02", "= 0.02\np99_s = 0.1\nslo_s = 0.2", 22, ["slo_s", "p99_s"]),
        ('name = "scale"', "name = 3", 2, ["workload.name", "Expected `str"]),
        ('model = "user:build"\n', "", 1, ["workload", "model"]),
        ('["B", 3]', '["B", 3.5]', 15, ["inputs.x.shape"]),
        ('["B", 3]', '["B", -3]', 15, ["-3"]),
        ('["B", 3]', '["Q", 3]', 15, ["'Q' is not declared", "[dims]"]),
        ('["B", 3]', "[4, 3]", 12, ["dim 'B' is in no input's shape"]),
        ('B = "1..64"', 'B = "64..1"', 12, ["'1..64'"]),
        ('B = "1..64"', 'B = "1 to 64"', 12, ["1 to 64", "'1..64'"]),
        ('B = "1..64"', '"B-1" = "1..64"', 12, ["identifier"]),
        ("high = 1.0", "high = -2.0", 16, ["low = -1 is above high = -2"]),
        ("high = 1.0\n", "", 16, ["low alone", "both low and high"]),
        ('"inductor"', '"inductr"', 9, ["inductr", "steps are"]),
        ("custom(mine)", "custom(mime)", 9, ["custom(mime)", "'mine'"]),
        ('metric = "user:closeness"\n', "", 5, ["holdout is given without metric"]),
        ("user:build", "user:bild", 3, ["no function 'bild'", "'build'"]),
        ("user:build", "usr:build", 3, ["no usr.py", "'user'"]),
        ("user:build", "user.py:build", 3, ["without .py", "'user:model'"]),
        ("user:build", "build", 3, ["file:function"]),
        ("user:own", "user:owned", 20, ["no function 'owned'", "'own'"]),
        ("traffic.jsonl", "requests.jsonl", 8, ["requests.jsonl does not exist"]),
        ('name = "scale"', "name = scale", 2, ["TOML syntax"]),
        ("[inputs.x]", "[inputs]\ny = 3\n[inputs.x]", 15, ["inputs.y is no table"]),
        ('[candidates]\nmine = "user:own"', "[candidates]\nmine = 3", 20, ["candidates.mine"]),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(folder: Path, old: str, new: str, line: int, parts: list[str]) -> None:
    edit(folder, old, new)
    error = refused(lambda: workload.read(folder), *parts, kind=InputError)
    assert (error.where, error.line) == (str(folder / "torchstone.toml"), line)


def test_errors_keep_their_kind(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    edit(folder, "= 0.02", "= -1")
    with pytest.raises(PolicyError):
        workload.read(folder)
    edit(folder, "= -1", "= 1")
    edit(folder, '"inductor"', '"inductr"')
    with pytest.raises(RecipeError):
        workload.read(folder)


def test_no_workload_is_said_so(folder: Path) -> None:
    refused(lambda: workload.read(folder / "absent"), "absent", "torchstone.toml")
    refused(lambda: workload.read(folder / "user.py"), "no TOML file")
    (folder / "torchstone.toml").unlink()
    refused(lambda: workload.read(folder), "no workload here")
    (folder / "torchstone.toml").write_bytes(b"\xff")
    refused(lambda: workload.read(folder), "UTF-8")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"B": 4', "no line of traffic"),
        ("", "no line of traffic"),
        ("[4]", "no line of traffic"),
        ('{"B": "four"}', "no line of traffic"),
        ('{"b": 4}', "did you mean"),
        ('{"at": 1}', "dim 'B' is missing"),
        ('{"B": 65, "at": 1}', "B = 65 is outside 1..64"),
        ('{"B": 0, "at": 1}', "B = 0 is outside 1..64"),
        ('{"B": 4.5, "at": 1}', "4.5 is no size"),
        ('{"B": true, "at": 1}', "True is no size"),
        ('{"B": 4, "at": -1}', "no time"),
        ('{"B": 4, "at": NaN}', "no line of traffic"),
        ('{"B": 4}', "others have none"),
    ],
)
def test_a_bad_line_of_traffic_is_named(folder: Path, line: str, part: str) -> None:
    (folder / "traffic.jsonl").write_text(TRAFFIC + line + "\n")
    error = refused(lambda: workload.read(folder), part)
    assert (error.where, error.line) == (str(folder / "traffic.jsonl"), 3)


def test_traffic_of_unknown_inputs_is_refused(folder: Path) -> None:
    (folder / "traffic.jsonl").write_text('{"B": 4, "timse": 1}\n')
    error = refused(workload.read(folder).spec, "line 1", "'timse'", "'times'")
    assert error.line == 8
    (folder / "traffic.jsonl").write_text("")
    refused(lambda: workload.read(folder), "empty")


def line_with(folder: Path, text: str) -> int:
    lines = (folder / "user.py").read_text().splitlines()
    return next(i for i, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize(
    ("old", "new", "at", "parts"),
    [
        ("def build():", "def build(:", "def build(:", ["SyntaxError", "syntax"]),
        ("import torch\n", "import torch\nimport torhc\n", "torhc", ["torhc", "pip install torhc"]),
        ("def build():", "1 / 0\ndef build():", "1 / 0", ["ZeroDivisionError"]),
        ("from torch import nn", "from torch import nm", "nm", ["ImportError", "nm"]),
    ],
)
def test_a_file_that_does_not_import_is_said_so(
    folder: Path, old: str, new: str, at: str, parts: list[str]
) -> None:
    edit(folder, old, new, "user.py")
    error = refused(lambda: workload.read(folder), *parts)
    assert (error.where, error.line) == (str(folder / "user.py"), line_with(folder, at))


@pytest.mark.parametrize(
    ("old", "new", "at", "parts"),
    [
        (
            "return Scale().eval()",
            "raise ValueError('no weights')",
            "no weights",
            ["ValueError: no weights"],
        ),
        ("return Scale().eval()", "return Scale(7)", "Scale(7)", ["TypeError"]),
        ("return Scale().eval()", "return Scale", "def build", ["a type", "torch.nn.Module"]),
        ("return Scale().eval()", "open('/absent/w.pt')", "w.pt", ["FileNotFoundError", "/absent/w.pt"]),
        ("def forward(self, x, times)", "def forward(self, x)", "def example", ["takes 1 inputs, 2"]),
        ("def forward(self, x, times)", "def forward(self, x, times, z)", "def example", ["needs 'z'"]),
    ],
)
def test_a_factory_that_fails_is_said_so(
    folder: Path, old: str, new: str, at: str, parts: list[str]
) -> None:
    edit(folder, old, new, "user.py")
    error = refused(workload.read(folder).module, *parts)
    assert (error.where, error.line) == (str(folder / "user.py"), line_with(folder, at))


@pytest.mark.parametrize(
    ("new", "at", "parts"),
    [
        ("raise OSError('gone')", "gone", ["OSError: gone"]),
        ("return torch.ones(4, 3), 'two'", "def example", ["'times'", "a str"]),
        ("return None, 2", "def example", ["'x'", "None"]),
        ("return [torch.ones(4, 3)]", "def example", ["a list"]),
        ("return ()", "def example", ["no inputs"]),
    ],
)
def test_inputs_that_fail_are_said_so(folder: Path, new: str, at: str, parts: list[str]) -> None:
    edit(folder, "return torch.ones(4, 3), 2", new, "user.py")
    error = refused(workload.read(folder).example, *parts)
    assert (error.where, error.line) == (str(folder / "user.py"), line_with(folder, at))


@pytest.mark.parametrize(
    ("new", "line", "parts"),
    [
        ("return torch.ones(4), 2", 15, ["has 2 dims, the example 1"]),
        ("return torch.ones(4, 5), 2", 15, ["shape says 3, the example has 5"]),
        ("return torch.ones(65, 3), 2", 12, ["B = 65 is outside 1..64"]),
        ("return 2 * torch.ones(4, 3), 2", 16, ["2 to 2", "outside -1 to 1"]),
    ],
)
def test_an_example_that_does_not_fit_is_said_so(
    folder: Path, new: str, line: int, parts: list[str]
) -> None:
    edit(folder, "return torch.ones(4, 3), 2", new, "user.py")
    error = refused(workload.read(folder).spec, *parts)
    assert (error.where, error.line) == (str(folder / "torchstone.toml"), line)


def test_siblings_import_and_own_errors_pass(folder: Path) -> None:
    (folder / "sibling_of_user.py").write_text("SEED = 3\n")
    lacks = "raise EnvironmentLacksError('no data', hint='pip install data')"
    edit(folder, "import torch\n", "import torch\nfrom sibling_of_user import SEED\n", "user.py")
    edit(
        folder,
        "torch.manual_seed(0)",
        f"from torchstone.errors import EnvironmentLacksError\n    {lacks}",
        "user.py",
    )
    with pytest.raises(EnvironmentLacksError) as caught:
        workload.read(folder).module()
    assert caught.value.exit_code == 3


def test_labelled_data_that_fails_is_said_so(folder: Path) -> None:
    edit(
        folder, "yield (torch.full((1, 3), float(i)), 1), float(i)", "yield torch.ones(1, 3)", "user.py"
    )
    refused(lambda: list(workload.read(folder).labelled()), "labelled()", "not a pair")
    edit(folder, "yield torch.ones(1, 3)", "yield ('a', 1), 2", "user.py")
    refused(lambda: list(workload.read(folder).labelled()), "'x'", "a str")
    edit(folder, "yield ('a', 1), 2", "raise KeyError(i)", "user.py")
    error = refused(lambda: list(workload.read(folder).labelled()), "KeyError")
    assert error.line == line_with(folder, "KeyError")
    refused(lambda: workload.read(folder).score([(torch.ones(1),)], ["?"]), "closeness()", "TypeError")


# --- the objects door -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ("text", ["a str", "tokenize"]),
        ([1.0, 2.0], ["a list", "torch.tensor"]),
        ((torch.ones(1),), ["a tuple", "input of its own"]),
        (np.ones(3), ["numpy.ndarray", "torch.from_numpy"]),
        (np.float64(3), ["numpy.float64", "item()"]),
        (object(), ["a object", "torch.Tensor"]),
        (float("nan"), ["nan", "finite"]),
        (torch.ones(2, 2).to_sparse(), ["sparse", "to_dense"]),
    ],
)
def test_an_input_of_a_wrong_type_is_named(bad: object, parts: list[str]) -> None:
    refused(two(y=bad, shapes={}).example, "'y'", *parts)


def test_shapes_dims_and_example_must_agree() -> None:
    refused(two(y=torch.ones(5, 3)).spec, "B = 5", "4 in 'x'")
    refused(two(torch.ones(9, 3), torch.ones(9, 3)).spec, "B = 9 is outside 1..8")
    refused(two(dims={"B": "3*k, 3..9"}).spec, "B = 4 is no multiple of 3")
    refused(lambda: two(dims={"B": "1..8", "S": "1..2"}), "dim 'S' is in no input's shape")
    refused(lambda: two(shapes={"x": ("S", 3)}), "dim 'S' is not declared")
    refused(two(shapes={"z": (4, 3)}).spec, "no input 'z'")
    refused(two(y=2, shapes={"y": (1,)}).spec, "'y' is a number")
    refused(two(ranges={"z": (0, 1)}).spec, "no input 'z'")
    refused(lambda: two(traffic=(Arrival(sizes={"B": 9}),)), "line 1", "outside 1..8")
    refused(lambda: two(traffic=(Arrival(sizes={"S": 1}),)), "line 1", "'S'")
    refused(lambda: two(recipes=(parse_recipe("custom(mine)"),)), "names no candidate")
    refused(lambda: two(candidates={"my own": lambda m: m}), "my own")
    refused(lambda: two(metrik=len), "metrik", "'metric'")
    refused(lambda: from_objects("resnet", ()), "a str")  # type: ignore[arg-type] # the misuse tested


def test_values_are_described() -> None:
    class Mixed(nn.Module):
        def forward(self, *many: object) -> object:
            return many

    inputs = (
        torch.tensor([3, 9]),
        torch.tensor([True]),
        torch.ones(2),
        True,
        2.5,
        torch.empty(0, dtype=torch.int32),
    )
    spec = from_objects(Mixed(), inputs).spec()
    assert spec.inputs == (
        TensorSpec(name="many_0", dtype="int64", shape=(2,), low=3.0, high=9.0),
        TensorSpec(name="many_1", dtype="bool", shape=(1,)),
        TensorSpec(name="many_2", dtype="float32", shape=(2,)),
        ScalarSpec(name="many_3", kind="bool", low=1.0, high=1.0),
        ScalarSpec(name="many_4", kind="float", low=2.5, high=2.5),
        TensorSpec(name="many_5", dtype="int32", shape=(0,)),
    )
    assert spec.traffic == (Arrival(sizes={}),)


def test_one_tensor_is_one_input() -> None:
    x = torch.ones(4, 3)
    made = from_objects(nn.Linear(3, 2), x, dims={"N": "1..9"}, shapes={"input": ("N", 3)})
    assert torch.equal(made.example()[0], x)
    assert made.example()[0] is not x  # a model may write to its input
    assert made.names == ("input",)
    assert made.name == "Linear"
    assert made.spec().example_sizes == {"N": 4}


class Keyworded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(
        self, first: torch.Tensor | None = None, *, x: torch.Tensor, z: torch.Tensor
    ) -> torch.Tensor:
        return (x * self.weight - z) if first is None else first


def keyworded(**more: object) -> Workload:
    inputs = {"z": torch.ones(4, 3), "x": torch.full((4, 3), 2.0)}
    dims, shapes = {"B": "1..8"}, {"x": ("B", 3), "z": ("B", 3)}
    return from_objects(Keyworded().eval(), inputs, dims=dims, shapes=shapes, **more)


def test_keyword_inputs_become_positional() -> None:
    def shake(module: nn.Module) -> None:
        assert isinstance(module, Keyworded)
        module.weight.data += 1

    made = keyworded(perturb=shake, candidates={"mine": lambda m: lambda *, x, z: x * m.weight - z})
    module = made.module()
    z, x = made.example()
    assert made.names == ("z", "x")
    assert [s.name for s in made.spec().inputs] == ["z", "x"]
    assert not module.training
    assert torch.equal(module(z, x), x * torch.arange(3.0) - z)
    assert torch.equal(made.implementation("mine", module)(z, x), module(z, x))
    made.disturb(module)
    assert torch.equal(module(z, x), x * (torch.arange(3.0) + 1) - z)
    assert made.arguments({"x": x, "z": z}, made.inputs) == (z, x)
    refused(lambda: made.arguments({"x": x}, made.inputs), "keywords x", "z, x")


def test_keyword_inputs_export_with_dims() -> None:
    made = keyworded()
    batch = torch.export.Dim("B", min=1, max=8)
    program = torch.export.export(made.module(), made.example(), dynamic_shapes=({0: batch}, {0: batch}))
    z, x = torch.rand(7, 3), torch.rand(7, 3)
    assert torch.equal(program.module()(z, x), made.module()(z, x))


def test_keywords_that_forward_does_not_take_are_refused() -> None:
    refused(from_objects(nn.Linear(3, 2), {"inptu": torch.ones(1, 3)}).module, "inptu", "input")


def test_generated_inputs_are_checked() -> None:
    def generate(sizes: dict[str, int], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.rand(sizes["B"], 3, generator=generator),) * 2

    made = two(generate=generate)
    first, again = (made.generated({"B": 5}, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first is not None
    assert again is not None
    assert torch.equal(first[0], again[0])
    assert two().generated({"B": 5}, torch.Generator()) is None
    bad = two(generate=lambda sizes, generator: (None, None))
    refused(lambda: bad.generated({"B": 5}, torch.Generator()), "'x'", "None")


def test_several_outputs_reach_the_metric_as_a_tuple() -> None:
    seen: list[object] = []

    def metric(outputs: list[object], targets: list[object]) -> float:
        seen.extend(outputs)
        return 1.0

    made = two(holdout=list, metric=metric)
    made.score([(1, 2), (3,)], [0, 0])
    assert seen == [(1, 2), 3]
    refused(lambda: two().score([], []), "no metric")


# --- digests and other processes ------------------------------------------------------------------


def test_the_digest_follows_what_matters(folder: Path) -> None:
    def digest() -> str:
        return workload.read(folder).spec().digest

    first = digest()
    edit(folder, "= 0.02", "= 0.03 # looser")
    edit(folder, '"inductor"', '"aotinductor"')
    assert digest() == first
    edit(folder, '"1..64"', '"1..65"')
    second = digest()
    edit(folder, "float(i)", "float(i + 1)", "user.py")
    third = digest()
    edit(folder, '"times": 5', '"times": 6', "traffic.jsonl")
    fourth = digest()
    assert len({first, second, third, fourth}) == 4


def test_the_digest_of_objects_follows_weights_settings_inputs_and_dims() -> None:
    class Odd(nn.Module):
        def __init__(self, scale: float, weight: float) -> None:
            super().__init__()
            self.scale = scale
            self.weight = nn.Parameter(torch.full((3,), weight))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.scale

    def digest(
        scale: float = 1.0, weight: float = 1.0, fill: float = 1.0, high: int = 8, train: bool = False
    ) -> str:
        module, x = Odd(scale, weight).train(train), torch.full((2, 3), fill)
        dims, shapes = {"B": f"1..{high}"}, {"x": ("B", 3)}
        return from_objects(module, x, dims=dims, shapes=shapes).spec().digest

    assert digest() == digest()
    changed = [
        digest(),
        digest(scale=2.0),
        digest(weight=2.0),
        digest(fill=2.0),
        digest(high=9),
        digest(train=True),
    ]
    assert len(set(changed)) == len(changed)


LOAD = """
import sys
from pathlib import Path
import torch
from torchstone import workload
loaded = workload.load(Path(sys.argv[1]))
out = loaded.module()(*loaded.example())
values = [round(v, 4) for v in out.flatten().tolist()[:3]]
print(loaded.name, loaded.spec().digest, values, loaded.policy.rounds)
"""


def in_process(code: str, *arguments: Path, cwd: Path) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(made: Workload) -> str:
    out = made.module()(*made.example()).flatten().tolist()
    rounded = [round(v, 4) for v in out][:3]
    return f"{made.name} {made.spec().digest} {rounded} {made.policy.rounds}\n"


@pytest.mark.slow
def test_a_local_class_reaches_another_process(tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return helper(self.linear(x))

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    made = from_objects(Local(), torch.rand(2, 3), policy=Policy(rounds=7))
    workload.dump(made, tmp_path / "w")
    assert in_process(LOAD, tmp_path / "w", cwd=tmp_path) == expected(made)


@pytest.mark.slow
def test_a_class_of_the_main_script_reaches_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside_script.py").write_text("def double(x):\n    return x * 2\n")
    script.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from torch import nn\n"
        "from beside_script import double\n"
        "from torchstone import workload\n"
        "class Main(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return double(x)\n"
        "if __name__ == '__main__':\n"
        "    made = workload.from_objects(Main, torch.ones(3), name='main')\n"
        "    workload.dump(made, Path(sys.argv[1]))\n"
        "    print(made.spec().digest)\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "w")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    digest = subprocess.check_output(command, text=True, timeout=120, cwd=elsewhere).strip()
    rounds = Policy().rounds
    expected = f"main {digest} [2.0, 2.0, 2.0] {rounds}\n"
    assert in_process(LOAD, tmp_path / "w", cwd=elsewhere) == expected


@pytest.mark.slow
def test_a_read_workload_reaches_another_process(folder: Path) -> None:
    made = replace(workload.read(folder), policy=Policy(rounds=9), recipes=())
    workload.dump(made, folder / "w")
    assert in_process(LOAD, folder / "w", cwd=Path("/")) == expected(made)
    again = workload.load(folder / "w")
    assert (again.policy, again.recipes, again.dims) == (made.policy, (), made.dims)


def test_a_changed_folder_is_not_loaded(folder: Path) -> None:
    workload.dump(workload.read(folder), folder / "w")
    edit(folder, "float(i)", "float(i + 1)", "user.py")
    refused(lambda: workload.load(folder / "w"), "has changed since", "restore")


def test_what_cannot_be_pickled_is_said_so(tmp_path: Path) -> None:
    module = Sum()
    module.lock = threading.Lock()  # type: ignore[assignment] # torch types attributes as tensors
    made = from_objects(module, (torch.ones(1), torch.ones(1)))
    refused(
        lambda: workload.dump(made, tmp_path / "w"), "cannot be sent to a worker", "function that makes"
    )


def test_importing_loads_no_torch(tmp_path: Path) -> None:
    code = "import sys, torchstone.workload; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert in_process(code, cwd=tmp_path) == "False False\n"


def test_a_size_may_be_a_multiple_of_a_dim() -> None:
    workload = from_objects(
        nn.Identity(), torch.zeros(15), dims={"b": "1..8"}, shapes={"input": ("5*b",)}
    )
    assert workload.spec().example_sizes == {"b": 3}
    with pytest.raises(WorkloadError, match=r"no multiple of 5"):
        from_objects(
            nn.Identity(), torch.zeros(14), dims={"b": "1..8"}, shapes={"input": ("5*b",)}
        ).spec()
    with pytest.raises(WorkloadError, match="is no size"):
        from_objects(nn.Identity(), torch.zeros(15), dims={"b": "1..8"}, shapes={"input": ("b*5",)})
