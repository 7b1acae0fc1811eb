"""Write a bundle: all of it, or nothing at the place asked for."""

from __future__ import annotations

import os
import secrets
import shutil
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from torchstone import __version__
from torchstone import recipe as recipes
from torchstone.bundle import envelope as envelopes
from torchstone.bundle import manifest as manifests
from torchstone.bundle import weights
from torchstone.bundle.manifest import CODE, PROGRAM, WEIGHTS, Manifest
from torchstone.errors import BundleError
from torchstone.recipe import Recipe
from torchstone.records import Case, Environment, Record, TensorSpec, WorkloadSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["Contents", "compiles_program", "runs_program", "write"]


class Contents(Record, frozen=True, kw_only=True):
    """What goes into a bundle."""

    name: str
    """The workload's name."""
    recipe: str
    """Text form of what ships."""
    decision: Literal["PROMOTE", "KEEP_BASELINE", "HOLD"]
    """What the gate decided."""
    program: Path
    """The exported program's file, from :mod:`torchstone.capture`, which has seen to it that it holds
    for sizes 0 and 1 where these are declared."""
    artifact: Path | None
    """Folder of the engine's files; None where the engine has none (eager, Inductor)."""
    spec: WorkloadSpec
    """The workload."""
    cases: tuple[Case, ...]
    """The cases on which the recipe was judged right."""
    environment: Environment
    """Where it was built and judged."""
    evidence: tuple[Path, ...]
    """Files to ship as evidence, with names that differ."""
    output_spec: str | None
    """Serialized pytree of the model's outputs; None: as the exported program has it."""


