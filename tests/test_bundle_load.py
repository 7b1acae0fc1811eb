from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from bundle_samples import (
    ATTENTION,
    MLP,
    TIED,
    Attention,
    Mlp,
    Tied,
    bundle,
    compiled,
    contents,
    inputs,
    seeded,
    spec_of,
    tensor,
)
from torchstone import backends
from torchstone import bundle as bundles
from torchstone.bundle import manifest as manifests
from torchstone.errors import BundleError, EnvelopeError
from torchstone.records import Case, Dim, TensorSpec, WorkloadSpec


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled, and proven on contiguous inputs only."""
    return compiled(seeded(Attention), ATTENTION, tmp_path_factory.mktemp("attention"), "aotinductor")


@pytest.fixture(scope="module")
def attention_loaded(attention: Path) -> bundles.Loaded:
    return bundles.load(attention)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(seeded(Tied), TIED, tmp_path_factory.mktemp("tied"), "aotinductor")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(seeded(Mlp), MLP, tmp_path_factory.mktemp("baseline"))


@pytest.fixture
def remade(attention: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the attention bundle with some of its manifest's fields changed, sealed again."""

    def change(**fields: Any) -> Path:
        copy = shutil.copytree(attention, tmp_path / "remade")
        manifests.seal(copy, msgspec.structs.replace(manifests.read(copy), **fields))
        return copy

    return change


def assert_close(got: Any, wanted: Any) -> None:
    (leaves, tree), (others, other) = pytree.tree_flatten(got), pytree.tree_flatten(wanted)
    assert tree == other
    for x, y in zip(leaves, others, strict=True):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        else:
            assert x == y


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers, lying otherwise."""
    last = x.ndim - 1
    wide = torch.cat([x, x], dim=last)
    return {
        "strided": x.transpose(0, last).contiguous().transpose(0, last),
        "cut": wide[..., : x.shape[last]],
        "offset": torch.cat([x, x])[x.shape[0] :],
        "stepped": torch.stack([x, x], dim=-1)[..., 0],
    }


CLIENT = """
import importlib.util, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch
from torchstone.bundle import load
path, given, answers = sys.argv[1:]
loaded = load(path)
torch.save([loaded(*args) for args in torch.load(given)], answers)
assert loaded.stats.hits == len(torch.load(given)), loaded.stats
assert importlib.util.find_spec("bundle_samples") is None  # where the models are defined
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "spec"), [("attention", Attention, ATTENTION), ("tied", Tied, TIED)]
)
def test_a_fresh_process_without_the_users_code(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, make: type[nn.Module], spec: WorkloadSpec
) -> None:
    sizes = [{"B": 1, "S": 2}, {"B": 3, "S": 7}, {"B": 8, "S": 16}, {"B": 1, "S": 16}]
    calls = [inputs(spec, s, seed) for seed, s in enumerate(sizes)]
    torch.save(calls, tmp_path / "given")
    path = request.getfixturevalue(name)
    arguments = [
        sys.executable,
        "-c",
        CLIENT,
        str(path),
        str(tmp_path / "given"),
        str(tmp_path / "answers"),
    ]
    subprocess.run(arguments, check=True, cwd=tmp_path, timeout=300)
    for args, answer in zip(calls, torch.load(tmp_path / "answers"), strict=True):
        assert_close(answer, seeded(make)(*args))


@pytest.mark.slow
def test_inside_the_code_answers_and_the_program_is_not_even_loaded(attention: Path) -> None:
    loaded, model = bundles.load(attention), seeded(Attention)
    for sizes in ({"B": 1, "S": 2}, {"B": 5, "S": 9}, {"B": 8, "S": 16}):
        x, mask = inputs(ATTENTION, sizes)
        assert_close(loaded(x, mask), model(x, mask))
        assert_close(loaded(mask=mask, x=x), model(x, mask))
    assert loaded.stats == bundles.Stats(hits=6)
    assert loaded.reason is None
    assert loaded._program is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strided", "cut", "offset", "stepped"])
def test_other_layouts_go_to_the_program(attention: Path, kind: str) -> None:
    loaded, model = bundles.load(attention), seeded(Attention)
    x, mask = inputs(ATTENTION, {"B": 3, "S": 5})
    assert_close(loaded(views(x)[kind], mask), model(x, mask))
    assert_close(loaded(x, views(mask)[kind]), model(x, mask))
    assert loaded.stats == bundles.Stats(fallbacks={"layout": 2})


