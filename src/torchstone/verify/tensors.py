"""Makes the tensors of a case. Only imported where torch is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchstone.records import Case, ScalarSpec, TensorSpec, WorkloadSpec, factor_and_dim
from torchstone.verify.inputs import BEYOND
from torchstone.workload import Workload

__all__ = ["Source", "copies", "make", "probes_nothing"]

_HOSTILE = ("zeros", "ties", "tiny", "low", "high", *BEYOND)
_KINDS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Source:
    """What a workload's inputs are made from; made once in a process, since it runs the user's code."""

    spec: WorkloadSpec
    """The workload's description."""
    example: tuple[Any, ...]
    """Its example inputs, by position."""


def make(workload: Workload, source: Source, case: Case) -> tuple[Any, ...]:
    """The case's inputs, by position: new tensors, laid out in memory as the case says.

    :raises WorkloadError: where the user's ``generate`` fails.
    """
    if case.values == "example":
        made = copies(source.example)
    else:
        generator = torch.Generator().manual_seed(case.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)  # for a `generate` that does not use its generator
            given = workload.generated(case.sizes, generator)
        made = given or tuple(
            _input(spec, example, case, position)
            for position, (spec, example) in enumerate(
                zip(source.spec.inputs, source.example, strict=True)
            )
        )
    return tuple(_laid_out(value, case.layout) for value in made)


def probes_nothing(workload: Workload, case: Case) -> bool:
    """Whether the case would repeat a random one: the user's ``generate`` decides on values."""
    return workload.generate is not None and case.values in _HOSTILE


def copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same inputs in storage of their own, with the same strides and storage offsets."""
    return tuple(_copy(value) if isinstance(value, torch.Tensor) else value for value in values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    layout = list(zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0 or any(stride == 0 and size > 1 for size, stride in layout):
        # empty, or expanded: no place in memory of its own for each element
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    reach = 1 + sum((size - 1) * stride for size, stride in layout) + tensor.storage_offset()
    # NaN between and before the elements: whoever reads there does not get away with it
    beside = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 1
    copy = torch.full((reach,), beside, dtype=tensor.dtype, device=tensor.device)
    copy = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.copy_(tensor.detach())


def _laid_out(value: Any, layout: str) -> Any:
    """The value with the same elements in other places of memory."""
    if layout == "contiguous" or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if layout == "strided":
        doubled = value.new_empty((*value.shape[:-1], 2 * value.shape[-1]))
        view = doubled[..., ::2]
    else:  # one element in: no longer aligned to the vectors or cache lines that kernels may assume
        view = value.new_empty(value.numel() + 1)[1:].view(value.shape)
    view.copy_(value)
    return view


def _input(spec: TensorSpec | ScalarSpec, example: Any, case: Case, position: int) -> Any:
    generator = torch.Generator().manual_seed(case.seed * 64 + position)
    if isinstance(spec, ScalarSpec):
        return _KINDS[spec.kind](case.scalars.get(spec.name, example))
    shape = tuple(_size(n, case) for n in spec.shape)
    if _is_mask(example) and case.kind != "values":
        return _tiled(example, shape)
    dtype = example.dtype
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return _floats(spec, example, case, shape, generator)
    return _integers(spec, case, shape, generator).to(dtype)


def _size(size: int | str, case: Case) -> int:
    if isinstance(size, int):
        return size
    factor, dim = factor_and_dim(size)
    return factor * case.sizes[dim]


def _is_mask(example: torch.Tensor) -> bool:
    if example.dtype == torch.bool:
        return True
    return example.numel() > 1 and bool(((example == 0) | (example == 1)).all())


def _tiled(example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The example's pattern, repeated and cut to ``shape``."""
    if example.numel() == 0 or 0 in shape:
        return example.new_ones(shape)
    repeats = tuple(-(-n // e) for n, e in zip(shape, example.shape, strict=True))
    return example.repeat(repeats)[tuple(slice(n) for n in shape)].contiguous()


def _integers(
    spec: TensorSpec, case: Case, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    low = 0 if spec.low is None else int(spec.low)
    high = 1 if spec.high is None else int(spec.high)
    constant = {"zeros": min(max(0, low), high), "tiny": low, "low": low, "ties": (low + high) // 2}
    constant |= {"large": high, "high": high}
    if case.values in constant:
        return torch.full(shape, constant[case.values])
    return torch.randint(low, high + 1, shape, generator=generator)


def _floats(
    spec: TensorSpec,
    example: torch.Tensor,
    case: Case,
    shape: tuple[int, ...],
    generator: torch.Generator,
) -> torch.Tensor:
    """Floats as the case says, inside the stated range where there is one; drawn in float64."""
    wide = torch.complex128 if example.is_complex() else torch.float64
    mean, deviation, positive = _scale(example)
    noise = torch.randn(shape, generator=generator, dtype=wide)
    unit = torch.rand(shape, generator=generator, dtype=torch.float64)
    stated = spec.low is not None and spec.high is not None
    low, high = spec.low or 0.0, spec.high or 0.0
    usual = noise * deviation + mean
    usual = usual.abs() if positive else usual
    values = {
        "zeros": lambda: torch.zeros_like(usual),
        "ties": lambda: torch.full_like(usual, mean + 0.5 * deviation),
        "tiny": lambda: usual * 1e-3,
        "low": lambda: low + (high - low) * 1e-3 * unit,
        "high": lambda: high - (high - low) * 1e-3 * unit,
        "large": lambda: usual * 100,
        "mixed": lambda: usual * 10.0 ** (5 * unit - 3),
    }.get(case.values, lambda: usual)()
    if stated and not values.is_complex():
        values = values.clamp(low, high)
    return values.to(example.dtype)


def _scale(example: torch.Tensor) -> tuple[float, float, bool]:
    """Mean, standard deviation, and whether the example has no negative value (counts, pixels)."""
    finite = example[torch.isfinite(example)]
    if finite.numel() == 0:
        return 0.0, 1.0, False
    if example.is_complex():
        return 0.0, float(finite.to(torch.complex128).abs().square().mean().sqrt()) or 1.0, False
    finite = finite.to(torch.float64)
    mean, deviation = float(finite.mean()), float(finite.std(correction=0))
    positive = finite.numel() > 1 and bool((finite >= 0).all()) and mean > 0
    return mean, deviation or abs(mean) or 1.0, positive
