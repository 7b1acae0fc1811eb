"""The only module that knows how torch versions differ, and which private doors are used.

Supported: torch 2.11 to 2.15. Only imported where torch is. Everything else asks here for what has
moved, is private, or has a bug in some version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

__all__ = [
    "PackageLoader",
    "cache_in",
    "capture_errors",
    "compile_errors",
    "compile_program",
    "explain",
    "flat_module",
    "graphs_compiled",
    "keep_compiling_in",
    "load_package",
    "package",
    "recompile_limit",
    "size_range",
]


def capture_errors() -> tuple[type[Exception], ...]:
    """What torch raises when it cannot capture a model.

    Not ``Exception``: an interrupt, an exit, a lack of memory and an error in our own imports are no
    refusals. A function, since Dynamo takes seconds to import, which a bundle that only loads compiled
    code need not wait for.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._export.serde.serialize import SerializeError
    from torch._export.verifier import SpecViolationError
    from torch.fx.experimental import symbolic_shapes

    return (
        TorchDynamoException,  # Unsupported, UserError (constraints violated), internal errors
        symbolic_shapes.GuardOnDataDependentSymNode,  # a branch on a tensor's value
        symbolic_shapes.ConstraintViolationError,
        SpecViolationError,  # the traced graph is not a valid program
        SerializeError,  # torch.export.save of something that has no stored form
        # The tracer runs the user's code on fake tensors, where what is right in eager may fail so:
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        AssertionError,
        NotImplementedError,  # an operation without a fake kernel
    )


def compile_errors() -> tuple[type[Exception], ...]:
    """What Inductor raises when it refuses a graph."""
    from torch._dynamo.exc import TorchDynamoException  # before torch._inductor: pytorch#154463
    from torch._export.verifier import SpecViolationError
    from torch._inductor.exc import CppCompileError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        TorchDynamoException,  # InductorError and BackendCompilerFailed are of this family
        GuardOnDataDependentSymNode,
        CppCompileError,
        SpecViolationError,
    )


_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # the compiler has no other way to be told


class PackageLoader(Protocol):
    """The part of AOTInductor's C++ loader that is used."""

    def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run; the list of inputs is emptied."""

    def get_constant_fqns(self) -> list[str]:
        """Names of the constants that it wants."""

    def load_constants(
        self, constants: dict[str, torch.Tensor], inactive: bool, full: bool, user_managed: bool
    ) -> None:
        """Give it its constants; user-managed ones are used where they lie and must stay alive."""


def flat_module(program: ExportedProgram) -> torch.fx.GraphModule:
    """The program as a graph module: positional tensors in, flat tuple of computed outputs out.

    It has no guards. Outputs that are constants of the capture (``None``, numbers) are left out. The
    placeholders keep the fake tensors of the capture, whose symbolic sizes carry the ranges.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    output = module.graph.output_node()
    leaves = output.args[0]
    assert isinstance(leaves, tuple | list)
    output.args = (tuple(leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)),)
    module.recompile()
    return module


def compile_program(program: ExportedProgram, options: dict[str, Any]) -> Any:
    """Compile a program with Inductor into one callable for its whole range of shapes.

    Unlike ``torch.compile``, which guards on sizes 0 and 1 and makes up to 2**n graphs for n dims, this
    takes the symbolic shapes of the capture. The result checks nothing and assumes contiguous inputs.

    :returns: ``f(*tensors) -> sequence of computed outputs``.
    """
    import torch._dynamo  # before torch._inductor: pytorch#154463
    import torch._inductor

    module = flat_module(program)
    fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with torch.no_grad(), torch._inductor.config.patch(options):
        # patched rather than passed: freezing is also read outside of what sees passed options
        return torch._inductor.standalone_compile(module, fakes, dynamic_shapes="from_graph")


def package(program: ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    """Compile a program ahead of time into the package ``path`` (``.pt2``)."""
    import torch._dynamo  # before torch._inductor: pytorch#154463
    import torch._inductor

    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options
        )


def load_package(path: Path) -> PackageLoader:
    """Load an AOTInductor package: straight through the C++ loader, in milliseconds.

    ``torch._inductor.aoti_load_package`` wraps the same object, but imports the compiler first, which
    takes seconds, and parses the call spec on every call.
    """
    native: Any = torch._C._aoti.AOTIModelPackageLoader  # its stub lacks the methods that it has
    loader: PackageLoader = native(str(path), "model", False, 1, -1)
    return loader


@contextlib.contextmanager
def cache_in(directory: Path) -> Iterator[None]:
    """Keep what the compiler caches in ``directory``, so that another build does not warm this one."""
    directory.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(directory.resolve())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before


def keep_compiling_in(directory: Path, *, freezing: bool) -> None:
    """Set this process up for a ``torch.compile`` that compiles as inputs come: for a worker of its own.

    Dynamo reads ``freezing`` from the global configuration and not from the options it is given.
    """
    import torch._dynamo  # before torch._inductor: pytorch#154463
    import torch._inductor.config

    directory.mkdir(parents=True, exist_ok=True)
    os.environ[_CACHE_VARIABLE] = str(directory.resolve())
    torch._inductor.config.freezing = freezing


def graphs_compiled() -> int:
    """Graphs that Dynamo has compiled in this process so far."""
    import torch._dynamo

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def recompile_limit() -> int:
    """Graphs of one function after which ``torch.compile`` runs it eagerly."""
    import torch._dynamo

    return int(torch._dynamo.config.recompile_limit)


def explain(module: torch.nn.Module, args: Sequence[Any]) -> tuple[int, int, tuple[str, ...]]:
    """Capture regions with Dynamo: graphs, operations in them, and each break with its source line."""
    import torch._dynamo

    torch._dynamo.reset()
    found = torch._dynamo.explain(module)(*args)
    torch._dynamo.reset()
    breaks = tuple(_break_text(reason) for reason in found.break_reasons)
    return found.graph_count, found.op_count, breaks


def _break_text(reason: Any) -> str:
    why = " ".join(str(reason.reason).split("\n")[0].split())
    for frame in reversed(reason.user_stack):
        return f"{why} ({frame.filename}:{frame.lineno}: {(frame.line or frame.name).strip()})"
    return why


def size_range(program: ExportedProgram, size: int | torch.SymInt) -> tuple[int, int, str]:
    """The smallest and largest value of a captured size, and its expression (``16*s0``)."""
    from torch.utils._sympy.value_ranges import bound_sympy

    if isinstance(size, int):
        return size, size, str(size)
    expression = size.node.expr
    ranges = program.range_constraints
    # the root of a derived size (16*s0) is said to be at least 2 whatever was declared (pytorch#181097);
    # the derived size itself keeps its declared range
    bounds = ranges.get(expression) or bound_sympy(expression, ranges)
    return _integer(bounds.lower), _integer(bounds.upper), str(expression)


def _integer(bound: Any) -> int:
    return int(bound) if bound.is_finite else 2**62
