"""Engines: one file each, and the literal tuple of them. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from torchstone.backends.aotinductor import AOTInductorBackend
from torchstone.backends.base import Backend, Built, Call, Context
from torchstone.backends.custom import CustomBackend
from torchstone.backends.eager import EagerBackend
from torchstone.backends.inductor import InductorBackend
from torchstone.backends.onnxruntime import OnnxRuntimeBackend
from torchstone.backends.openvino import OpenVINOBackend
from torchstone.errors import BundleError
from torchstone.quantize import probe as probe_numeric
from torchstone.recipe import Recipe
from torchstone.records import Absent

__all__ = ["BACKENDS", "Backend", "Built", "Call", "Context", "load_artifact", "of", "probe"]

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
    return backend.probe() or (probe_numeric(recipe.numeric, backend.name) if recipe.numeric else None)


def load_artifact(recipe: Recipe, directory: Path, program: Path | None) -> Call:
    """A callable from an engine's files alone, without the workload: how a bundle has its code again.

    :param directory: folder of the files that :meth:`Backend.build` wrote.
    :param program: the exported program, for engines that compile it where it is loaded.
    :raises BundleError: where the engine refuses them.
    """
    built = of(recipe).load(Context(workload=None, recipe=recipe, program=program, directory=directory))
    if not isinstance(built, Built):
        raise BundleError(f"{recipe} cannot be loaded: {built.text}", where=directory, hint=built.hint)
    return built.call
