"""One call of an ATen operation: its name, its tensors, and whether it only looks at memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["base_name", "is_view", "storage_of", "tensors"]


def base_name(op: Any) -> str:
    """Its name without namespace, overload and the underscore of in-place forms: ``add`` of ``add_``."""
    name = str(op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else op)
    return name if name.startswith("__") else name.rstrip("_")


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and what else pytree knows."""
    leaves = tree_leaves(list(values) if isinstance(values, type({}.values())) else values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def is_view(op: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether a call only gave tensors in the memory of its inputs, and changed nothing.

    :param given: its tensor arguments.
    :param results: the tensors that it returned.
    """
    if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
        return torch.Tag.inplace_view in op.tags  # transpose_() changes how memory is seen, and not it
    held = {storage_of(t) for t in given} - {0}
    return bool(results) and all(storage_of(t) in held for t in results)


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 where it has no memory of its own (subclasses, empty ones)."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper subclass holds others' memory
        return 0
