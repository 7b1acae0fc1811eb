"""Engines: one file each, and the literal tuple of them. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torchstone import env
from torchstone.backends import gemm, rewriting
from torchstone.backends.aotinductor import AOTInductorBackend
from torchstone.backends.base import Backend, Built, Call, Context
from torchstone.backends.custom import CustomBackend
from torchstone.backends.eager import EagerBackend
from torchstone.backends.inductor import InductorBackend
from torchstone.backends.onnxruntime import OnnxRuntimeBackend
from torchstone.backends.openvino import OpenVINOBackend
from torchstone.errors import BundleError
from torchstone.quantize import probe as probe_numeric
from torchstone.recipe import Inductor, Recipe
from torchstone.records import Absent

__all__ = ["BACKENDS", "Backend", "Built", "Call", "Context", "load_artifact", "of", "probe", "recorded"]

BACKENDS: tuple[Backend, ...] = (
    EagerBackend(),
    InductorBackend(),
    AOTInductorBackend(),
    OnnxRuntimeBackend(),
    OpenVINOBackend(),
    CustomBackend(),
)
"""Every engine, in the order shown to users."""


def of(recipe: Recipe) -> Backend:
    """The engine that a recipe names."""
    return next(b for b in BACKENDS if isinstance(recipe.engine, b.engine))


def probe(recipe: Recipe) -> Absent | None:
    """Why a recipe cannot be built here: its engine, or what its number format needs, is absent."""
    backend = of(recipe)
    if recipe.graph is not None and not env.devices():
        return Absent(engine="cudagraph", why="CUDA graphs need a CUDA device, and there is none")
    found = backend.probe()
    if found is None and isinstance(recipe.engine, Inductor) and recipe.engine.gemm:
        found = gemm.absent(recipe.engine.gemm)
    if found is None and recipe.numeric is not None:
        found = probe_numeric(recipe.numeric, backend.name)
    return found


def load_artifact(recipe: Recipe, directory: Path, program: Path | None) -> Call:
    """A callable from an engine's files alone, without the workload: how a bundle has its code again.

    :param directory: folder of the files that :meth:`Backend.build` wrote.
    :param program: the exported program, for engines that compile it where it is loaded.
    :raises BundleError: where the engine refuses them.
    """
    context = Context(workload=None, recipe=recipe, program=program, directory=directory)
    built = of(recipe).load(rewriting.loaded(context))
    if not isinstance(built, Built):
        raise BundleError(f"{recipe} cannot be loaded: {built.text}", where=directory, hint=built.hint)
    return recorded(recipe, built).call


def recorded(recipe: Recipe, built: Built) -> Built:
    """What was built, with its launches recorded where the recipe says so."""
    if recipe.graph is None:
        return built
    from torchstone.cudagraph.static import Graphed

    return replace(built, call=Graphed(built.call))