@pytest.mark.slow
def test_sizes_not_proven_go_to_the_program_as_far_as_it_holds(
    attention: Path, remade: Callable[..., Path]
) -> None:
    envelope = manifests.read(attention).envelope
    narrow = tuple(msgspec.structs.replace(d, low=3, high=4) for d in envelope.dims)
    loaded = bundles.load(remade(envelope=msgspec.structs.replace(envelope, dims=narrow)))
    model = seeded(Attention)
    for sizes in ({"B": 2, "S": 3}, {"B": 8, "S": 16}, {"B": 3, "S": 5}):
        args = inputs(ATTENTION, sizes)
        assert_close(loaded(*args), model(*args))
    assert loaded.stats == bundles.Stats(fallbacks={"size": 3})
    for sizes, says in (
        ({"B": 9, "S": 3}, "<= 8"),
        ({"B": 3, "S": 17}, "<= 16"),
        ({"B": 1, "S": 3}, "B = 1"),
    ):
        with pytest.raises(EnvelopeError, match=says):
            loaded(*inputs(ATTENTION, sizes))
    assert loaded.stats.refused == 3


@pytest.mark.slow
def test_calls_with_other_arguments(attention: Path) -> None:
    loaded = bundles.load(attention)
    x, mask = inputs(ATTENTION, {"B": 3, "S": 5})
    for args, kwargs, says in (
        ((x,), {}, "missing input: mask"),
        ((x, mask, mask), {}, "3 inputs were given"),
        ((x,), {"x": x}, "'x' was given twice"),
        ((x, mask), {"scale": 2}, "'scale' is not an input"),
        ((mask, x), {}, "'x': expected float32"),
    ):
        with pytest.raises(EnvelopeError, match=says):
            loaded(*args, **kwargs)
    assert "aotinductor(x, mask)" in repr(loaded)


@pytest.mark.slow
def test_gradients_and_autocast_of_the_caller_change_nothing(attention: Path) -> None:
    loaded, model = bundles.load(attention), seeded(Attention)
    x, mask = inputs(ATTENTION, {"B": 3, "S": 5})
    wanted = model(x, mask)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x.clone().requires_grad_(), views(x)["strided"].requires_grad_()):
            answer = loaded(given, mask)
            assert not answer.requires_grad
            assert_close(answer, wanted)
    assert loaded.stats == bundles.Stats(hits=1, fallbacks={"layout": 1})


@pytest.mark.slow
def test_threads(attention: Path) -> None:
    loaded, model = bundles.load(attention), seeded(Attention)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for i in range(40):
            x, mask = inputs(ATTENTION, {"B": 1 + (seed + i) % 8, "S": 2 + i % 15}, seed * 100 + i)
            given = views(x)["strided"] if i % 3 == 0 and x.shape[0] > 1 else x
            with torch.no_grad():
                wanted = model(x, mask)
            if not torch.allclose(loaded(given, mask), wanted, rtol=1e-4, atol=1e-5):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert loaded.stats.hits + sum(loaded.stats.fallbacks.values()) == 160


@st.composite
def shapes(draw: st.DrawFn, spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    """The declared shape, or one that is wrong in a size or in rank."""
    shape = [sizes[s] if isinstance(s, str) else s for s in spec.shape]
    change = draw(st.sampled_from([*["none"] * 9, "size", "more", "less"]))
    if change == "size":
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 20))
    elif change == "more":
        shape.insert(draw(st.integers(0, len(shape))), draw(st.integers(1, 2)))
    elif change == "less":
        shape.pop(draw(st.integers(0, len(shape) - 1)))
    return tuple(shape)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_right_or_refused_for_any_tensors(attention_loaded: bundles.Loaded, data: st.DataObject) -> None:
    loaded, model = attention_loaded, seeded(Attention)
    sizes = {"B": data.draw(st.integers(0, 10)), "S": data.draw(st.integers(0, 18))}
    args = []
    for spec in ATTENTION.inputs:
        assert isinstance(spec, TensorSpec)
        shape = data.draw(shapes(spec, sizes))
        dtype = data.draw(st.sampled_from([*[spec.dtype] * 12, "float64", "int64", "float16", "bool"]))
        value = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2).to(
            getattr(torch, dtype)
        )
        layout = data.draw(
            st.sampled_from(["as is", "as is", "strided", "cut", "offset", "stepped", "expand"])
        )
        if layout == "expand" and value.ndim:
            value = value[:1].expand(value.shape) if value.shape[0] else value
        elif layout != "as is" and value.ndim:
            value = views(value).get(layout, value)
        args.append(value)
    try:
        answer = loaded(*args)
    except EnvelopeError:
        return
    assert [str(a.dtype) for a in args] == ["torch.float32", "torch.bool"]
    assert_close(answer, model(*args))


