"""Cuts a captured graph into parts that run, and compile, on their own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchstone.compat import differ as doors
from torchstone.verify.differ.record import origin_of
from torchstone.verify.differ.trace import Op, Ref, mapped

__all__ = ["Graph", "Part", "operations"]


@dataclass
class Part:
    """A piece of a graph as a module of tensors."""

    module: fx.GraphModule
    """Positional tensors in, flat tuple of tensors out; parameters are its own attributes."""
    inputs: tuple[torch.Tensor, ...]
    """What eager gives it."""
    nodes: list[fx.Node]
    """The nodes of the whole graph that it is made of."""
    outputs: list[fx.Node]
    """Those that it returns."""
    fed: list[fx.Node] = field(default_factory=list)
    """Those whose values are its inputs."""


class Graph:
    """A captured graph with the value of every node on one input.

    :param module: positional tensors in, flat tuple of tensors out; without in-place operations.
    :param inputs: one for each placeholder.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.module = module
        recorder = _Values(module)
        with torch.no_grad():
            recorder.run(*inputs)
        self.values = recorder.values
        self.nodes = [n for n in module.graph.nodes if n.op == "call_function" and not _checks(n)]
        leaves = module.graph.output_node().args[0]
        assert isinstance(leaves, tuple | list)
        self.results = [n for n in leaves if isinstance(n, fx.Node) and self._is_tensor(n)]

    def prefix(self, count: int) -> Part:
        """The first ``count`` operations, returning every tensor that is needed later."""
        inside = self.nodes[:count]
        made = set(inside)
        inside += [n for n in self.nodes[count:] if _picks(n) and n.args[0] in made]
        later = {a for n in self.nodes if n not in made for a in n.all_input_nodes} | set(self.results)
        return self.part(inside, [n for n in inside if n in later and self._is_tensor(n)] or inside[-1:])

    def suffix_of(self, nodes: Sequence[fx.Node], start: int, outputs: Sequence[fx.Node]) -> Part:
        """Of these operations those from position ``start`` on, as far as the outputs need them."""
        return self.part(_needed(nodes[start:], outputs), outputs)

    def part(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Part:
        """These operations as a module; what they need from outside are its inputs."""
        chosen = set(nodes)
        nodes = [n for n in nodes if not (_picks(n) and n.args[0] not in chosen)]
        inside = set(nodes)
        outside = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
        fed = [n for n in outside if n.op != "get_attr" and self._is_tensor(n)]
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {n: graph.placeholder(n.name) for n in fed}
        for needed in outside:
            if needed.op == "get_attr":
                copies[needed] = graph.get_attr(str(needed.target))
            elif needed not in copies:
                copies[needed] = self.values[needed]  # a number: fixed as it was
        for node in nodes:
            copies[node] = _copied(graph, node, copies)
        graph.output(tuple(copies[n] for n in outputs))
        module = fx.GraphModule(self.module, graph)
        inputs = tuple(self.values[n].clone() for n in fed)
        return Part(module, inputs, list(nodes), list(outputs), fed)

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node), torch.Tensor)


class _Values(fx.Interpreter):
    """Runs a graph and keeps what every node gave."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """As the base class."""
        result = super().run_node(n)
        given = n.op == "placeholder" and isinstance(result, torch.Tensor)
        self.values[n] = result.clone() if given else result  # the last operations may write to inputs
        return result


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, Any]) -> fx.Node:
    """The node in another graph; unlike ``node_copy`` takes numbers for what was computed outside."""
    args = fx.map_arg(node.args, lambda n: copies[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: copies[n])
    copy = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type] # it is a function
    copy.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
    return copy


def _picks(node: fx.Node) -> bool:
    """Whether a node takes one result of several: what has several cannot be an input."""
    return node.target is operator.getitem


def _checks(node: fx.Node) -> bool:
    """Whether a node only asserts something."""
    return "_assert" in doors.name_of(node.target)


def _needed(nodes: Sequence[fx.Node], outputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of the nodes, in order, that the outputs are computed from."""
    wanted = set(outputs)
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [n for n in nodes if n in wanted]


def operations(part: Part) -> tuple[list[Op], dict[fx.Node, int]]:
    """A part's nodes as operations, and the number of each node's value.

    Inputs are numbered first, then attributes and results; a result that is a tuple has one number.
    """
    numbers: dict[fx.Node, int] = {}
    ops = []
    for node in part.module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            numbers[node] = len(numbers)
        elif node.op == "call_function":
            args, kwargs = mapped(_plain((node.args, node.kwargs)), lambda a: _ref(a, numbers))
            numbers[node] = len(numbers)
            target = (
                "_operator.getitem" if node.target is operator.getitem else doors.name_of(node.target)
            )
            ops.append(Op(target, args, kwargs, (numbers[node],), origin_of(node)))
    return ops, numbers


def _plain(value: Any) -> Any:
    """FX's immutable lists and dicts as plain ones."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return tuple(_plain(v) for v in value) if isinstance(value, tuple) else value


def _ref(leaf: Any, numbers: dict[fx.Node, int]) -> Any:
    return Ref(numbers[leaf]) if isinstance(leaf, fx.Node) else leaf
