from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils import _pytree as pytree

from bundle_samples import MLP, Mlp, bundle, contents, exported, inputs, seeded, spec_of, tensor
from torchstone import bundle as bundles
from torchstone.bundle import manifest as manifests
from torchstone.bundle import weights
from torchstone.errors import BundleError


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(seeded(Mlp), MLP, tmp_path_factory.mktemp("program") / "program.pt2")


def mlp(path: Path, **changes: Any) -> bundles.Contents:
    given = contents(seeded(Mlp), MLP, path)
    return msgspec.structs.replace(given, **changes)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_an_empty_folder_may_be_there_and_parents_need_not(program: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b" / "new"):
        assert bundles.write(mlp(program), path) == path
        assert bundles.load(path).name == "mlp"
        assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize("kind", ["folder", "file", "bundle", "dangling"])
def test_nothing_is_overwritten(program: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "place"
    if kind == "folder":
        path.mkdir()
        (path / "mine").write_text("keep")
    elif kind == "file":
        path.write_text("keep")
    elif kind == "bundle":
        bundles.write(mlp(program), path)
    else:
        path.symlink_to(tmp_path / "nowhere")
    before = left(path) if path.is_dir() else None
    with pytest.raises(BundleError, match="something is there already") as caught:
        bundles.write(mlp(program), path)
    assert caught.value.hint
    assert left(tmp_path) == ["place"]
    assert before == (left(path) if path.is_dir() else None)


def test_evidence_and_code_are_taken_as_they_are(program: Path, tmp_path: Path) -> None:
    (tmp_path / "code" / "deep" / "empty").mkdir(parents=True)
    (tmp_path / "code" / "deep" / "model.xml").write_bytes(b"\0\1")
    (tmp_path / "report.html").write_text("<p>")
    given = mlp(
        program, recipe="openvino", artifact=tmp_path / "code", evidence=(tmp_path / "report.html",)
    )
    path = bundles.write(given, tmp_path / "bundle")
    assert (path / "code/deep/model.xml").read_bytes() == b"\0\1"
    assert (path / "evidence/report.html").read_text() == "<p>"
    manifest = manifests.read(path)
    assert manifest.engine.keys() == {"openvino"}
    assert manifest.requires == ("openvino", "safetensors", "torch")
    assert manifest.envelope.isa == ()  # it picks its kernels where it runs


def test_weights_that_the_code_holds_are_not_stored_again(program: Path, tmp_path: Path) -> None:
    state = {n: t.detach().clone() for n, t in torch.export.load(program).state_dict.items()}
    state["layers.2.bias"] += 1  # not the program's: that one has to be stored
    (tmp_path / "code").mkdir()
    save_file({n: state[n] for n in state if n != "layers.0.bias"}, tmp_path / "code/own.safetensors")
    path = bundles.write(
        mlp(program, recipe="aotinductor", artifact=tmp_path / "code"), tmp_path / "bundle"
    )
    assert load_file(path / "weights/model.safetensors").keys() == {"layers.0.bias", "layers.2.bias"}
    whole = weights.attach(path / "fallback/program.pt2", path / "weights/model.safetensors")
    x = inputs(MLP, {"B": 3})
    assert torch.equal(whole.module()(*x), seeded(Mlp)(*x))


def broken(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a").touch()
    (tmp_path / "a").touch()
    return {
        "no program": ({"program": tmp_path / "none"}, "exported program is missing"),
        "no artifact": ({"recipe": "aotinductor"}, "has no artifact"),
        "artifact gone": ({"recipe": "openvino", "artifact": tmp_path / "none"}, "folder is missing"),
        "own code": ({"recipe": "custom(fast)"}, "user's own Python code"),
        "converted": ({"recipe": "eager + precision(bf16)"}, "user's own Python code"),
        "own module": ({"recipe": "inductor(module)"}, "user's own Python code"),
        "nothing judged": ({"cases": ()}, "no case was judged"),
        "no evidence": ({"evidence": (tmp_path / "none",)}, "evidence is missing"),
        "same names": ({"evidence": (tmp_path / "a", tmp_path / "one" / "a")}, "named a"),
        "other inputs": (
            {"spec": spec_of("two", (*MLP.inputs, tensor("y", 1)), MLP.dims)},
            "takes 1 inputs",
        ),
        "other dtype": (
            {"spec": spec_of("x", (tensor("x", "B", 6, dtype="float64"),), MLP.dims)},
            "'x' as .*float32",
        ),
        "foreign output": (
            {"output_spec": '[1, {"type": "nowhere.Out", "context": "[]", "children_spec": []}]'},
            "returns a nowhere.Out",
        ),
    }


CANNOT_SHIP = (
    *(
        "no program",
        "no artifact",
        "artifact gone",
        "own code",
        "own module",
        "converted",
        "nothing judged",
    ),
    *("no evidence", "same names", "other inputs", "other dtype", "foreign output"),
)


@pytest.mark.parametrize("name", CANNOT_SHIP)
def test_what_cannot_ship_leaves_nothing(program: Path, tmp_path: Path, name: str) -> None:
    changes, says = broken(tmp_path)[name]
    (tmp_path / "shelf").mkdir()
    with pytest.raises(BundleError, match=says):
        bundles.write(mlp(program, **changes), tmp_path / "shelf" / "bundle")
    assert left(tmp_path / "shelf") == []


class Counts(nn.Module):
    """Answers depend on earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.add_(1)
        return x * self.seen


def test_a_model_with_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="the model changes seen as it runs"):
        bundle(seeded(Counts), MLP, tmp_path)


class Ordered(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return OrderedDict(b=[x, (x + 1, None)], a={"k": 3})


def test_structure_of_outputs(tmp_path: Path) -> None:
    loaded = bundles.load(bundle(seeded(Ordered), MLP, tmp_path))
    (x,) = inputs(MLP, {"B": 2})
    got, wanted = loaded(x), seeded(Ordered)(x)
    assert pytree.tree_structure(got) == pytree.tree_structure(wanted)
    assert list(got) == ["b", "a"]
    assert torch.equal(got["b"][1][0], x + 1)
    assert got["b"][1][1] is None
    assert got["a"]["k"] == 3


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=x * 2)


def test_an_output_class_of_a_package_is_imported_where_it_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers.modeling_outputs")
    path = bundle(seeded(Named), MLP, tmp_path)
    assert "transformers" in manifests.read(path).requires
    code = (
        "import sys, torch, torchstone.bundle as b\n"
        "y = b.load(sys.argv[1])(torch.ones(2, 6))\n"
        "assert type(y).__name__ == 'BaseModelOutput' and bool((y.last_hidden_state == 2).all())\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=200)


WRITER = """
import sys, pickle
from pathlib import Path
from torchstone.bundle import write
contents = pickle.loads(Path(sys.argv[1]).read_bytes())
import torch
print("ready", flush=True)
write(contents, Path(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["draft", "evidence", "program", "sealed", 0.05, 0.3])
def test_killed_while_it_writes(program: Path, tmp_path: Path, moment: str | float) -> None:
    """kill -9 at a stage of the writing (seen by what has appeared), or after so many seconds."""
    (tmp_path / "big").write_bytes(os.urandom(1 << 25))
    given = mlp(program, evidence=(tmp_path / "big",))
    (tmp_path / "contents").write_bytes(pickle.dumps(given))
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    arguments = [sys.executable, "-c", WRITER, str(tmp_path / "contents"), str(shelf / "bundle")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        seen = {"draft": "", "evidence": "evidence/big", "program": "fallback/program.pt2"}
        sign = seen.get(str(moment), "MANIFEST.sha256")
        if isinstance(moment, float):
            time.sleep(moment)
        else:
            while writer.poll() is None and not list(shelf.glob(f".bundle.*.partial/{sign}")):
                time.sleep(0.0005)
        writer.send_signal(signal.SIGKILL)
    if (shelf / "bundle").exists():  # it was quicker: then it is all there
        assert bundles.load(shelf / "bundle").name == "mlp"
    else:
        assert all(name.startswith(".bundle.") for name in left(shelf))
        assert bundles.load(bundles.write(given, shelf / "bundle")).name == "mlp"
