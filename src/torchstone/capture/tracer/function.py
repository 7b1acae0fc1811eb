"""A function and its inputs to one functional graph for all sizes, or a clear refusal.

As in JAX, Python runs once and what it does to tensors is the graph. What it does beside that would be
baked in without a word, so a function is run twice, by two tracers, at different sizes, on tensors that
have no values at all: make_fx makes the graph, and a recorder says what every number in it stands for.
The two must agree operation by operation. What a graph cannot hold is refused with the line at fault: a
branch or a loop on sizes or values, a number computed from a size, reads of globals that change, writes
to anything that lives on, randomness, output.

Compared with symbolic make_fx or Dynamo there is no symbolic arithmetic per operation, which is where
their time goes. What the graph's kernels themselves demand of sizes is for ``torch.export`` of the graph
to prove (:meth:`Program.exported`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchstone import compat
from torchstone.capture import blame
from torchstone.capture.tracer import effects, merge, purity
from torchstone.capture.tracer.program import TENSOR, Program
from torchstone.capture.tracer.recorder import Recording, record
from torchstone.capture.tracer.sizes import Site
from torchstone.compat import tracing
from torchstone.errors import CaptureError
from torchstone.records import Dim, factor_and_dim

__all__ = ["Refusal", "attempt", "trace"]

_one_at_a_time = threading.RLock()  # make_fx patches what all threads share


class Refusal(NamedTuple):
    """Why a function is no single graph."""

    reason: str
    """One sentence."""
    site: Site | None
    """The line at fault, where one can be named."""

    def __str__(self) -> str:
        return self.reason if self.site is None else f"{self.reason} ({self.site})"


def trace(
    fn: nn.Module | Callable[..., Any],
    *inputs: Any,
    dims: Sequence[Mapping[int, str]] = (),
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> Program:
    """Trace a function or module into one graph that holds for all sizes of its named dims.

    Parameters and buffers of a module are lifted: the graph takes them as inputs, and the
    :class:`Program` holds them. No value is ever seen, nothing is computed, no memory is used.

    :param fn: takes ``inputs`` by position; gives tensors in any pytree.
    :param inputs: example tensors, any shapes and dtypes; only their metadata matters.
    :param dims: for each input, its axes that vary, with names: ``({0: "B", 1: "S"},)``. Axes of one
        name have one size; ``"4*B"`` is a multiple of it.
    :param ranges: smallest and largest size of each dim, ``{"S": (8, 512)}``. Where none is given, what
        Python asked of sizes becomes a guard of the program; where one is, it must hold for all of it.
    :raises CaptureError: where one graph cannot stand for the function; with the line at fault.
    """
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            what = f"input {value!r} is no tensor: its value would be baked into the graph"
            raise CaptureError(what, hint="pass torch.tensor(value), or close over it")
    axes = [dict(dims[i]) if i < len(dims) else {} for i in range(len(inputs))]
    declared = _declared(inputs, axes, ranges or {})
    found = attempt(fn, inputs, axes, declared)
    if isinstance(found, Refusal):
        site = found.site
        where, line = (None, None) if site is None else (site.file, site.line)
        raise CaptureError(f"no single graph: {found.reason}", where=where, line=line)
    return found


def attempt(
    fn: nn.Module | Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    axes: Sequence[Mapping[int, str]],
    dims: Sequence[Dim],
) -> Program | Refusal:
    """:func:`trace` with declared dims, and the refusal as a value.

    :param axes: one mapping an input; names of dims, or multiples of them.
    :param dims: each named dim, with its range.
    """
    refused = effects.reads_of_state(fn)
    if refused is not None:
        return Refusal(*refused)
    lifted = _Lifted(fn, inputs)
    try:
        with _one_at_a_time, effects.watched(fn) as watch, tracing.quiet():
            return _traced(lifted, axes, dims, watch)
    except effects.Changed as changed:
        return Refusal(changed.text, changed.site)


def _traced(
    lifted: _Lifted, axes: Sequence[Mapping[int, str]], dims: Sequence[Dim], watch: effects.Watch
) -> Program | Refusal:
    example = _sizes_of(lifted.inputs, axes)
    first: Refusal | None = None
    for sizes in _others(dims, example):
        try:
            root = lifted.fn if isinstance(lifted.fn, nn.Module) else None
            recording = record(lifted.call, lifted.fakes(axes, sizes), root)
        except compat.capture_errors() as error:  # sizes that the model does not take, perhaps
            first = first or Refusal(*blame.of(error))
            continue
        watch.check()
        merged = _merged(lifted, recording, lifted.layout(axes, dims, example, sizes), axes)
        if isinstance(merged, merge.Merged):
            watch.check()
            return lifted.program(merged, dims, axes)
        if not merged.by_chance:
            return Refusal(merged.reason, merged.site)
        first = first or Refusal(merged.reason, merged.site)
    assert first is not None  # there always are sizes to try
    return first


def _merged(
    lifted: _Lifted, recording: Recording, layout: merge.Layout, axes: Sequence[Mapping[int, str]]
) -> merge.Merged | purity.Refused:
    """The graph at the example's sizes, made one with the recording."""
    refused = purity.impure(recording, lifted.names)
    if refused is not None:
        return refused
    try:
        graph = tracing.graph_of(lifted.call, lifted.fakes(axes, layout.first))
    except compat.capture_errors() as error:
        return purity.Refused(*blame.of(error))
    unlike = _unlike(*lifted.results[-1], *lifted.results[-2])
    return purity.Refused(unlike, None) if unlike else merge.merge(graph, recording, layout)


