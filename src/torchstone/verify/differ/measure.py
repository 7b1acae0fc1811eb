"""Holds one value against what it should be. Elementwise: what is permuted or scaled never matches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchstone.policy import Policy
from torchstone.recipe import Numerics
from torchstone.records import Case, CaseErrors, OutputErrors, ReferenceErrors
from torchstone.verify import budget, compare
from torchstone.verify.differ.trace import Value, sample

__all__ = ["Held", "between_records", "held", "kept"]

_CASE = Case(name="op", kind="example", sizes={})
_DWARFS = 1e3
_RULES = budget.Rules(numerics=Numerics.REASSOCIATES, budget=Policy().max_relative_error, usual_rms={})


@dataclass(frozen=True)
class Held:
    """How a value compares with what it should be."""

    right: bool
    """Whether rounding explains the difference."""
    error: float | None = None
    """Its relative error; None where not finite or of another shape."""
    eager_error: float | None = None
    """That of A's operations in B's number format."""
    bound: float | None = None
    """What it was held to."""
    text: str = ""
    """Why it is not right."""


def held(
    got: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor | None, rules: budget.Rules | None = None
) -> Held:
    """Hold a value against the truth.

    :param truth: what it should be, in float64 (integers and booleans as they are).
    :param plain: the same computed in the usual number format, whose error is the yardstick; None where
        it cannot be had.
    :param rules: what it is held to; by default the bound of REASSOCIATES.
    """
    usual = got if plain is None or plain.shape != truth.shape else plain
    if got.shape != truth.shape:
        return Held(False, text=f"its shape is {list(got.shape)} and not {list(truth.shape)}")
    if got.is_floating_point() != truth.is_floating_point() or got.is_complex() != truth.is_complex():
        return Held(False, text=f"it is {got.dtype} and not {usual.dtype}")
    rounded = truth.to(usual.dtype) if plain is None else usual
    whole = _held(got.to(usual.dtype), truth, rounded, rules or _RULES)
    small = _beside_huge(truth)
    if not whole.right or small is None:
        return whole
    beside = _held(got.to(usual.dtype)[small], truth[small], rounded[small], rules or _RULES)
    return whole if beside.right else beside


def _held(got: torch.Tensor, truth: torch.Tensor, usual: torch.Tensor, rules: budget.Rules) -> Held:
    own = compare.errors("", got, truth, usual)
    eager = compare.errors("", usual, truth, usual)
    finding = budget.examine(
        rules,
        CaseErrors(case=_CASE.name, errors=(own,)),
        ReferenceErrors(case=_CASE, errors=(eager,)),
    )
    wrong = finding.status == "wrong"
    text = finding.text.partition(": ")[2] if wrong else ""
    return Held(not wrong, own.relative, eager.relative, finding.bound or None, text)


def _beside_huge(truth: torch.Tensor) -> torch.Tensor | None:
    """Where the usual elements are beside some that dwarf them, as a mask of -3e38 is added to scores.

    No error of the usual ones would show in the norm of all.
    """
    if not truth.is_floating_point() or truth.numel() < 2:
        return None
    size = truth.abs().nan_to_num(0.0, 0.0, 0.0)
    usual = float(size[size > 0].median()) if bool((size > 0).any()) else 0.0
    if not usual or float(size.max()) < _DWARFS * usual:
        return None
    return size < _DWARFS * usual


def between_records(y: Value, x: Value) -> OutputErrors | None:
    """Errors of a recorded value against another; None where they cannot be compared."""
    one, other = kept(y), kept(x)
    if one is None or other is None or y.shape != x.shape:
        return None
    if one.shape != other.shape:  # a sample of one of them only
        one, other = (t if t.dim() == 1 else sample(t) for t in (one, other))
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point():
        return None
    return compare.errors("", one.to(other.dtype), other, other)


def kept(value: Value) -> torch.Tensor | None:
    """What was kept of a value: all of it, or a sample."""
    return value.tensor if value.tensor is not None else value.sample
