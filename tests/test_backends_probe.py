"""What is absent is said, with the command that brings it, and without loading an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from torchstone import backends, env, quantize, recipe, run
from torchstone.backends import inductor

PROBE = """
import json, sys
for name in {blocked!r}:
    sys.modules[name] = None
from torchstone import backends, recipe
absent = backends.probe(recipe.parse({text!r}))
loaded = [n for n in ("torch", "onnxruntime", "openvino", "torchao") if sys.modules.get(n)]
print(json.dumps([None if absent is None else [absent.engine, absent.why, absent.hint], loaded]))
"""


def probe(text: str, *blocked: str, path: str | None = None) -> Any:
    code = PROBE.format(text=text, blocked=blocked)
    env = None if path is None else {"PATH": path, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    absent, loaded = json.loads(done.stdout)
    assert loaded == []
    return absent


@pytest.mark.parametrize(
    ("text", "package", "extra"),
    [
        ("onnxruntime", "onnxruntime", "onnx"),
        ("onnxruntime", "onnxscript", "onnx"),
        ("openvino", "openvino", "openvino"),
        ("inductor + quantize(int8_dynamic)", "torchao", "quant"),
        ("eager + quantize(int8_weight_only)", "torchao", "quant"),
    ],
)
def test_an_absent_package_is_named_with_its_command(text: str, package: str, extra: str) -> None:
    engine, why, hint = probe(text, package)
    assert engine == text.split(" ", maxsplit=1)[0]
    assert package in why
    assert hint == f"pip install 'torchstone[{extra}]'"


@pytest.mark.parametrize("text", ["inductor", "aotinductor(freezing)"])
def test_no_compiler_is_told(text: str) -> None:
    engine, why, _ = probe(text, path="/nonexistent")
    assert engine in text
    assert "C++ compiler" in why


@pytest.mark.parametrize("text", ["eager", "custom(mine)", "eager + precision(bf16)"])
def test_what_needs_nothing_is_there(text: str) -> None:
    assert probe(text, "onnxruntime", "openvino", "torchao", path="/nonexistent") is None


def test_every_engine_step_has_one_backend_and_names_it() -> None:
    assert [b.engine for b in backends.BACKENDS] == list(recipe.ENGINES)
    for backend in backends.BACKENDS:
        assert backend.name == str(backend.engine.__struct_config__.tag)


def test_a_recipe_finds_its_backend() -> None:
    for each in recipe.default_recipes():
        assert isinstance(each.engine, backends.of(each).engine)
    assert isinstance(backends.of(recipe.parse("inductor(module)")), inductor.InductorBackend)


@pytest.mark.parametrize(
    ("numeric", "isa", "lacks"),
    [
        ("precision(bf16)", ("avx2", "fma"), "bf16"),
        ("precision(bf16_autocast)", ("amx_bf16", "avx2"), None),
        ("precision(fp16)", ("avx512_bf16",), "fp16"),
        ("quantize(pt2e_static)", ("avx2",), "int8"),
        ("quantize(int8_dynamic)", ("avx2", "avx_vnni"), None),
        ("quantize(int8_dynamic)", (), None),
    ],
)
def test_what_a_processor_lacks_for_a_number_format(
    numeric: str, isa: tuple[str, ...], lacks: str | None
) -> None:
    found = quantize.lacking(recipe.parse(f"inductor + {numeric}").numeric, isa)
    assert (found is None) == (lacks is None)
    assert found is None or f"no {lacks} instructions" in found


def test_formats_that_the_processor_would_emulate_are_tried_last() -> None:
    here = env.environment()

    def order(isa: tuple[str, ...], devices: tuple[str, ...] = ()) -> list[recipe.Recipe]:
        return list(run.default_recipes(msgspec.structs.replace(here, isa=isa, devices=devices)))

    listed = list(recipe.default_recipes())
    plain = [r for r in listed if r.numeric is None]
    assert order(("avx2",)) == plain + [r for r in listed if r.numeric is not None]
    assert order(("avx512_bf16", "avx512_vnni")) == listed
    assert order(("avx2",), devices=("NVIDIA H200",)) == listed
