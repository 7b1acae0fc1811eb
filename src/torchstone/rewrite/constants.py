"""What depends on constants alone: found, computed ahead of time, and attached to the graph."""

from __future__ import annotations

import copy
from functools import reduce
from typing import Any

import torch
from torch import fx

from torchstone.rewrite import graph as graphs

__all__ = ["ahead", "attach", "constant", "fold", "value"]

_SMALL = 1 << 20


def constant(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose values no call changes: parameters, buffers that stay, and what follows from them."""
    changed = graphs.changed_state(module.graph)
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if str(node.target) not in changed and isinstance(_attribute(module, node), torch.Tensor):
                found.add(node)
        elif _follows(node, found):
            found.add(node)
    return found


def _follows(node: fx.Node, known: set[fx.Node]) -> bool:
    if node.op != "call_function" or not graphs.pure(node) or "empty" in str(node.target):
        return False
    return isinstance(node.meta.get("val"), torch.Tensor) and known.issuperset(node.all_input_nodes)


def fold(module: fx.GraphModule, growth: float = 1.0) -> int:
    """Compute constants ahead of time; gives how many results were stored.

    A result that is larger than what it follows from is left to be computed: it would cost memory.
    Views stay views, so that nothing is stored twice.

    :param growth: how many times as large as its sources a stored result may be.
    """
    known, graph, count = constant(module), module.graph, 0
    computed = {n for n in known if n.op == "call_function"}
    last = [n for n in graph.nodes if n in computed and any(u not in computed for u in n.users)]
    for node in last:
        if graphs.is_view(node) and all(n.op == "get_attr" for n in node.all_input_nodes):
            continue
        sources = _sources(node, known)
        held = sum(_attribute(module, n).nbytes for n in sources)
        with torch.no_grad():
            result = value(module, node)
        if result.nbytes > max(growth * held, _SMALL):
            continue
        with graph.inserting_before(node):
            stored = attach(graph, result.detach().clone())
        stored.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(stored)
        count += 1
    graphs.sweep(graph)
    _drop_unused(module)
    return count


def ahead(module: fx.GraphModule, fixed: set[fx.Node], inputs: tuple[Any, ...]) -> fx.GraphModule:
    """A copy of a graph module that has what depends on constants alone already computed.

    :param fixed: nodes of ``module`` that do.
    :param inputs: of the module; those that are no constants are not looked at.
    """
    names = {n.name for n in fixed if n.op == "call_function"}
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    known: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in list(copied.graph.nodes):
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "get_attr":
            known[node] = _attribute(module, node)
        elif node.name in names:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
            if isinstance(known[node], torch.Tensor) and any(u.name not in names for u in node.users):
                with copied.graph.inserting_before(node):
                    node.replace_all_uses_with(attach(copied.graph, known[node]))
    graphs.sweep(copied.graph)
    copied.recompile()
    return copied


def _sources(node: fx.Node, known: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for one in node.all_input_nodes:
        found |= {one} if one.op == "get_attr" else _sources(one, known)
    return found


def value(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """What a constant node gives, computed now."""
    found = _compute(module, node, {})
    assert isinstance(found, torch.Tensor)
    return found


def _compute(module: fx.GraphModule, node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return _attribute(module, node)
    if node not in done:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _compute(module, n, done))
        done[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return done[node]


def attach(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    """A node that gives a tensor, stored as a buffer of the graph's module."""
    module = graph.owning_module
    assert module is not None
    name = next(n for i in range(10**9) if not hasattr(module, n := f"folded_{i}"))
    module.register_buffer(name, value)
    node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return reduce(getattr, str(node.target).split("."), module)


def _drop_unused(module: fx.GraphModule) -> None:
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    for name in [n for n, _ in (*module.named_parameters(), *module.named_buffers()) if n not in used]:
        owner, _, last = name.rpartition(".")
        delattr(reduce(getattr, owner.split("."), module) if owner else module, last)
