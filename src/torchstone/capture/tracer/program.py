"""Programs: what the tracer makes of a function."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import export, fx, nn
from torch.export import ExportedProgram
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from torchstone import compat
from torchstone.capture import blame
from torchstone.capture.tracer.merge import UNBOUNDED, Guard
from torchstone.capture.tracer.sizes import Axis
from torchstone.errors import CaptureError, EnvelopeError
from torchstone.records import Dim, factor_and_dim

__all__ = ["TENSOR", "Captured", "Program"]

TENSOR = Ellipsis
"""Stands for a tensor among the leaves of a result."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A captured graph. Immutable: nothing in it is changed after it was made.

    Calling it checks the inputs' dtypes, ranks, sizes and guards, and runs the graph in eager.
    """

    module: fx.GraphModule
    """The graph: placeholders are the parameters, then the inputs; it gives a flat tuple of tensors.
    Operations are ATen's before autograd and decomposition, none of them in place; sizes are nodes."""
    parameters: Mapping[str, torch.Tensor]
    """Parameters and buffers by their names in the module; shared with it."""
    inputs: tuple[str, ...]
    """Names of the inputs."""
    shapes: tuple[tuple[int | str, ...], ...]
    """Their shapes, with names of dims."""
    dtypes: tuple[torch.dtype, ...]
    """Their dtypes."""
    dims: tuple[Dim, ...]
    """The named dims and their ranges."""
    guards: tuple[Guard, ...]
    """What Python asked of sizes that no declared range answers."""
    out_spec: pytree.TreeSpec
    """Structure of the result."""
    constants: tuple[Any, ...]
    """The result's leaves: plain data, or :data:`TENSOR`."""
    traced_at: Mapping[str, int]
    """Sizes of the dims at which make_fx ran."""

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run it.

        :raises EnvelopeError: where the inputs are outside of what was traced.
        """
        self.check(*inputs)
        with torch.no_grad():
            return self.unflatten(iter(self.module(*self.parameters.values(), *inputs)))

    def unflatten(self, tensors: Iterator[torch.Tensor]) -> Any:
        """The result from its tensors, in order."""
        leaves = [next(tensors) if constant is TENSOR else constant for constant in self.constants]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def check(self, *inputs: torch.Tensor) -> None:
        """See that the graph stands for the function on these inputs.

        :raises EnvelopeError: saying which input or guard does not hold.
        """
        if len(inputs) != len(self.inputs):
            raise EnvelopeError(f"it takes {len(self.inputs)} inputs, {len(inputs)} were given")
        sizes: dict[str, int] = {}
        for name, value, shape, dtype in zip(self.inputs, inputs, self.shapes, self.dtypes, strict=True):
            if value.dtype != dtype or value.dim() != len(shape):
                what = (
                    f"{name} is {value.dtype} of {value.dim()} dims; traced was {dtype} of {len(shape)}"
                )
                raise EnvelopeError(what)
            for axis, (size, said) in enumerate(zip(value.shape, shape, strict=True)):
                if not self._fits(size, said, sizes):
                    what = f"{name} has size {size} in axis {axis}, which was traced as {said}"
                    raise EnvelopeError(what, hint=self._ranges())
        self._check_guards(inputs)

    def _fits(self, size: int, said: int | str, sizes: dict[str, int]) -> bool:
        if isinstance(said, int):
            return size == said
        factor, name = factor_and_dim(said)
        value, rest = divmod(size, factor)
        dim = next(d for d in self.dims if d.name == name)
        fits = dim.low <= value <= dim.high and value % dim.multiple == 0
        return fits and not rest and sizes.setdefault(name, value) == value

    def _check_guards(self, inputs: tuple[torch.Tensor, ...]) -> None:
        count = len(self.parameters)
        known = {Axis(count + i, a): s for i, x in enumerate(inputs) for a, s in enumerate(x.shape)}
        for guard in self.guards:
            if guard.question.answer(known) is not guard.question.outcome:
                raise EnvelopeError(
                    f"the graph holds only where {guard.text}", hint=f"{guard.site} asks for it"
                )

    def _ranges(self) -> str:
        said = (f"{d.name} in {d.low}..{d.high if d.high < UNBOUNDED else ''}" for d in self.dims)
        return ", ".join(said) or "no dim varies"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the graph, its interface and the bytes of parameters and constants."""
        state = hashlib.sha256()
        state.update(str(self.module.graph).encode())
        for part in (self.inputs, self.shapes, self.dtypes, self.dims, self.out_spec, self.constants):
            state.update(repr(part).encode())
        for guard in self.guards:
            state.update(guard.text.encode())
        held = {**self.parameters, **dict(self.module.named_buffers())}
        for name, tensor in sorted(held.items()):
            plain = tensor.detach().cpu().contiguous().flatten()
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(plain.view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    @property
    def nodes(self) -> int:
        """Operations in the graph, those on sizes not counted."""
        return sum("torchstone_results" in node.meta for node in self.module.graph.nodes)

    def exported(self) -> ExportedProgram:
        """The program as ``torch.export`` has it, which engines take.

        Export runs the graph with symbolic sizes and so proves what the kernels demand of them.

        :raises CaptureError: where that is more than was declared.
        """
        roots = {dim.name: _root(dim) for dim in self.dims}
        args, shapes = [], []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            named = {
                axis: factor_and_dim(size) for axis, size in enumerate(shape) if isinstance(size, str)
            }
            sizes = [self._at(size) for size in shape]
            args.append(torch.zeros(sizes, dtype=dtype))
            shapes.append({axis: _times(factor, roots[name]) for axis, (factor, name) in named.items()})
        try:
            with torch.no_grad():
                return torch.export.export(
                    self.as_module(), tuple(args), dynamic_shapes={"inputs": tuple(shapes)}
                )
        except compat.capture_errors() as error:
            raise CaptureError(
                f"the graph's kernels do not hold for all sizes: {blame.one_line(error)}",
                hint="narrow the ranges of the dims",
            ) from error

    def _at(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        factor, dim = factor_and_dim(size)
        return factor * self.traced_at[dim]

    def as_module(self) -> nn.Module:
        """The graph as a module that holds its parameters and takes the inputs by position."""
        return Captured(self)


def _root(dim: Dim) -> Any:
    """What is free in a dim: itself, or the ``k`` of ``16*k``; left to export where undeclared."""
    if dim.high >= UNBOUNDED:
        return export.Dim.AUTO
    if dim.multiple != 1:
        low, high = -(-dim.low // dim.multiple), dim.high // dim.multiple
        return dim.multiple * export.Dim(f"_{dim.name}", min=low, max=high)
    return export.Dim(dim.name, min=dim.low, max=dim.high)


def _times(factor: int, root: Any) -> Any:
    return root if factor == 1 or root is export.Dim.AUTO else factor * root


class Captured(nn.Module):
    """A program as a module: what is exported.

    :param program: stays as it is; parameters are shared with it.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = _Hidden(program)
        self.graph = _with_attributes(program)
        holder = fx.GraphModule(
            {**program.parameters, **dict(_constants(program.module))}, self.graph, "Captured"
        )
        for name, child in holder.named_children():
            self.add_module(name, child)
        for name, parameter in holder.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in holder.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The function's result."""
        program = self.program.value
        with preserve_node_meta():  # so that a graph made of this one knows the user's lines
            tensors = iter(fx.Interpreter(self, graph=self.graph).run(*inputs))
        return program.unflatten(tensors)


class _Hidden:
    """Keeps a program from being taken for a part of the module."""

    def __init__(self, value: Program) -> None:
        self.value = value


def _constants(module: fx.GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            yield node.target, getattr(module, node.target)


def _with_attributes(program: Program) -> fx.Graph:
    """The graph with parameters as attributes, not inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    names = iter(program.parameters)
    for node in program.module.graph.nodes:
        name = next(names, None) if node.op == "placeholder" else None
        if name is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node.users:
            copies[node] = graph.get_attr(name)
    return graph
