"""What every engine has in common: its protocol, what it builds from, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from torchstone.recipe import Engine, Recipe
from torchstone.records import Absent, Unsupported

if TYPE_CHECKING:
    from torch import nn

    from torchstone.capture.program import Interface
    from torchstone.workload import Workload

__all__ = [
    "Backend",
    "Built",
    "Call",
    "Context",
    "engine_call",
    "module_call",
    "read_interface",
    "refuse",
    "write_interface",
]

Call = Callable[..., tuple[Any, ...]]
"""Positional inputs to the flat tuple of outputs, in the order of pytree's leaves."""

_INTERFACE = "interface.json"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a candidate is built or loaded from."""

    workload: Workload | None
    """The workload; None where a bundle is loaded, which has artifacts and a program only."""
    recipe: Recipe
    """The recipe."""
    program: Path | None
    """The exported program; None where export refused."""
    directory: Path
    """Folder of the engine's files."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A callable candidate."""

    call: Call
    """Runs it, without gradients. Takes inputs of any strides; what it returns is the caller's own."""
    files: tuple[str, ...] = ()
    """Files that it wrote and cannot be loaded without, relative to the context's directory."""
    notes: tuple[str, ...] = ()
    """What is worth knowing."""
    module: nn.Module | None = None
    """The user's module, where the candidate runs it, so that changes to its state are seen."""
    graphs: int | Callable[[], int] | None = None
    """Graphs compiled; a function of no arguments where more may follow as inputs come."""


class Backend(Protocol):
    """An engine. Files of other engines know nothing of it."""

    @property
    def name(self) -> str:
        """The engine step's name."""

    @property
    def engine(self) -> type[Engine]:
        """The engine step's type."""

    def probe(self) -> Absent | None:
        """Why it cannot be used here, said without importing it."""

    def build(self, context: Context) -> Built | Unsupported:
        """Make the candidate and write its files.

        :returns: ``Unsupported`` where the engine says that it cannot do this model. What else it
            raises is a crash, and the worker's to report.
        """

    def load(self, context: Context) -> Built | Unsupported:
        """Have the candidate again from the files that :meth:`build` wrote."""


def refuse(error: BaseException, doing: str) -> Unsupported:
    """A refusal that an engine raised, in one line."""
    lines = (" ".join(line.split()) for line in str(error).splitlines())
    text = next((line for line in lines if line), "")
    return Unsupported(text=f"{doing}: {type(error).__name__}: {text}"[:500].rstrip(": "))


def module_call(function: Callable[..., Any]) -> Call:
    """Call a module, or what stands for one: any strides in, flat and unaliased out."""
    import torch
    from torch.utils._pytree import tree_leaves

    @torch.no_grad()
    def call(*args: Any) -> tuple[Any, ...]:
        return _owned(tree_leaves(function(*args)), args)

    return call


def engine_call(run: Callable[[list[Any]], Sequence[Any]], interface: Interface) -> Call:
    """Call an engine that assumes contiguous tensors and returns only what it computes.

    An input in other strides is copied, and copied back where the program changes it in place: compiled
    code reads elements where the capture's strides say, and is silently wrong otherwise.
    """
    import torch

    constants = dict(interface.constants)
    mutates = interface.mutates

    @torch.no_grad()
    def call(*args: Any) -> tuple[Any, ...]:
        given = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        changed = [(args[i], given[i]) for i in mutates if given[i] is not args[i]]
        outputs = _owned(run(given), args)
        for original, copy in changed:
            original.copy_(copy)
        return _placed(outputs, constants) if constants else outputs

    return call


def _placed(outputs: tuple[Any, ...], constants: dict[int, Any]) -> tuple[Any, ...]:
    computed = iter(outputs)
    count = len(outputs) + len(constants)
    return tuple(constants[i] if i in constants else next(computed) for i in range(count))


def _owned(outputs: Sequence[Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs, cloned where they lie in an input's memory: the caller may overwrite that."""
    storages = {_storage(value) for value in inputs} - {0}
    return tuple(o.clone() if _storage(o) in storages else o for o in outputs)


def _storage(value: Any) -> int:
    """Address of a tensor's memory; 0 for what has none."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


def write_interface(directory: Path, interface: Interface) -> str:
    """Keep the interface beside an engine's files; gives the file's name."""
    (directory / _INTERFACE).write_bytes(msgspec.json.encode(interface))
    return _INTERFACE


def read_interface(directory: Path) -> Interface:
    """What :func:`write_interface` kept."""
    from torchstone.capture.program import Interface

    return msgspec.json.decode((directory / _INTERFACE).read_bytes(), type=Interface)
