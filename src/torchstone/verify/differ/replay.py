"""Runs recorded operations again: in float64 as the truth, in their own format as the yardstick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from torchstone.compat import differ as doors
from torchstone.verify.differ.trace import ALIAS, Op, Ref, mapped, refs

__all__ = ["replay", "run_in_order", "wide"]

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_OF_MEMORY = ("aten.as_strided", "aten._reshape_alias")
"""They read memory and not elements: on a copy in another format they mean something else."""
Env = dict[int, torch.Tensor]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in float64 (complex128); integers and booleans as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def replay(op: Op, operands: Mapping[int, torch.Tensor], *, float64: bool) -> list[Any] | None:
    """The results of an operation on other operands.

    In float64, every operand is widened and float32 literals are read as float64; a cast to a 16-bit
    format stays, for it is what the model means.

    :param operands: for each value that it reads, the tensor to read.
    :returns: as ``Op.outs``; None where it does not run on these operands.
    """
    if op.target == ALIAS:
        return _read_again(op, operands, float64=float64)
    function = doors.named_operator(op.target)
    if function is None or op.target.startswith(_OF_MEMORY):
        return None
    device = next((t.device for t in operands.values()), torch.device("cpu"))

    def given(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            tensor = operands[leaf.value]
            return wide(tensor) if float64 else tensor
        if isinstance(leaf, torch.device):
            return device
        return _WIDE.get(leaf, leaf) if float64 and isinstance(leaf, torch.dtype) else leaf

    try:
        args, kwargs = mapped(op.args, given), mapped(op.kwargs, given)
        writes = doors.written(function, args, kwargs)
        if writes:  # on copies: the operands are read again
            fresh = {id(t): t.clone() for t in writes}
            args = mapped(args, lambda leaf: fresh.get(id(leaf), leaf))
            kwargs = mapped(kwargs, lambda leaf: fresh.get(id(leaf), leaf))
            writes = doors.written(function, args, kwargs)
        with torch.no_grad():
            return [*tree_flatten(function(*args, **kwargs))[0], *writes]
    except doors.replay_errors():
        return None


def _read_again(op: Op, operands: Mapping[int, torch.Tensor], *, float64: bool) -> list[Any] | None:
    """The first operand after the others were written to the memory that it lies in."""
    tensors = [operands[ref.value] for ref in op.args]
    layouts = op.kwargs.get("layouts")
    if layouts is None:
        return None
    ends = [
        offset + 1 + sum((n - 1) * s for n, s in zip(*rest, strict=True)) for offset, *rest in layouts
    ]
    start = wide(tensors[0]) if float64 else tensors[0]
    memory = start.new_zeros(max(ends))
    for tensor, (offset, shape, stride) in zip(tensors, layouts, strict=True):
        memory.as_strided(shape, stride, offset).copy_(tensor)
    offset, shape, stride = layouts[0]
    return [memory.as_strided(shape, stride, offset).clone()]


def run_in_order(ops: Sequence[Op], given: Mapping[int, torch.Tensor], *, float64: bool) -> Env | None:
    """Run several operations on given values; None where one does not run."""
    env = dict(given)
    for op in ops:
        operands = {n: env[n] for n in refs(op)}
        results = replay(op, operands, float64=float64)
        if results is None:
            return None
        env.update(
            (n, r) for n, r in zip(op.outs, results, strict=True) if n is not None and n not in given
        )
    return env
