"""What engines that speak NumPy arrays have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torchstone.backends.base import Context
from torchstone.records import Unsupported

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from torchstone.capture.program import Interface

__all__ = ["fed", "program", "tensors", "unsupported"]

_DTYPES = frozenset(
    ("float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
)


def program(context: Context, engine: str) -> tuple[ExportedProgram, Interface] | Unsupported:
    """The captured program with computed outputs only, and the interface of the whole of it."""
    from torchstone.capture import export
    from torchstone.capture import program as programs

    if context.program is None:
        return Unsupported(text=f"{engine} needs one whole graph, and export refused the model")
    captured = programs.load(context.program)
    interface = programs.interface(captured)
    why = unsupported(interface, engine)
    if why is not None:
        return why
    if not interface.constants:
        return captured, interface
    if context.workload is None:
        return Unsupported(text=f"{engine} is built from a workload, not from a bundle")
    computed = export.computed_only(context.workload, captured)
    if isinstance(computed, export.Refused):
        return Unsupported(text=f"its computed outputs alone cannot be exported: {computed.reason}")
    return computed, interface


def fed(
    names: Sequence[str], outputs: int, interface: Interface, engine: str
) -> tuple[int, ...] | Unsupported:
    """Which positional input each input of the engine's model is.

    :param names: the model's inputs; converters may rename them, or leave out those that are not used.
    :param outputs: number of the model's outputs, which must be all that the program computes.
    """
    computed = interface.outputs - len(interface.constants)
    if outputs != computed:
        return Unsupported(text=f"{engine} makes {outputs} outputs of the program's {computed}")
    if len(names) == len(interface.inputs):
        return tuple(range(len(names)))
    if set(names) <= set(interface.inputs):
        return tuple(interface.inputs.index(name) for name in names)
    return Unsupported(text=f"{engine} makes inputs {', '.join(names)} of {', '.join(interface.inputs)}")


def unsupported(interface: Interface, engine: str) -> Unsupported | None:
    """Why a program cannot be said in the engine's format."""
    foreign = [d for d in interface.dtypes if d not in _DTYPES]
    if foreign:
        return Unsupported(text=f"{engine} takes no {', '.join(foreign)} inputs or outputs here")
    if interface.mutates:
        names = ", ".join(interface.inputs[i] for i in interface.mutates)
        return Unsupported(text=f"the model changes its input {names} in place, which {engine} cannot")
    if interface.state:
        text = f"the model changes its own state ({', '.join(interface.state)}), which {engine} cannot"
        return Unsupported(text=text)
    if interface.symbolic:
        return Unsupported(text=f"{engine} returns tensors only, and the model returns a size")
    return None


def tensors(arrays: Iterable[Any]) -> list[Any]:
    """Arrays as tensors in the same memory, which each array owns."""
    import numpy as np
    import torch

    # a 0-d result may come as a NumPy scalar
    return [torch.from_numpy(np.asarray(a)) if np.ndim(a) else torch.tensor(a) for a in arrays]
