"""Bytes that one call of an ATen operation reads and writes, from its arguments and result.

The figure is what a kernel of its own has to move when nothing is in a cache: every input once and every
output once. Views move nothing. An operation in place reads and writes what it changes. Of a table that
is looked up (``embedding``, ``index``) only the rows asked for are read; of a tensor written at some
places only those are touched; broadcast dims (stride 0) are read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchstone.ops.calls import base_name, is_view, storage_of, tensors

__all__ = ["Flow", "flow", "touched"]

_LOOKUPS = frozenset(
    ("embedding", "index", "_unsafe_index", "index_select", "gather", "take", "masked_select")
)
"""Read as many elements of their first input as they give."""
_PLACED = frozenset(
    ("index_put", "_index_put_impl", "scatter", "index_copy", "index_fill", "scatter_add")
)
"""In place, write as many elements as they are given."""
_OVERWRITES = frozenset(
    ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential", "set", "resize")
)
"""In place, do not read what they change."""
_SHAPES_ONLY = frozenset(
    (
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_zeros",
        "new_ones",
        "new_full",
    )
)
"""Read no element of their input."""
_UNWRITTEN = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "is_same_size")
)
"""Give memory as it is."""


class Flow(NamedTuple):
    """What one call reads and writes."""

    reads: tuple[tuple[torch.Tensor, int], ...]
    """Inputs, each with the bytes read of it."""
    written: int
    """Bytes."""

    @property
    def bytes(self) -> int:
        """Both."""
        return sum(read for _, read in self.reads) + self.written


def flow(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Flow:
    """Bytes of one call.

    :param op: the ``OpOverload`` or higher-order operator that was called.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    :param out: what it returned.
    """
    given = [*tensors(args), *tensors(kwargs.values())]
    held = {storage_of(t) for t in given} - {0}
    fresh = sum(_bytes(t) for t in tensors(out) if storage_of(t) not in held)
    if not isinstance(op, torch._ops.OpOverload):
        return _reading(given, fresh)
    name = base_name(op)
    if name in _UNWRITTEN or is_view(op, given, tensors(out)):
        return Flow((), 0)
    if name in _SHAPES_ONLY:
        return Flow((), fresh)
    if name in _LOOKUPS and given:
        return Flow(((given[0], fresh), *_reading(given[1:], 0).reads), fresh)
    if name.startswith("_embedding_bag") and len(given) > 1:
        rows = given[1].numel() * given[0].shape[-1] * given[0].element_size()
        return Flow(((given[0], rows), *_reading(given[1:], 0).reads), fresh)
    changed = list(_changed(op, args, kwargs))
    if name in _PLACED and changed and len(given) > 1:
        return _reading(given[1:], _bytes(given[-1]))
    unread = [t for t, only_written in changed if only_written or name in _OVERWRITES]
    read = [t for t in given if not any(t is u for u in unread)]
    return _reading(read, sum(_bytes(t) for t, _ in changed) + fresh)


def _reading(given: Sequence[torch.Tensor], written: int) -> Flow:
    return Flow(tuple((t, touched(t)) for t in given), written)


def touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements: a dim of stride 0 is there once."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return _bytes(tensor)
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size > 0 else int(size)
    return elements * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _changed(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors that the schema says are written, and whether that is all (``out=``)."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tensors(given) if given is not None else ():
            yield tensor, bool(argument.is_out)
