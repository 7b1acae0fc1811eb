"""Parameters and buffers of a module: how many, of which dtype, and which have several names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from torchstone.ops.calls import storage_of
from torchstone.records.inventory import DtypeCount, Weights

__all__ = ["Held", "by_path", "weights"]


class Held(NamedTuple):
    """Parameters that a module has itself and is the first to name."""

    elements: int
    """How many."""
    bytes: int
    """Theirs."""


def weights(module: nn.Module) -> Weights:
    """Count a module's parameters and buffers, each tensor once.

    A tensor is the same as another if it has the same memory, shape and strides, not only if it is the
    same Python object: weights tied through ``.data`` are tied.
    """
    parameters = _grouped(module.named_parameters(remove_duplicate=False))
    buffers = _grouped(module.named_buffers(remove_duplicate=False))
    own = [tensor for tensor, _ in parameters.values()]
    others = [tensor for key, (tensor, _) in buffers.items() if key not in parameters]
    return Weights(
        parameters=sum(map(_elements, own)),
        parameter_bytes=sum(map(_bytes, own)),
        buffers=sum(map(_elements, others)),
        buffer_bytes=sum(map(_bytes, others)),
        by_dtype=_by_dtype([*own, *others]),
        tied=tuple(tuple(names) for _, names in parameters.values() if len(names) > 1),
    )


def by_path(module: nn.Module) -> dict[str, Held]:
    """Parameters by the path of the module that has them, a tied one where it is named first."""
    found: dict[str, Held] = {}
    for tensor, names in _grouped(module.named_parameters(remove_duplicate=False)).values():
        path = names[0].rpartition(".")[0]
        before = found.get(path, Held(0, 0))
        found[path] = Held(before.elements + _elements(tensor), before.bytes + _bytes(tensor))
    return found


def _grouped(
    named: Iterable[tuple[str, torch.Tensor]],
) -> dict[Hashable, tuple[torch.Tensor, list[str]]]:
    """Tensors by what makes them one, each with its names in order."""
    found: dict[Hashable, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(_identity(tensor), (tensor, []))[1].append(name)
    return found


def _identity(tensor: torch.Tensor) -> Hashable:
    if nn.parameter.is_lazy(tensor):
        return id(tensor)
    storage = storage_of(tensor)
    if storage == 0:
        return id(tensor)
    return (storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _by_dtype(held: Iterable[torch.Tensor]) -> tuple[DtypeCount, ...]:
    groups: dict[str, list[torch.Tensor]] = defaultdict(list)
    for tensor in held:
        groups[str(tensor.dtype).removeprefix("torch.")].append(tensor)
    counts = (
        DtypeCount(
            dtype=dtype,
            tensors=len(group),
            elements=sum(map(_elements, group)),
            bytes=sum(map(_bytes, group)),
        )
        for dtype, group in groups.items()
    )
    return tuple(sorted(counts, key=lambda c: (-c.bytes, c.dtype)))


def _elements(tensor: torch.Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else math.prod(tensor.shape)


def _bytes(tensor: torch.Tensor) -> int:
    return _elements(tensor) * tensor.element_size()