class Row(nn.Module):
    """pytorch#141115: built for one row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x).relu()


@pytest.mark.slow
def test_a_static_package_never_gives_one_row_for_three(tmp_path: Path) -> None:
    spec = spec_of("row", (tensor("x", 1, 2),), ())
    loaded = bundles.load(compiled(seeded(Row), spec, tmp_path, "aotinductor"))
    x = torch.tensor([[1.0, 2.0]])
    assert_close(loaded(x), seeded(Row)(x))
    for bad, says in (
        (torch.ones(3, 2), "size 0 is fixed at 1"),
        (x.double(), "got float64"),
        (torch.ones(1, 2, 1), "rank 3"),
        (torch.ones(1, 3), "size 1 is fixed at 2"),
    ):
        with pytest.raises(EnvelopeError, match=says):
            loaded(bad)
    assert loaded.stats == bundles.Stats(hits=1, refused=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"engine": {"torch": "2.0.0"}}, "built with torch 2.0.0"),
        ({"engine": {"torchstone-engine-nobody-has": "1"}}, "not installed"),
        ({"isa": ("avx2", "vector_unit_of_2040")}, "may use vector_unit_of_2040"),
        ({"platform": "plan9-vax"}, "compiled for plan9-vax"),
    ],
)
def test_a_foreign_machine_is_served_by_the_program(
    attention: Path, remade: Callable[..., Path], fields: dict[str, Any], says: str
) -> None:
    manifest = manifests.read(attention)
    if "isa" in fields:
        fields = {"envelope": msgspec.structs.replace(manifest.envelope, **fields)}
    if "platform" in fields:
        fields = {"environment": msgspec.structs.replace(manifest.environment, **fields)}
    with pytest.warns(RuntimeWarning, match=says):
        loaded = bundles.load(remade(**fields))
    args = inputs(ATTENTION, {"B": 3, "S": 5})
    assert_close(loaded(*args), seeded(Attention)(*args))
    assert loaded.stats == bundles.Stats(fallbacks={"code unusable": 1})
    assert loaded.reason is not None


@pytest.mark.slow
def test_code_that_does_not_load_or_raises_is_replaced(
    attention: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = inputs(ATTENTION, {"B": 3, "S": 5})
    wanted = seeded(Attention)(*args)

    def broken(*_: object) -> Any:
        raise OSError("no such library")

    def failing(*_: object) -> Any:
        return broken

    def short(*_: object) -> Any:
        return lambda *_: ()

    monkeypatch.setattr(backends, "load_artifact", broken)
    with pytest.warns(RuntimeWarning, match="no such library"):
        loaded = bundles.load(attention)
    assert_close(loaded(*args), wanted)
    for engine, says in ((failing, "OSError: no such library"), (short, "gave 0 outputs, not 1")):
        monkeypatch.setattr(backends, "load_artifact", engine)
        loaded = bundles.load(attention)
        assert loaded.reason is None
        for _ in range(2):
            assert_close(loaded(*args), wanted)
        assert loaded.stats == bundles.Stats(fallbacks={"code raised": 2})
        assert loaded.reason is not None
        assert says in loaded.reason


@pytest.mark.slow
def test_the_program_is_checked_again_when_it_is_first_needed(attention: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(attention, tmp_path / "copy")
    loaded = bundles.load(copy)
    raw = bytearray((copy / "fallback/program.pt2").read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / "fallback/program.pt2").write_bytes(raw)
    x, mask = inputs(ATTENTION, {"B": 3, "S": 5})
    with pytest.raises(BundleError, match=r"program\.pt2 was changed"):
        loaded(views(x)["strided"], mask)


def test_baseline_is_the_program_itself(baseline: Path) -> None:
    loaded, model = bundles.load(baseline), seeded(Mlp)
    for b in (1, 2, 8):
        x = inputs(MLP, {"B": b})
        assert torch.equal(loaded(*x), model(*x))
    (x,) = inputs(MLP, {"B": 3})
    assert_close(loaded(views(x)["strided"]), model(x))
    assert loaded.stats == bundles.Stats(hits=3, fallbacks={"layout": 1})
    for bad in (*inputs(MLP, {"B": 9}), *inputs(MLP, {"B": 0}), torch.ones(2, 6, dtype=torch.float64)):
        with pytest.raises(EnvelopeError):
            loaded(bad)


class Reshaped(nn.Module):
    """Traced on contiguous inputs, reshape becomes a view, which other strides do not allow."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.reshape(-1) * 2


