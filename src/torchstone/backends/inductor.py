"""``torch.compile``'s compiler in the process that serves.

The captured program is compiled as it is, with the symbolic sizes of the capture: one graph for the
whole declared range. ``module`` is plain ``torch.compile(model)`` as users write it. Where there is no
program, the module's regions are compiled, with ``dynamic=True`` and nested graph breaks.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchstone import recipe
from torchstone.backends import compiler
from torchstone.backends.base import Built, Context, engine_call, module_call, refuse
from torchstone.records import Absent, Unsupported

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["InductorBackend"]

_CACHE = "cache"
_PROGRAM = "program.pt2"


@dataclass(frozen=True)
class InductorBackend:
    """Inductor, just in time. Its cache is the artifact, so that loading finds what was compiled."""

    name: str = "inductor"
    engine: type[recipe.Engine] = recipe.Inductor

    def probe(self) -> Absent | None:
        """Needs a C++ compiler and Python's headers."""
        return compiler.absent(self.name)

    def build(self, context: Context) -> Built | Unsupported:
        """Compile with an empty cache, and keep the cache."""
        from torchstone import compat, quantize
        from torchstone.capture import program as programs

        shutil.rmtree(context.directory / _CACHE, ignore_errors=True)
        if _is_of_module(context):
            return _module(context)
        assert context.program is not None
        program = quantize.program(context.program, context.recipe.numeric, context.workload)
        if isinstance(program, Unsupported):  # the converted module cannot be one graph
            return _module(context)
        if context.recipe.numeric is not None:
            programs.save(program, context.directory / _PROGRAM)  # a bundle has no module to convert
        with compat.cache_in(context.directory / _CACHE):
            return _program(context, program)

    def load(self, context: Context) -> Built | Unsupported:
        """Compile again, from a private copy of the cache: the artifact stays as it was built."""
        from torchstone import compat
        from torchstone.capture import program as programs

        converted = context.directory / _PROGRAM
        source = context.program if context.recipe.numeric is None else converted
        if _is_of_module(context) or source is None or not source.exists():
            return _module(context)
        with tempfile.TemporaryDirectory(prefix="torchstone-") as private:
            shutil.copytree(context.directory / _CACHE, private, dirs_exist_ok=True)
            with compat.cache_in(Path(private)):
                return _program(context, programs.load(source))


def _is_of_module(context: Context) -> bool:
    step = context.recipe.engine
    assert isinstance(step, recipe.Inductor)
    return step.module or context.program is None


def _program(context: Context, program: ExportedProgram) -> Built | Unsupported:
    from torchstone import compat
    from torchstone.capture.program import interface

    known = interface(program)
    try:
        compiled = compat.compile_program(program, compiler.options(context.recipe))
    except compat.compile_errors() as error:
        return refuse(error, "Inductor refuses the program")
    return Built(
        call=engine_call(lambda given: compiled(*given), known),
        files=_files(context.directory),
        notes=compiler.notes(context.recipe),
        graphs=1,
    )


def _module(context: Context) -> Built | Unsupported:
    """``torch.compile`` of the module itself, which compiles as inputs come."""
    import torch

    from torchstone import compat, quantize
    from torchstone.compat import dynamo

    step, numeric = context.recipe.engine, context.recipe.numeric
    assert isinstance(step, recipe.Inductor)
    if context.workload is None:
        return Unsupported(text=f"{context.recipe} compiles the user's module, which no bundle carries")
    if quantize.needs_program(numeric):
        return Unsupported(text=f"{numeric} needs an exported program")
    module = context.workload.module()
    if numeric is not None:
        module = quantize.transform(module, numeric, context.workload.example())
    if step.nested and not dynamo.has_nested_breaks():
        return Unsupported(text="this torch has no nested graph breaks")
    compat.keep_compiling_in(context.directory / _CACHE, freezing=step.freezing)
    # a model that is not one graph: a break deep inside would cut every function on the way to it
    dynamo.use_nested_breaks(step.nested or not step.module)
    options = compiler.options(context.recipe) or None
    compiled = torch.compile(module, dynamic=None if step.module else True, options=options)
    before = compat.graphs_compiled()
    return Built(
        call=module_call(compiled),
        notes=compiler.notes(context.recipe),
        module=module,
        graphs=lambda: compat.graphs_compiled() - before,
    )


def _files(directory: Path) -> tuple[str, ...]:
    found = (p for p in directory.rglob("*") if p.is_file() and p.suffix != ".lock")
    return tuple(sorted(str(p.relative_to(directory)) for p in found))