def _unlike(first: Any, leaves: list[Any], second: Any, others: list[Any]) -> str | None:
    """What of a result is neither a tensor nor the same every time."""
    for leaf in leaves:
        if leaf is not TENSOR and not isinstance(leaf, effects.PLAIN):
            return (
                f"its result holds a {type(leaf).__qualname__}, which is neither a tensor nor plain data"
            )
    if first != second or len(leaves) != len(others):
        return "its result is of another structure at other sizes"
    for leaf, other in zip(leaves, others, strict=True):
        if leaf != other:
            return f"its result holds a number that depends on sizes: {leaf!r} or {other!r}"
    return None


def _others(dims: Sequence[Dim], example: dict[str, int]) -> list[dict[str, int]]:
    """Sizes unlike the example's in every dim that can vary, the most telling first.

    Far and odd ones first; nearer ones where the model does not take those; multiples of the example's.
    """
    if not dims:
        return [example]
    steps = [
        [example[dim.name] + 3 + 2 * i for i, dim in enumerate(dims)],
        *([step + 4 * i for i in range(len(dims))] for step in (7, 1, -1)),
        [example[dim.name] for dim in dims],
    ]
    choices = [
        {dim.name: _near(dim, example[dim.name], step) for dim, step in zip(dims, row, strict=True)}
        for row in steps
    ]
    return [c for c in choices if all(c[d.name] != example[d.name] for d in dims)] or [example]