def write(contents: Contents, path: Path) -> Path:
    """Write a bundle, and read it back before it appears at its place.

    :param contents: what goes in.
    :param path: the new folder; an empty one may be there.
    :return: the path.
    :raises BundleError: if something else is there, or these contents cannot be shipped; nothing is
        then left at the place. (A process killed here leaves a hidden ``.NAME.*.partial`` beside it.)
    """
    recipe = recipes.parse(contents.recipe)
    _check(contents, recipe, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        draft.mkdir()
        _copy(contents, draft)
        parameters, mutates = _write_program(contents, recipe, draft)
        manifest = _manifest(contents, recipe, manifests.inventory(draft))
        manifests.seal(draft, msgspec.structs.replace(manifest, parameters=parameters, mutates=mutates))
        _sync(draft)
        manifests.read(draft)
        try:
            draft.rename(path)
        except OSError as error:
            raise BundleError(f"cannot put the bundle here: {error.strerror}", where=path) from None
        _sync_one(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def runs_program(recipe: Recipe) -> bool:
    """Whether the exported program itself is what the recipe ships."""
    return recipe in (recipes.baseline(), recipes.fallback())


def _is_compiled(recipe: Recipe) -> bool:
    """Whether the engine's files are machine code, for all instruction sets that the machine had."""
    return isinstance(recipe.engine, recipes.AOTInductor | recipes.Inductor)


def compiles_program(recipe: Recipe) -> bool:
    """Whether the recipe's engine compiles the program where it is loaded, and so needs it whole."""
    return isinstance(recipe.engine, recipes.Inductor)


def _check(contents: Contents, recipe: Recipe, path: Path) -> None:
    if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise BundleError(
            "something is there already", where=path, hint="remove it, or choose a new name"
        )
    if not contents.program.is_file():
        raise BundleError("the exported program is missing", where=contents.program)
    engine = recipe.engine
    module = isinstance(engine, recipes.Inductor) and engine.module
    converted = isinstance(engine, recipes.Eager) and not (engine.program or runs_program(recipe))
    if isinstance(engine, recipes.Custom) or module or converted:
        raise BundleError(
            f"{recipe} runs the user's own Python code, which a bundle does not ship",
            hint="package a recipe that is built from the exported program",
        )
    if contents.artifact is None and not (runs_program(recipe) or compiles_program(recipe)):
        raise BundleError(f"{recipe} has no artifact to ship", hint="build it again, then package")
    if contents.artifact is not None and not contents.artifact.is_dir():
        raise BundleError("the artifact's folder is missing", where=contents.artifact)
    if not contents.cases:
        raise BundleError("no case was judged, so there is nothing that the bundle could answer for")
    names = [file.name for file in contents.evidence]
    for file in contents.evidence:
        if not file.is_file():
            raise BundleError("evidence is missing", where=file)
        if names.count(file.name) > 1:
            raise BundleError(f"two pieces of evidence are named {file.name}", where=file)


def _copy(contents: Contents, draft: Path) -> None:
    for folder in (PROGRAM, WEIGHTS):
        (draft / folder).parent.mkdir()
    if contents.artifact is not None:
        shutil.copytree(contents.artifact, draft / CODE)
        _prune(draft / CODE)
    if contents.evidence:
        (draft / "evidence").mkdir()
    for file in contents.evidence:
        shutil.copyfile(file, draft / "evidence" / file.name)


def _write_program(contents: Contents, recipe: Recipe, draft: Path) -> tuple[int, tuple[str, ...]]:
    """Write the program and its weights; give the number of parameters and the inputs it changes."""
    from torchstone.capture import program as programs

    program = programs.load(contents.program)
    _check_inputs(program, contents)
    interface = programs.interface(program)
    if interface.state:
        raise BundleError(
            f"the model changes {', '.join(interface.state)} as it runs, so that its answers depend on "
            "earlier calls; a bundle answers each call alone",
            hint="return the new value as an output, and pass it in with the next call",
        )
    parameters = sum(p.numel() for p in {p.data_ptr(): p for p in program.parameters()}.values())
    weights.neutral(program)
    if compiles_program(recipe):
        weights.save(program, draft / PROGRAM)
    else:
        weights.split(program, draft / PROGRAM, draft / WEIGHTS, draft / CODE)
    _prune(draft)
    return parameters, tuple(contents.spec.inputs[i].name for i in interface.mutates)


def _check_inputs(program: ExportedProgram, contents: Contents) -> None:
    """Refuse a program that was captured from another workload than the one declared."""
    import torch
    from torch.export.graph_signature import InputKind

    where, declared = contents.program, contents.spec.inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    names = [s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    if len(names) != len(declared):
        raise BundleError(f"the program takes {len(names)} inputs, not {len(declared)}", where=where)
    for spec, value in zip(declared, map(values.__getitem__, names), strict=True):
        traced: tuple[object, ...] = (type(value),)
        wanted: tuple[object, ...] = traced
        if isinstance(value, torch.Tensor):
            traced = (value.dtype, value.ndim)
        if isinstance(spec, TensorSpec):
            wanted = (getattr(torch, spec.dtype), len(spec.shape))
        if traced != wanted:
            raise BundleError(f"the program was captured with {spec.name!r} as {traced}", where=where)


def _manifest(contents: Contents, recipe: Recipe, files: dict[str, manifests.File]) -> Manifest:
    packages = contents.environment.packages
    engine = {p: packages.get(p) or metadata.version(p) for p in _engine_packages(recipe)}
    types = {
        part for name in manifests.output_types(contents.output_spec) for part in _distribution(name)
    }
    return Manifest(
        format=manifests.FORMAT,
        name=contents.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        recipe=contents.recipe,
        decision=contents.decision,
        torchstone=__version__,
        torch=metadata.version("torch"),
        engine=engine,
        requires=tuple(sorted({"torch", "safetensors", *engine, *types})),
        environment=contents.environment,
        envelope=envelopes.measure(
            contents.spec,
            contents.cases,
            isa=contents.environment.isa if _is_compiled(recipe) else (),
        ),
        inputs=contents.spec.inputs,
        outputs=contents.output_spec,
        files=files,
    )


def _engine_packages(recipe: Recipe) -> tuple[str, ...]:
    """Packages whose version the code is tied to."""
    if runs_program(recipe):
        return ()
    if isinstance(recipe.engine, recipes.OnnxRuntime):
        return ("onnxruntime",)
    if isinstance(recipe.engine, recipes.OpenVINO):
        return ("openvino",)
    if compiles_program(recipe) and isinstance(recipe.numeric, recipes.Quantize):
        return ("torch", "torchao")
    return ("torch",)


def _distribution(name: str) -> list[str]:
    """The package that has an output's type.

    :raises BundleError: if none has, so that no other machine could load it.
    """
    found = metadata.packages_distributions().get(name.partition(".")[0])
    if not found:
        raise BundleError(
            f"the model returns a {name}, which no installed package has",
            hint="return a tuple or a dict, so that the bundle loads where that class is absent",
        )
    return found[:1]


def _prune(folder: Path) -> None:
    """Remove empty folders: a manifest lists files only."""
    for directory, _, _ in os.walk(folder, topdown=False):
        if directory != str(folder) and not os.listdir(directory):
            os.rmdir(directory)


def _sync(folder: Path) -> None:
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync_one(Path(directory, name))
        _sync_one(Path(directory))


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
