"""Checks on what the user's inputs function returns, and the description of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchstone.errors import WorkloadError
from torchstone.records import Arrival, Dim, InputSpec, ScalarSpec, TensorSpec, factor_and_dim
from torchstone.workload.dims import Problem, Shape, did_you_mean, size_problem

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "check_keywords",
    "checked",
    "describe",
    "example_sizes",
    "in_order",
    "kind_of",
    "named_problem",
    "names_of",
    "unpack",
]

KINDS = "an input is a torch.Tensor or a Python int, float or bool"
Kinds = Callable[[int], str]
"""The name of the input at a position, looked up only where a message needs it."""


def unpack(raw: object, source: str) -> tuple[tuple[str, ...] | None, tuple[Any, ...]]:
    """Names (of keyword inputs only) and values of what the user gave as inputs.

    :raises WorkloadError: where it is no tuple, no dict with string keys, and no tensor or number.
    """
    import torch

    if isinstance(raw, torch.Tensor | int | float):
        return None, (raw,)
    if isinstance(raw, tuple) and raw:
        return None, raw
    if isinstance(raw, dict) and raw and all(isinstance(key, str) for key in raw):
        return tuple(raw), tuple(raw.values())
    what = f"{source} gave {kind_of(raw)}, not a tuple of inputs"
    if isinstance(raw, tuple | dict) and not raw:
        what = f"{source} gave no inputs"
    hint = "return a tuple of tensors (a dict for keyword inputs); " + _advice(raw)
    raise WorkloadError(what, hint=hint)


def checked(values: Sequence[object], name: Kinds, source: str) -> tuple[Any, ...]:
    """The inputs, each a dense tensor or a finite Python number.

    :raises WorkloadError: naming the first argument that is neither, with its type and a way out.
    """
    return tuple(_checked(value, i, name, source) for i, value in enumerate(values))


def _checked(value: object, position: int, name: Kinds, source: str) -> object:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            what = f"{source}: argument {name(position)!r} is a tensor of layout {value.layout}"
            raise WorkloadError(what, hint="only dense tensors are inputs: pass value.to_dense()")
        return value
    if type(value) in (bool, int):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        what = f"{source}: argument {name(position)!r} is {value}"
        raise WorkloadError(what, hint="an example number must be finite")
    what = f"{source}: argument {name(position)!r} is {kind_of(value)}, not a tensor or a number"
    raise WorkloadError(what, hint=_advice(value))


def kind_of(value: object) -> str:
    """How to name a value of a wrong type in a message."""
    if value is None:
        return "None"
    kind = type(value)
    name = (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"a {name}"


def _advice(value: object) -> str:
    if type(value).__module__ == "numpy":
        return "use torch.from_numpy(value)" if hasattr(value, "__len__") else "use value.item()"
    if isinstance(value, str):
        return "tokenize or encode text before the model, or fix a setting in the model's factory"
    if value is None:
        return "leave it out, so that forward's default applies, or return a dict of keyword inputs"
    if isinstance(value, list | tuple | dict):
        return (
            "use torch.tensor(value) for data; pass each tensor of a nested value as an input of its own"
        )
    return KINDS


def names_of(module: nn.Module, count: int) -> tuple[str, ...]:
    """Names of the first ``count`` positional parameters of ``module.forward``.

    :raises WorkloadError: where forward takes fewer, or needs more.
    """
    names: list[str] = []
    parameters = inspect.signature(module.forward).parameters.values()
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}_{i}" for i in range(count - len(names))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and len(names) < count:
            names.append(p.name)
            continue
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            what = f"forward of {type(module).__qualname__} needs {p.name!r}, which the inputs lack"
            raise WorkloadError(what, hint="add it to the tuple, or return a dict for keyword inputs")
    if len(names) < count:
        what = f"forward of {type(module).__qualname__} takes {len(names)} inputs, {count} were given"
        raise WorkloadError(what, hint=f"it takes ({', '.join(names)})")
    return tuple(names)


def check_keywords(module: nn.Module, names: tuple[str, ...]) -> None:
    """See that ``module.forward`` takes these keywords.

    :raises WorkloadError: where it does not.
    """
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        what = f"forward of {type(module).__qualname__} does not take these keyword inputs: {error}"
        raise WorkloadError(
            what, hint=f"it takes {signature}; the inputs are {', '.join(names)}"
        ) from None


def in_order(raw: dict[str, Any], expected: tuple[str, ...] | None, source: str) -> tuple[Any, ...]:
    """Values of keyword inputs in the order of the example's.

    :raises WorkloadError: where the keywords differ, or the example is a tuple.
    """
    if expected is None or set(raw) != set(expected):
        example = "a tuple" if expected is None else f"the keywords {', '.join(expected)}"
        what = f"{source} gave the keywords {', '.join(raw)}, but the example inputs are {example}"
        raise WorkloadError(what, hint="give inputs in the same form everywhere")
    return tuple(raw[name] for name in expected)


def named_problem(
    inputs: Mapping[str, Any], shapes: Mapping[str, Shape], ranges: Mapping[str, tuple[float, float]]
) -> Problem | None:
    """The first disagreement between the example inputs and the stated shapes and ranges, or None."""
    import torch

    for name, shape in shapes.items():
        keys = ("inputs", name, "shape")
        if name not in inputs:
            return Problem(keys, f"there is no input {name!r}", did_you_mean(name, inputs))
        value = inputs[name]
        if not isinstance(value, torch.Tensor):
            return Problem(keys, f"input {name!r} is a number, it has no shape", "remove its shape")
        if value.dim() != len(shape):
            what = (
                f"input {name!r}: shape {list(shape)} has {len(shape)} dims, the example {value.dim()}"
            )
            return Problem(keys, what, f"the example is of shape {list(value.shape)}")
        for size, seen in zip(shape, value.shape, strict=True):
            if isinstance(size, int) and size != seen:
                what = f"input {name!r}: shape says {size}, the example has {seen}"
                return Problem(keys, what, f"the example is of shape {list(value.shape)}")
    for name, (low, high) in ranges.items():
        keys = ("inputs", name, "low")
        if name not in inputs:
            return Problem(keys, f"there is no input {name!r}", did_you_mean(name, inputs))
        seen_range = _seen(inputs[name])
        if seen_range is not None and not low <= seen_range[0] <= seen_range[1] <= high:
            what = f"input {name!r}: the example holds {seen_range[0]:g} to {seen_range[1]:g}"
            return Problem(keys, f"{what}, outside {low:g} to {high:g}", "widen low and high")
    return None


def _seen(value: Any) -> tuple[float, float] | None:
    import torch

    if not isinstance(value, torch.Tensor):
        return float(value), float(value)
    if value.numel() == 0 or value.is_complex():
        return None
    return value.min().item(), value.max().item()


def example_sizes(
    inputs: Mapping[str, Any], shapes: Mapping[str, Shape], dims: tuple[Dim, ...]
) -> dict[str, int] | Problem:
    """Size of every dim in the example inputs, or why they do not agree with each other or the dims."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, shape in shapes.items():
        for size, seen_size in zip(shape, inputs[name].shape, strict=True):
            if not isinstance(size, str):
                continue
            factor, dim = factor_and_dim(size)
            seen, rest = divmod(seen_size, factor)
            if rest:
                what = f"input {name!r}: the example has {seen_size}, no multiple of {factor} ({size})"
                return Problem(("inputs", name, "shape"), what, "fit the example or the shape")
            if sizes.setdefault(dim, seen) != seen:
                what = (
                    f"input {name!r}: the example has {dim} = {seen}, but {sizes[dim]} in {first[dim]!r}"
                )
                return Problem(("inputs", name, "shape"), what, "one name stands for one size in a call")
            first.setdefault(dim, name)
    for dim_ in dims:
        problem = size_problem(dim_, sizes[dim_.name])
        if problem is not None:
            return Problem(
                ("dims", dim_.name), f"the example's {problem}", "widen the range or fit the example"
            )
    return {dim.name: sizes[dim.name] for dim in dims}


def describe(
    inputs: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    ranges: Mapping[str, tuple[float, float]],
    traffic: Sequence[Arrival],
) -> tuple[InputSpec, ...]:
    """The specs of the inputs: dtypes, shapes with dim names, and ranges of values.

    Floating-point tensors have a range only where one is stated: values seen in one example say little
    of what the model must take. Integers (often indices) are held to what the example shows.
    """
    import torch

    specs: list[InputSpec] = []
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            specs.append(_tensor(name, value, shapes.get(name), ranges.get(name)))
            continue
        sent = [arrival.scalars[name] for arrival in traffic if name in arrival.scalars]
        low, high = ranges.get(name, (min(value, *sent), max(value, *sent)) if sent else (value, value))
        specs.append(ScalarSpec(name=name, kind=_scalar(value), low=float(low), high=float(high)))
    return tuple(specs)


def _scalar(value: object) -> Any:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"


def _tensor(
    name: str, value: torch.Tensor, shape: Shape | None, stated: tuple[float, float] | None
) -> TensorSpec:
    import torch

    integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    low, high = stated or (_seen(value) if integer else None) or (None, None)
    return TensorSpec(
        name=name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape) if shape is None else shape,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
    )
