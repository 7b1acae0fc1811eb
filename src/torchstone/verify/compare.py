"""Errors of one output against the float64 reference; arithmetic in float64, scaled against overflow.

``relative`` is the Frobenius norm of the error over that of the reference, 0 for two zeros and 1 for an
error over a reference of zeros. ``worst`` is the largest error of an element over the larger of that
element's magnitude and the reference's root mean square, which is ``atol + rtol * |ref|`` with the
absolute part set by the output's own scale: one wrong element among millions shows there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torchstone.records import OutputErrors

__all__ = ["Leaf", "differing", "errors"]

Leaf = torch.Tensor | str | None
"""One output as it is kept: Python numbers are tensors already; a string stands for anything else."""


def errors(name: str, output: Leaf, reference: Leaf, eager: Leaf) -> OutputErrors:
    """Errors of ``output``.

    :param name: path of the output in the model's result.
    :param output: the candidate's, any dtype and shape.
    :param reference: the float64 run's (integers and booleans: its own, in any dtype).
    :param eager: eager's, whose shape and dtype are the right ones.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(eager, torch.Tensor)):
        same = type(output) is type(eager) and (isinstance(output, torch.Tensor) or output == eager)
        wrong = None if same else f"{_kind(output)} where eager gives {_kind(eager)}"
        return OutputErrors(output=name, relative=0.0, worst=0.0, shape_or_dtype=wrong)
    if output.shape != eager.shape or output.dtype != eager.dtype:
        wrong = f"{_kind(output)} where eager gives {_kind(eager)}"
        return OutputErrors(output=name, relative=None, worst=None, shape_or_dtype=wrong)
    if not isinstance(reference, torch.Tensor) or reference.shape != eager.shape:
        wrong = f"{_kind(eager)} where float64 gives {_kind(reference)}"
        return OutputErrors(output=name, relative=None, worst=None, shape_or_dtype=wrong)
    found = _integral(output, reference)
    if output.is_floating_point() or output.is_complex():
        found = _floating(output, reference)
    return OutputErrors(
        output=name,
        relative=found.relative,
        worst=found.worst,
        worst_index=_index(found.position, output),
        sqnr_db=-20 * math.log10(found.relative) if found.relative else None,
        non_finite=found.non_finite,
        mismatched=found.mismatched,
        elements=output.numel(),
        dtype=_name(output.dtype),
        typical=found.typical,
        rms=_stated(found.rms),
        error_rms=_stated(found.error_rms),
        differing=differing(output, eager),
    )


def differing(output: torch.Tensor, eager: torch.Tensor) -> int:
    """Number of elements that are not equal to eager's; two NaNs are equal, whatever their bits."""
    if output.shape != eager.shape or output.dtype != eager.dtype:
        return max(output.numel(), eager.numel(), 1)
    if not (output.is_floating_point() or output.is_complex()):
        return int((output != eager).sum())
    a, b = _real(output), _real(eager)
    return int(((a != b) & ~(a.isnan() & b.isnan())).sum())


class _Found(NamedTuple):
    """Errors before they have a name; ``position`` is the flat index of the worst element, if any."""

    relative: float | None = 0.0
    worst: float | None = 0.0
    typical: float | None = None
    position: int | None = None
    non_finite: int = 0
    mismatched: int = 0
    rms: float | None = None
    error_rms: float | None = None


def _integral(output: torch.Tensor, reference: torch.Tensor) -> _Found:
    unlike = (output != reference).flatten()
    mismatched = int(unlike.sum())
    return _Found(mismatched=mismatched, position=int(unlike.int().argmax()) if mismatched else None)


def _floating(output: torch.Tensor, reference: torch.Tensor) -> _Found:
    out, ref = _real(output).flatten(), _real(reference).flatten()
    if ref.numel() == 0:
        return _Found(rms=0.0, error_rms=0.0)
    finite = out.isfinite() & ref.isfinite()
    agreed = (out == ref) | (out.isnan() & ref.isnan())
    non_finite = int((~finite & ~agreed).sum())
    count = max(int(finite.sum()), 1)
    # Elements where either is infinite or NaN are counted above, and are 0 from here on. Dividing by
    # the largest magnitude before subtracting keeps squares and differences of huge values finite.
    out, ref = torch.where(finite, out, 0.0), torch.where(finite, ref, 0.0)
    scale = float(ref.abs().max()) or float(out.abs().max())
    if scale == 0.0:
        zero = _or_none(0.0, non_finite)
        return _Found(zero, zero, 0.0, non_finite=non_finite, rms=0.0, error_rms=0.0)
    ref, error = ref / scale, (out / scale - ref / scale).abs()
    rms, error_rms = (float(t.square().sum().div(count).sqrt()) for t in (ref, error))
    # over a reference of zeros every error is as large as can be: 1
    each = error / ref.abs().clamp(min=rms) if rms else error / error
    position = int(each.nan_to_num(0.0).argmax())
    worst = float(each[position])
    each[position] = 0.0
    return _Found(
        relative=_or_none(error_rms / rms if rms else 1.0, non_finite),
        worst=_or_none(worst, non_finite),
        typical=_stated(float(each.square().sum().div(max(count - 1, 1)).sqrt())) if rms else None,
        position=position if worst else None,
        non_finite=non_finite,
        rms=rms * scale,
        error_rms=error_rms * scale,
    )


def _or_none(value: float, non_finite: int) -> float | None:
    """Nothing can be said of the size of an error that is not finite."""
    return None if non_finite or not math.isfinite(value) else value


def _stated(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """As float64; a complex tensor as pairs of real and imaginary parts, in a last dimension."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.to(torch.float64)


def _index(position: int | None, output: torch.Tensor) -> tuple[int, ...]:
    if position is None or output.dim() == 0:
        return ()
    shape = (*output.shape, 2) if output.is_complex() else tuple(output.shape)
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(position), shape))[: output.dim()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(leaf: Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{_name(leaf.dtype)}{list(leaf.shape)}"
    return "nothing" if leaf is None else f"{leaf!r}"
