"""What one run of a model did: its operations, how they hang together, and every value on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from torchstone.compat import differ as doors
from torchstone.records import Origin, Site

__all__ = ["ALIAS", "BUDGET_BYTES", "Op", "Ref", "Trace", "Value", "mapped", "refs", "sample", "site"]

ALIAS = "torchstone.alias.default"
"""A value read again after an operation wrote to its memory: the old value and what was written."""

BUDGET_BYTES = 1 << 30
"""Values are kept whole until they take this much; of later ones a sample of their elements is kept."""

_SAMPLES = 4096


@dataclass(frozen=True)
class Ref:
    """An operand that is a tensor: the number of a value."""

    value: int


@dataclass
class Value:
    """One tensor as it was at one moment."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its torch dtype without prefix."""
    name: str = ""
    """``input[0]``, or a parameter's path, or ``constant``; empty for results."""
    tensor: torch.Tensor | None = None
    """All of it, if kept."""
    sample: torch.Tensor | None = None
    """Elements at fixed positions in its flat order, evenly spread, if only these are kept."""


@dataclass(frozen=True)
class Op:
    """One operation. Its results are what it returns, flat, then the arguments that it wrote to."""

    target: str
    """The operator's name: ``aten.sub.Tensor``."""
    args: tuple[Any, ...]
    """Positional arguments; tensors are :class:`Ref`, all else literals."""
    kwargs: dict[str, Any]
    """Named arguments."""
    outs: tuple[int | None, ...]
    """Numbers of the resulting values; None for results that are no tensors."""
    origin: Origin
    """Where it comes from."""

    @cached_property
    def reads(self) -> list[int]:
        """Values that it reads, in the order of its arguments."""
        leaves = _leaves((self.args, tuple(self.kwargs.values())))
        return [leaf.value for leaf in leaves if isinstance(leaf, Ref)]


@dataclass
class Trace:
    """The operations of one run in the order that they ran, and their values."""

    label: str
    """What was traced."""
    values: list[Value] = field(default_factory=list)
    """Every value; an operation's operands and results are positions in this list."""
    ops: list[Op] = field(default_factory=list)
    """The operations."""
    inputs: list[int] = field(default_factory=list)
    """Values of the tensor inputs, in order."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Values of parameters and buffers, by path."""
    outputs: list[tuple[str, int | None]] = field(default_factory=list)
    """The model's results by path, then inputs and buffers that it changed; None for no tensor."""
    widened: bool = False
    """Whether floats were widened to float64 first."""
    torch: str = str(torch.__version__)
    """Version of torch that ran it."""

    def maker(self) -> dict[int, int]:
        """For each value that an operation made, the operation's position."""
        return {out: i for i, op in enumerate(self.ops) for out in op.outs if out is not None}

    def live(self) -> list[int]:
        """Positions of the operations that the results depend on, in order."""
        wanted = {out for _, out in self.outputs if out is not None}
        kept = []
        for i in range(len(self.ops) - 1, -1, -1):
            if wanted.intersection(out for out in self.ops[i].outs if out is not None):
                wanted.update(refs(self.ops[i]))
                kept.append(i)
        return kept[::-1]


def refs(op: Op) -> list[int]:
    """Values that an operation reads, in the order of its arguments."""
    return op.reads


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with every leaf changed; lists, tuples and dicts keep their kind."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(mapped(item, change) for item in value)
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def sample(tensor: torch.Tensor, count: int = _SAMPLES) -> torch.Tensor:
    """At most ``count`` elements at fixed places, evenly spread over the flat order."""
    size = tensor.numel()
    if size <= count:
        return tensor.detach().clone().flatten()
    places = torch.div(torch.arange(count) * size, count, rounding_mode="floor")
    if tensor.is_contiguous():
        return tensor.detach().flatten()[places.to(tensor.device)]
    index = torch.unravel_index(places.to(tensor.device), tensor.shape)
    return tensor.detach()[index]


def site(op: Op, name: Callable[[int], str]) -> Site:
    """The operation for a report.

    :param name: what to call a value.
    """
    names = doors.argument_names(op.target)
    parts = [written(a, name) for a in op.args]
    # a literal alone says little: it goes by its argument's name where the schema knows it
    parts = [
        f"{names[i]}={part}" if i and i < len(names) and not _has_ref(op.args[i]) else part
        for i, part in enumerate(parts)
    ]
    parts += [f"{key}={written(item, name)}" for key, item in op.kwargs.items()]
    return Site(op=op.target, code=f"{op.target}({', '.join(parts)})", origin=op.origin)


def _has_ref(value: Any) -> bool:
    return any(isinstance(leaf, Ref) for leaf in _leaves(value))


def written(value: Any, name: Callable[[int], str]) -> str:
    """An argument as Python text."""
    if isinstance(value, Ref):
        return name(value.value)
    if isinstance(value, list | tuple):
        inner = ", ".join(written(item, name) for item in value)
        return (
            f"[{inner}]"
            if isinstance(value, list)
            else f"({inner},)"
            if len(value) == 1
            else f"({inner})"
        )
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float('{value}')"
    return (
        str(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format)
        else repr(value)
    )


def literals(op: Op) -> tuple[Any, ...]:
    """All of an operation's arguments that are no tensors, in order, tensors being marked."""
    return tuple("tensor" if isinstance(a, Ref) else a for a in _leaves((op.args, *_pairs(op.kwargs))))


def _pairs(kwargs: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    # where a result is put is no matter of numbers, and differs by how the operation was called
    return ((k, v) for k, v in sorted(kwargs.items()) if k not in ("device", "layout", "pin_memory"))
