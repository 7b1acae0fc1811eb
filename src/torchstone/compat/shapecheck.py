"""Private doors for running a model on fake tensors, opened so that a check takes about a second.

``FakeTensorMode`` wants one module of ``torch._dynamo`` (its configuration) and ``ShapeEnv`` another
(its names of sources), but importing either runs the package's ``__init__``, which brings in the whole
compiler: 0.7 s of the 2 s that a check may take, for code that a check never runs.
:func:`without_compiler` puts that off until something of the package itself is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

__all__ = [
    "Symbols",
    "fake_mode",
    "fake_refusals",
    "without_compiler",
]

_COMPILER = "torch._dynamo"


class _Deferred(ModuleType):
    """A package whose ``__init__`` runs when a name is asked for that no submodule's import has set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def without_compiler() -> None:
    """Keep ``torch._dynamo`` from being loaded before it is needed; for a process that only checks."""
    if _COMPILER in sys.modules:
        return
    spec = importlib.util.find_spec(_COMPILER)
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Deferred
    # what torch marks "not to be compiled" is called as it is: nothing is compiled before __init__ runs
    package.disable = _as_it_is  # type: ignore[attr-defined]
    sys.modules[_COMPILER] = package
    vars(torch)["_dynamo"] = package
    from torch.fx.experimental import symbolic_shapes

    if hasattr(symbolic_shapes, "uninteresting_files"):
        # it names files for logs, and imports the compiler to do so
        symbolic_shapes.uninteresting_files = set  # type: ignore[assignment]


def _as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    return function if function is not None else _as_it_is


class Symbols:
    """Symbolic sizes for one run on fake tensors."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self._names: dict[str, str] = {}

    def size(self, name: str, hint: int) -> torch.SymInt:
        """A size called ``name`` that is ``hint`` where a branch asks for its value."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        symbol = self.env.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC)
        self._names[str(symbol)] = name
        made = self.env.create_symintnode(symbol, hint=hint)
        assert isinstance(made, torch.SymInt)
        return made

    @property
    def names(self) -> dict[str, str]:
        """torch's name of each symbol (``s77``) to the user's (``B``)."""
        return dict(self._names)

    def guards(self) -> tuple[str, ...]:
        """What branches and operations have asked of the sizes, in torch's names."""
        return tuple(str(guard.expr) for guard in self.env.guards)


def fake_mode(symbols: Symbols | None) -> FakeTensorMode:
    """A mode in which tensors have shapes but no values, and tensors made outside are let in.

    :param symbols: the sizes; None for concrete ones, where an operation whose output's shape depends on
        values is refused.
    """
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=None if symbols is None else symbols.env)


def fake_refusals() -> tuple[type[BaseException], ...]:
    """What is raised where the lack of values is at fault, and not the model."""
    refusals: Sequence[type[BaseException]] = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (*refusals, GuardOnDataDependentSymNode)
