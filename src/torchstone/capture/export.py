"""Capture by ``torch.export``: one graph for the whole declared range of sizes.

``torch.export`` fixes a dimension whose example size is 0 or 1, and takes two dimensions of one size for
the same where it may. So the model is traced at *inner* sizes: at least 2 and distinct. What comes back
is compared with the declared dims; a program that would hold for fewer sizes is refused, since an engine
that does not check its guards would answer wrongly for the others.
"""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from torchstone import compat, records
from torchstone.capture import blame, ends
from torchstone.capture import program as programs
from torchstone.capture.blame import one_line
from torchstone.records import Case, ScalarSpec, TensorSpec, WorkloadSpec, factor_and_dim
from torchstone.verify import inputs
from torchstone.workload import Workload

__all__ = [
    "Refused",
    "arguments",
    "automatic",
    "by_parameter",
    "computed_only",
    "declared",
    "dynamic_shapes",
    "export",
    "inner_sizes",
    "one_line",
]

_SYMBOL = re.compile(r"[a-z]+[0-9]+")


class Refused(NamedTuple):
    """Why there is no program."""

    reason: str
    """One line."""
    narrowed: tuple[str, ...] = ()
    """What a program would hold for instead, dim by dim."""


def export(workload: Workload, module: nn.Module) -> ExportedProgram | Refused:
    """Export ``module`` with the workload's dims.

    :param module: the workload's module, or one derived from it that takes the same inputs.
    """
    spec = workload.spec()
    scalars = [s.name for s in spec.inputs if isinstance(s, ScalarSpec)]
    if scalars:
        return Refused(f"argument {scalars[0]} is a Python number: export would freeze it")
    args = arguments(workload, spec)
    shapes = dynamic_shapes(spec, declared)
    program = _attempt(module, args, shapes, strict=False)
    if isinstance(program, Refused):
        if program.narrowed:
            return _what_holds(module, spec, args, program)
        second = _attempt(module, args, shapes, strict=True)
        program = program if isinstance(second, Refused) else second
    if isinstance(program, Refused):
        return program
    sizes = inner_sizes(spec)
    narrowed = _narrowed(program, spec) or ends.lost_ends(workload, module, program, sizes)
    if narrowed:
        return Refused(f"one graph would only hold for {', '.join(narrowed)}", narrowed)
    return program


def computed_only(workload: Workload, program: ExportedProgram) -> ExportedProgram | Refused:
    """The program without the outputs that its capture fixed, which tensor engines have no word for.

    Its results are flat, and :class:`~torchstone.capture.program.Interface` says where the others go.
    """
    if not programs.interface(program).constants:
        return program
    exported = export(workload, compat.flat_module(program))
    return exported if isinstance(exported, Refused) else programs.reloaded(exported)


def _refusal(error: BaseException) -> str:
    """The error in one line, with the last line of the user's own code on its way."""
    site = blame.site_of(error)
    if site is None:
        return one_line(error)
    text = linecache.getline(site.file, site.line).strip()
    return f"{one_line(error)} ({site}: {text})"