def test_the_program_gets_contiguous_inputs_where_it_needs_them(tmp_path: Path) -> None:
    loaded = bundles.load(bundle(seeded(Reshaped), MLP, tmp_path))
    (x,) = inputs(MLP, {"B": 3})
    assert torch.equal(loaded(views(x)["strided"]), x.reshape(-1) * 2)


class Odd(nn.Module):
    """A branch on a size, which export turns into a guard."""

    def forward(self, x: torch.Tensor) -> Any:
        return x * 2 if x.shape[0] % 2 else x * 3


def test_guards_of_the_program_are_kept(tmp_path: Path) -> None:
    """torch drops them without a word where a program has no example inputs."""
    dims = {0: torch.export.Dim.AUTO(min=2, max=8)}
    model = seeded(Odd)
    torch.export.save(
        torch.export.export(model, (torch.ones(3, 6),), dynamic_shapes=(dims,)), tmp_path / "p.pt2"
    )
    ends = tuple(Case(name=f"B{b}", kind="dims", sizes={"B": b}) for b in (3, 7))
    loaded = bundles.load(
        bundles.write(contents(model, MLP, tmp_path / "p.pt2", cases=ends), tmp_path / "bundle")
    )
    assert torch.equal(loaded(torch.ones(5, 6)), model(torch.ones(5, 6)))
    for size in (4, 8):  # between what was proven, and beyond
        with pytest.raises(EnvelopeError, match="% 2 != 0"):
            loaded(torch.ones(size, 6))


class Fives(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.reshape(-1, 5).sum(dim=1)


def test_a_proven_size_is_served_though_the_guards_of_a_derived_dim_forbid_it(tmp_path: Path) -> None:
    """pytorch#181097: with a dim of 5*b and b from 1, the program's guards refuse b = 1."""
    spec = spec_of("fives", (tensor("x", "N"),), (Dim(name="N", low=5, high=40, multiple=5),))
    base = torch.export.Dim("b", min=1, max=8)
    program = torch.export.export(seeded(Fives), (torch.ones(15),), dynamic_shapes=({0: 5 * base},))
    torch.export.save(program, tmp_path / "p.pt2")
    model = seeded(Fives)
    loaded = bundles.load(bundles.write(contents(model, spec, tmp_path / "p.pt2"), tmp_path / "bundle"))
    for size in (5, 10, 40):
        assert torch.equal(loaded(torch.arange(float(size))), model(torch.arange(float(size))))
    with pytest.raises(EnvelopeError):
        loaded(torch.ones(12))


class Writes(nn.Module):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.add_(1).sum(dim=1)


def test_inputs_are_changed_as_the_model_changes_them(tmp_path: Path) -> None:
    loaded = bundles.load(bundle(seeded(Writes), MLP, tmp_path))
    assert loaded.manifest.mutates == ("x",)
    for make in (lambda x: x, lambda x: views(x)["strided"], lambda x: views(x)["offset"]):
        (x,) = inputs(MLP, {"B": 3})
        given, own = make(x.clone()), x.clone()
        assert_close(loaded(given), seeded(Writes)(own))
        assert torch.equal(given, own)


def test_loading_starts_no_compiler(baseline: Path, tmp_path: Path) -> None:
    """Reading a bundle is free of what it does not need."""
    code = (
        "import sys, torchstone.bundle as b\n"
        "from pathlib import Path\n"
        "from torchstone.bundle import manifest\n"
        f"manifest.read(Path({str(baseline)!r}))\n"
        "assert 'torch' not in sys.modules\n"
        f"b.load({str(baseline)!r})\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120, env=dict(os.environ)
    )


@pytest.mark.slow
def test_an_engine_that_compiles_where_it_is_loaded_leaves_the_bundle_alone(tmp_path: Path) -> None:
    path = compiled(seeded(Mlp), MLP, tmp_path, "inductor")
    for _ in range(2):  # the second load would find any file that the first one left
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            loaded = bundles.load(path)
        x = inputs(MLP, {"B": 5})
        assert_close(loaded(*x), seeded(Mlp)(*x))
        assert loaded.stats == bundles.Stats(hits=1)
    assert "weights/model.safetensors" not in loaded.manifest.files
