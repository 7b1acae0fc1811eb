"""Whether a compiled call gave what eager gives, judged quickly; verification is ``verify/``'s."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from torchstone import compat
from torchstone.capture.export import one_line

__all__ = ["agrees", "copied", "eager_call", "relative_error", "why_not"]


def eager_call(module: nn.Module, call: Callable[[nn.Module], Any]) -> list[Any] | None:
    """Leaves of what eager gives from the module's state as it is, which is left alone.

    :param call: calls the module that it is given, on inputs of its own.
    :returns: leaves in pytree's order; None where two runs differ, so that nothing can be compared.
    """
    with torch.no_grad():
        first, second = (_pytree.tree_leaves(call(copied(module))) for _ in range(2))
    return first if relative_error(first, second) == 0 else None


def why_not(error: Exception, eager: Callable[[], Any]) -> str:
    """Why a model could not be compiled, in one sentence.

    :param error: what compiling it raised.
    :param eager: calls the model on its example inputs.
    """
    try:
        with torch.no_grad():
            eager()
    except compat.capture_errors() as own:
        return f"The model itself fails on its example inputs: {one_line(own)}"
    return f"torch.compile cannot run this model: {one_line(error)}"


def relative_error(found: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """Largest relative Frobenius error of an output.

    :returns: 0 where all are equal to the bit, 1 for an error over zeros; None where outputs differ in
        number, kind, shape or dtype, or where one is not finite and the other is.
    """
    if len(found) != len(expected):
        return None
    errors = [_error(a, b) for a, b in zip(found, expected, strict=True)]
    known = [e for e in errors if e is not None]
    return max(known, default=0.0) if len(known) == len(errors) else None


def agrees(error: float | None, outputs: Sequence[Any]) -> bool:
    """Whether an error is no more than another order of operations makes in the outputs' dtypes."""
    floats = [o for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
    largest = max((torch.finfo(o.dtype).eps for o in floats), default=0.0)
    return error is not None and error <= max(1e-4, 4 * largest)


def _error(found: Any, expected: Any) -> float | None:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return 0.0 if type(found) is type(expected) and bool(found == expected) else None
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.detach().to(wide), expected.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((same | (a.isfinite() & b.isfinite())).all()):
        return None
    error, size = (float(torch.where(same, 0.0, a - b).norm()), float(b[b.isfinite()].norm()))
    return error / size if size else 1.0


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module with state of its own; the module itself where it cannot be copied."""
    try:
        return copy.deepcopy(module)
    except (TypeError, RuntimeError, NotImplementedError):  # what it holds cannot be copied
        return module
