"""Inductor ahead of time: a shared library in a package, with the weights beside it.

The package is loaded by torch's C++ loader in milliseconds. Weights lie in ``weights.safetensors`` and
are used where they are loaded, unless freezing has folded them into the library. A package checks
nothing: shapes and dtypes are the envelope's matter, strides those of ``base.engine_call``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchstone import recipe
from torchstone.backends import compiler
from torchstone.backends.base import (
    Built,
    Context,
    engine_call,
    read_interface,
    refuse,
    write_interface,
)
from torchstone.records import Absent, Unsupported

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

__all__ = ["AOTInductorBackend"]

_PACKAGE = "model.pt2"
_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class AOTInductorBackend:
    """AOTInductor packages."""

    name: str = "aotinductor"
    engine: type[recipe.Engine] = recipe.AOTInductor

    def probe(self) -> Absent | None:
        """Needs a C++ compiler and Python's headers to build."""
        return compiler.absent(self.name)

    def build(self, context: Context) -> Built | Unsupported:
        """Compile the program, or that of the converted module, and write package and weights."""
        from torchstone import compat, quantize
        from torchstone.capture import program as programs

        if context.program is None:
            return Unsupported(text="AOTInductor compiles one whole graph, and export refused the model")
        program = quantize.program(context.program, context.recipe.numeric, context.workload)
        if isinstance(program, Unsupported):
            return program
        interface = programs.interface(program)
        if interface.symbolic:
            return Unsupported(text="AOTInductor returns tensors only, and the model returns a size")
        program = _computed_only(program, context)
        if isinstance(program, Unsupported):
            return program
        scratch = context.directory / "build"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            with compat.cache_in(scratch):
                files = _package(program, context)
        except compat.compile_errors() as error:
            return refuse(error, "AOTInductor refuses the program")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        files = (*files, write_interface(context.directory, interface))
        return _load(context.directory, files, compiler.notes(context.recipe))

    def load(self, context: Context) -> Built | Unsupported:
        """Load the package; needs neither compiler nor program."""
        files = tuple(n for n in (_PACKAGE, _WEIGHTS) if (context.directory / n).exists())
        return _load(context.directory, files, ())


def _computed_only(program: ExportedProgram, context: Context) -> ExportedProgram | Unsupported:
    """A package would return the numbers among the outputs as tensors."""
    from torchstone.capture import export

    if context.workload is None:
        return Unsupported(text="a package is built from a workload, not from a bundle")
    computed = export.computed_only(context.workload, program)
    if isinstance(computed, export.Refused):
        return Unsupported(text=f"its computed outputs alone cannot be exported: {computed.reason}")
    return computed


def _package(program: ExportedProgram, context: Context) -> tuple[str, ...]:
    """Write the package, and the weights where they can lie outside of it; gives the files' names."""
    from torchstone import compat
    from torchstone.capture import program as programs

    path = context.directory / _PACKAGE
    options = compiler.options(context.recipe)
    (context.directory / _WEIGHTS).unlink(missing_ok=True)
    weights = programs.constants(program)
    if options.get("freezing") or not _can_lie_outside(weights):
        compat.package(program, path, options)
        return (_PACKAGE,)
    compat.package(program, path, {**options, "aot_inductor.package_constants_in_so": False})
    wanted = compat.load_package(path).get_constant_fqns()
    if not set(wanted) <= set(weights):  # constants that compilation made
        compat.package(program, path, options)
        return (_PACKAGE,)
    _save(context.directory / _WEIGHTS, {name: weights[name] for name in wanted})
    return (_PACKAGE, _WEIGHTS)


def _can_lie_outside(weights: Mapping[str, torch.Tensor]) -> bool:
    """Plain contiguous tensors only: the library reads a constant with the strides that it had."""
    import torch

    return all(
        type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_contiguous() for t in weights.values()
    )


def _save(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write tensors once each; a tied one is named in the metadata."""
    from safetensors.torch import save_file

    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) if tensor.numel() else (name,)
        owner = first.setdefault(key, name)
        if owner != name:
            tied[name] = owner
    # cloned: safetensors refuses parts of one storage
    plain = {n: t.detach().clone() for n, t in weights.items() if n not in tied}
    save_file(plain, path, metadata=tied or None)


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # not a dict
        tied = file.metadata() or {}
    return weights | {name: weights[owner] for name, owner in tied.items() if owner in weights}


def _load(directory: Path, files: tuple[str, ...], notes: tuple[str, ...]) -> Built:
    from torchstone import compat

    loader = compat.load_package(directory / _PACKAGE)
    weights: dict[str, torch.Tensor] = {}
    if _WEIGHTS in files:
        weights = _read(directory / _WEIGHTS)
        # before anything runs: a package without its constants dereferences null
        loader.load_constants(weights, False, True, True)

    def run(given: list[torch.Tensor], alive: object = weights) -> list[torch.Tensor]:
        return loader.boxed_run(given)

    return Built(call=engine_call(run, read_interface(directory)), files=files, notes=notes)
