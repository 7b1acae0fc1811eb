"""Normalized ATen graphs: every argument there and positional, nothing in place that need not be.

What a program gives (:func:`of`) is a graph module whose parameters and buffers are attributes. Nodes
carry ``meta["val"]``, a fake tensor with the program's symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from torchstone.errors import TorchstoneError

__all__ = [
    "BrokenGraphError",
    "changed_state",
    "check",
    "check_node",
    "is_view",
    "normalize",
    "of",
    "origin",
    "pure",
    "results",
    "sweep",
    "values",
]

aten = torch.ops.aten
Overload = torch._ops.OpOverload

_MAYBE_VIEWS = frozenset(
    (aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.dropout.default)
)
"""May give their input's memory, without saying so."""
_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Reshape's kind, but for inputs that lie as these know: an input may come to lie otherwise."""
_NO_STATISTICS: tuple[tuple[int, ...], int] = ((), 0)
_STATISTICS: dict[Any, tuple[tuple[int, ...], int]] = {
    aten.batch_norm.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
}
"""Operations that change running statistics, which their schemas do not say: where those are, and the
argument that decides it."""


class BrokenGraphError(TorchstoneError):
    """A rewritten graph is not a graph of the same program: a rule's fault, never the user's."""


def of(program: ExportedProgram) -> fx.GraphModule:
    """A program's graph, normalized; the program is left as it is."""
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    normalize(module.graph)
    module.recompile()
    return module


def normalize(graph: fx.Graph) -> None:
    """Fill in what schemas leave out, and compute in new memory where that changes nothing else."""
    for node in list(graph.nodes):
        if isinstance(node.target, Overload):
            if node.target in _VIEWS:
                node.target = aten.reshape.default
            _complete(node)
            _out_of_place(node)
    graph.lint()


def _complete(node: fx.Node) -> None:
    assert isinstance(node.target, Overload)
    kwargs, args = dict(node.kwargs), list(node.args)
    for argument in node.target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            continue
        if argument.name not in kwargs and not argument.has_default_value():
            return
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def _out_of_place(node: fx.Node) -> None:
    """``relu_`` becomes ``relu`` where the tensor that it changes is nobody else's memory."""
    plain = _functional(node.target)
    source = node.args[0] if node.args else None
    if plain is None or not isinstance(source, fx.Node) or source.op != "call_function":
        return
    if is_view(source) or not isinstance(source.target, Overload):
        return
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    earlier = [u for u in source.users if order[u] < order[node]]
    if any(is_view(u) for u in earlier):
        return
    node.target = plain
    for user in [u for u in source.users if order[u] > order[node]]:
        user.replace_input_with(source, node)
    node.meta["val"] = node.meta["val"].clone() if "val" in node.meta else None


def _functional(target: Any) -> Overload | None:
    """The operation that computes the same in new memory, where ``target`` works in place."""
    if not isinstance(target, Overload) or not target._schema.is_mutable:
        return None
    name = target._schema.name.partition("::")[2]
    if target.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    found = getattr(packet, target._overloadname, None)
    if not isinstance(found, Overload):
        return None
    alike = [a.name for a in found._schema.arguments] == [a.name for a in target._schema.arguments]
    return found if alike and torch.Tag.pointwise in found.tags else None


def is_view(node: fx.Node) -> bool:
    """Whether its result may lie in its input's memory."""
    if not isinstance(node.target, Overload):
        return True  # tuples, symbolic sizes: nothing is computed
    if node.target in _MAYBE_VIEWS:
        return True
    returns = node.target._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def pure(node: fx.Node) -> bool:
    """Whether a node may be dropped when nobody uses it, or be computed at another time."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, Overload):
        return not isinstance(target, torch._ops.HigherOrderOperator)
    if not target._schema.returns:
        return False  # an assertion
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return not _draws(node) if not target._schema.is_mutable else False
    return not any(True for _ in _statistics(node))


def _draws(node: fx.Node) -> bool:
    """Whether an operation that can draw random numbers does."""
    if node.target is aten.dropout.default:
        return bool(node.args[2]) and bool(node.args[1] != 0.0)
    if node.target is aten.scaled_dot_product_attention.default:
        return len(node.args) > 4 and bool(node.args[4] != 0.0)
    return True


def _statistics(node: fx.Node) -> Iterator[fx.Node]:
    """Running statistics that the node changes."""
    places, decides = _STATISTICS.get(node.target, _NO_STATISTICS)
    if places and len(node.args) > decides and node.args[decides]:
        yield from (a for a in (node.args[i] for i in places) if isinstance(a, fx.Node))


def changed_state(graph: fx.Graph) -> set[str]:
    """Names of attributes that a call changes: no constants."""
    found = set()
    for node in graph.nodes:
        changed = list(_statistics(node))
        if isinstance(node.target, Overload) and node.target._schema.is_mutable:
            schema = node.target._schema.arguments
            written = (
                a
                for a, s in zip(node.args, schema, strict=False)
                if s.alias_info and s.alias_info.is_write
            )
            changed += [origin(a) for a in written if isinstance(a, fx.Node)]
        found |= {str(n.target) for n in changed if n.op == "get_attr"}
    return found


def origin(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def sweep(graph: fx.Graph) -> int:
    """Drop what nobody uses; gives the number of nodes dropped."""
    dropped = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and pure(node):
            graph.erase_node(node)
            dropped += 1
    return dropped


def values(node: fx.Node) -> tuple[Any, ...]:
    """Shapes, dtypes and devices of what a node gives, to compare with."""
    return _described(node.meta.get("val"))


def _described(value: Any) -> tuple[Any, ...]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return tuple(
        (tuple(v.shape), v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in leaves
    )


def check(graph: fx.Graph, outputs: tuple[Any, ...]) -> None:
    """That a graph is one, and gives what it gave.

    :param outputs: :func:`values` of the graph's results before it was changed.
    :raises BrokenGraphError: where it is not so.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise BrokenGraphError(f"a rewrite left a broken graph: {error}") from None
    now = tuple(v for n in results(graph) for v in values(n))
    if not _alike(now, outputs):
        raise BrokenGraphError(f"a rewrite changed the results from {outputs} to {now}")


def check_node(node: fx.Node) -> None:
    """That a node gives the shape and dtype that it says.

    :raises BrokenGraphError: where it does not.
    """
    given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fakes = [v for v in torch.utils._pytree.tree_leaves(given) if hasattr(v, "fake_mode")]
    if not fakes:
        return
    call: Any = node.target
    with fakes[0].fake_mode:
        found = _described(call(*given[0], **given[1]))
    if not _alike(found, values(node)):
        raise BrokenGraphError(f"node {node.name} gives {found}, and says {values(node)}")


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def results(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the graph returns."""
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").all_input_nodes)