def inner_sizes(spec: WorkloadSpec) -> dict[str, int]:
    """Sizes to trace at: the example's where they tell nothing special, else small ones that do not.

    At least 2, distinct, and unlike every fixed size, so that no size is taken for a constant.
    """
    used = {n for s in spec.inputs if isinstance(s, TensorSpec) for n in s.shape if isinstance(n, int)}
    sizes: dict[str, int] = {}
    for dim in spec.dims:
        example = spec.example_sizes[dim.name]
        usual = [example, *_candidates(dim)]
        wanted = [n for n in usual if n // dim.multiple >= 2 and n not in used]
        wanted += [n for n in usual if n // dim.multiple >= 2 and n not in sizes.values()]
        sizes[dim.name] = next(iter(wanted), example)
        used.add(sizes[dim.name])
    return sizes


def _candidates(dim: records.Dim) -> Iterator[int]:
    low, highest = _ends(dim)
    lowest = max(2, low)
    odd = (n for n in range(lowest | 1, min(highest, lowest + 200) + 1, 2))
    yield from (n * dim.multiple for n in odd)
    if lowest <= highest:
        yield lowest * dim.multiple


def arguments(workload: Workload, spec: WorkloadSpec) -> tuple[torch.Tensor, ...]:
    """Inputs to trace with, of :func:`inner_sizes`."""
    sizes = inner_sizes(spec)
    if sizes == spec.example_sizes:
        made = workload.example()
    else:
        made = inputs.materialize(workload, Case(name="capture", kind="dims", sizes=sizes))
    # contiguous: engines that do not look at strides rely on what the program was traced with
    return tuple(value.detach().contiguous() for value in made)


def _ends(dim: records.Dim) -> tuple[int, int]:
    """Its ends, in multiples."""
    return math.ceil(dim.low / dim.multiple), dim.high // dim.multiple


def _is_dynamic(dim: records.Dim) -> bool:
    low, high = _ends(dim)
    return high > low and high >= 2


def declared(root: Any, dim: records.Dim, factor: int) -> Any:
    """The axis as declared: export refuses what it cannot keep."""
    times = factor * dim.multiple
    return root if times == 1 else times * root


def automatic(_root: Any, dim: records.Dim, factor: int) -> Any:
    """The axis as export will have it: it narrows the range as it likes."""
    return Dim.AUTO(min=factor * dim.low, max=factor * dim.high)


def _root(dim: records.Dim) -> Any:
    """What is free in a dim: itself, or the ``k`` of ``16*k``."""
    low, high = _ends(dim)
    return Dim(dim.name if dim.multiple == 1 else f"_{dim.name}", min=low, max=high)


def dynamic_shapes(spec: WorkloadSpec, make: Callable[..., Any]) -> tuple[dict[int, Any], ...]:
    """For each input, its dynamic axes, each made by ``make(root, dim, factor)``."""
    dims = {d.name: (_root(d), d) for d in spec.dims if _is_dynamic(d)}
    return tuple(
        {
            axis: make(*dims[name], factor)
            for axis, size in enumerate(tensor.shape)
            if isinstance(size, str)
            for factor, name in (factor_and_dim(size),)
            if name in dims
        }
        for tensor in spec.inputs
        if isinstance(tensor, TensorSpec)
    )


def by_parameter(module: nn.Module, shapes: tuple[dict[int, Any], ...]) -> dict[str, Any]:
    """Shapes by parameter of ``forward``; those that ``*args`` takes go into one tuple."""
    bound = inspect.signature(module.forward).bind(*shapes)
    return dict(bound.arguments)


def _attempt(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    shapes: tuple[dict[int, Any], ...],
    *,
    strict: bool,
) -> ExportedProgram | Refused:
    try:
        with torch.no_grad():
            return torch.export.export(
                module, args, dynamic_shapes=by_parameter(module, shapes), strict=strict
            )
    except compat.capture_errors() as error:
        violated = "Constraints violated" in str(error)
        return Refused(_refusal(error), ("?",) if violated else ())


def _what_holds(
    module: nn.Module, spec: WorkloadSpec, args: tuple[torch.Tensor, ...], refused: Refused
) -> Refused:
    """Say which sizes one graph would hold for, by letting export choose."""
    program = _attempt(module, args, dynamic_shapes(spec, automatic), strict=False)
    if isinstance(program, Refused):
        return Refused(refused.reason)
    narrowed = _narrowed(program, spec)
    if not narrowed:
        return Refused(refused.reason)
    return Refused(f"one graph would only hold for {', '.join(narrowed)}", narrowed)


def _narrowed(program: ExportedProgram, spec: WorkloadSpec) -> tuple[str, ...]:
    """Declared dims that the program does not cover, each as ``B: 1..64 -> 2..64``."""
    places = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    names = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    found: dict[str, str] = {}
    owners: dict[str, records.Dim] = {}
    for name, tensor in zip(names, spec.inputs, strict=True):
        if isinstance(tensor, ScalarSpec):
            continue
        for axis, size in enumerate(tensor.shape):
            factor, label = factor_and_dim(size) if isinstance(size, str) else (1, "")
            dim = next((d for d in spec.dims if d.name == label), None)
            if dim is None or not _is_dynamic(dim):
                continue
            low, high, expression = compat.size_range(program, places[name].shape[axis])
            text = _lacks(_scaled(dim, factor), low, high, expression)
            for symbol in _SYMBOL.findall(expression):
                if owners.setdefault(symbol, dim) is not dim:
                    text = f"tied to {owners[symbol].name}"
            if text:
                found[dim.name] = f"{dim.name}: {dim.low}..{dim.high} -> {text}"
    return tuple(found.values())


def _scaled(dim: records.Dim, factor: int) -> records.Dim:
    low, high, multiple = dim.low * factor, dim.high * factor, dim.multiple * factor
    return records.Dim(name=dim.name, low=low, high=high, multiple=multiple)


def _lacks(dim: records.Dim, low: int, high: int, expression: str) -> str | None:
    """The sizes that a program takes where it does not take all that are declared."""
    if low == high:
        return str(low)
    lowest, highest = _ends(dim)
    if low > lowest * dim.multiple or high < highest * dim.multiple:
        return f"{low}..{high}"
    factor = expression.partition("*")[0]
    step = int(factor) if factor.isdigit() else 1
    return f"{step}*k" if dim.multiple % step else None