def _near(dim: Dim, size: int, step: int) -> int:
    """A size in the range, ``step`` multiples from ``size`` or as near as it goes; at least 2."""
    low = max(-(-dim.low // dim.multiple), 2 if dim.high >= 2 * dim.multiple else 0)
    high = dim.high // dim.multiple
    wanted = size // dim.multiple + step
    if not low <= wanted <= high:
        wanted = size // dim.multiple - step
    return min(max(wanted, low), high) * dim.multiple


class _Lifted:
    """A function whose parameters and buffers are inputs like the others."""

    def __init__(self, fn: nn.Module | Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        self.fn = fn
        self.inputs = tuple(inputs)
        self.parameters: dict[str, torch.Tensor] = {}
        if isinstance(fn, nn.Module):
            self.parameters = {**dict(fn.named_parameters()), **dict(fn.named_buffers())}
        self.results: list[tuple[Any, list[Any]]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all inputs of the lifted function: parameters first."""
        return (*self.parameters, *_input_names(self.fn, len(self.inputs)))

    def call(self, *leaves: Any) -> list[Any]:
        """Parameters and inputs to the flat result."""
        count = len(self.parameters)
        given = leaves[count:]
        if isinstance(self.fn, nn.Module):
            state = dict(zip(self.parameters, leaves[:count], strict=True))
            result = torch.func.functional_call(self.fn, state, given)
        else:
            result = self.fn(*given)
        flat, spec = pytree.tree_flatten(result)
        plain = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self.results.append((spec, plain))
        return [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]

    def fakes(self, axes: Sequence[Mapping[int, str]], sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Fake tensors of these sizes for all inputs."""
        mode = tracing.fake_mode()
        fakes: list[torch.Tensor] = [mode.from_tensor(value) for value in self.parameters.values()]
        with mode:
            for value, named in zip(self.inputs, axes, strict=True):
                shape = list(value.shape)
                for axis, text in named.items():
                    factor, dim = factor_and_dim(text)
                    shape[axis] = factor * sizes[dim]
                fakes.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        return fakes

    def layout(
        self,
        axes: Sequence[Mapping[int, str]],
        dims: Sequence[Dim],
        example: Mapping[str, int],
        second: Mapping[str, int],
    ) -> merge.Layout:
        """Where the dims are, for :mod:`torchstone.capture.tracer.merge`."""
        count = len(self.parameters)
        places = {
            (count + i, axis): factor_and_dim(text)
            for i, named in enumerate(axes)
            for axis, text in named.items()
        }
        return merge.Layout(places=places, dims=tuple(dims), first=dict(example), second=dict(second))

    def program(
        self, merged: merge.Merged, dims: Sequence[Dim], axes: Sequence[Mapping[int, str]]
    ) -> Program:
        """The finished program."""
        names = _input_names(self.fn, len(self.inputs))
        shapes = tuple(
            tuple(named.get(axis, size) for axis, size in enumerate(value.shape))
            for value, named in zip(self.inputs, axes, strict=True)
        )
        return Program(
            module=merged.module,
            parameters=self.parameters,
            inputs=names,
            shapes=shapes,
            dtypes=tuple(value.dtype for value in self.inputs),
            dims=tuple(dims),
            guards=merged.guards,
            out_spec=self.results[-1][0],
            constants=tuple(self.results[-1][1]),
            traced_at=_sizes_of(self.inputs, axes),
        )


def _input_names(fn: nn.Module | Callable[..., Any], count: int) -> tuple[str, ...]:
    function = fn.forward if isinstance(fn, nn.Module) else fn
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return tuple(names[:count])


def _sizes_of(inputs: Sequence[torch.Tensor], axes: Sequence[Mapping[int, str]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for position, (value, named) in enumerate(zip(inputs, axes, strict=True)):
        for axis, text in named.items():
            factor, dim = factor_and_dim(text)
            if not -value.dim() <= axis < value.dim():
                what = f"dims[{position}] names axis {axis}: the input has {value.dim()}"
                raise CaptureError(what, hint="axes count from 0")
            size, rest = divmod(value.shape[axis], factor)
            if rest or sizes.setdefault(dim, size) != size:
                what = f"input {position}, axis {axis}: size {value.shape[axis]} is not {text}"
                raise CaptureError(what, hint=f"{dim} is {sizes.get(dim, size)} elsewhere")
    return sizes


def _declared(
    inputs: Sequence[torch.Tensor],
    axes: Sequence[Mapping[int, str]],
    ranges: Mapping[str, tuple[int, int]],
) -> tuple[Dim, ...]:
    sizes = _sizes_of(inputs, axes)
    unknown = sorted(set(ranges) - set(sizes))
    if unknown:
        raise CaptureError(f"ranges names {unknown[0]!r}, which no axis has", hint="name it in dims")
    for name, (low, high) in ranges.items():
        if not low <= sizes[name] <= high:
            raise CaptureError(
                f"{name} is {sizes[name]} in the example, outside {low}..{high}", hint="widen the range"
            )
    return tuple(
        Dim(name=name, low=ranges.get(name, (1, 0))[0], high=ranges.get(name, (0, merge.UNBOUNDED))[1])
        for name in sizes
    )
