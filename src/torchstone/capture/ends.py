"""Whether a program still is the model where a dimension is 0 or 1.

``torch.export`` declares a dim from 1 but traces it at 2 or more: a branch on size 1 is lost without a
word. The program runs the model's own operations, so it must agree with the module nearly to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree

from torchstone import compat
from torchstone.capture import program as programs
from torchstone.records import Case, Dim, WorkloadSpec
from torchstone.verify import inputs
from torchstone.workload import Workload

__all__ = ["lost_ends"]

_TOLERANCE = 1e-3


def lost_ends(
    workload: Workload, module: nn.Module, program: ExportedProgram, sizes: dict[str, int]
) -> tuple[str, ...]:
    """Dims, as ``B: 1..8 -> 2..8``, at whose small sizes the program differs from the module.

    :param sizes: the sizes that the program was traced at.
    """
    if programs.interface(program).state:
        return ()  # running it here would change the buffers that are about to be stored
    run = program.module(check_guards=False)
    lost = {}
    for dim, size in _small(workload.spec()):
        case = Case(name="capture-end", kind="dims", sizes={**sizes, dim.name: size})
        if _differs(module, run, workload, case):
            lost[dim.name] = f"{dim.name}: {dim.low}..{dim.high} -> {size + 1}..{dim.high}"
    return tuple(lost.values())


def _small(spec: WorkloadSpec) -> Iterator[tuple[Dim, int]]:
    for dim in spec.dims:
        yield from (
            (dim, size) for size in (0, 1) if dim.low <= size <= dim.high and size % dim.multiple == 0
        )


def _differs(module: nn.Module, program: Any, workload: Workload, case: Case) -> bool:
    expected = _outputs(module, inputs.materialize(workload, case))
    again = _outputs(module, inputs.materialize(workload, case))
    if expected is None or again is None or not _same(expected, again):
        return False  # the module itself cannot say what is right here: verification's matter
    found = _outputs(program, inputs.materialize(workload, case))
    return found is None or not _same(expected, found)


def _outputs(function: Any, args: tuple[Any, ...]) -> list[Any] | None:
    try:
        with torch.no_grad():
            return list(_pytree.tree_leaves(function(*args)))
    except compat.capture_errors():
        return None


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(_same_leaf(x, y) for x, y in zip(a, b, strict=True))


def _same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(a[torch.isfinite(a)].abs().max()) if torch.isfinite(a).any() else 1.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
