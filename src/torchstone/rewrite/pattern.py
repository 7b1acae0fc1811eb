"""Patterns: trees of ATen operations with variables, matched against a normalized graph.

    op(aten.mean.dim, op(aten.linear.default, V("x"), V("weight"), V("bias")), V("dims"), V("keepdim"))

A variable stands for whatever is there: a node, a number, a list, None. Twice the same variable must
be twice the same. Arguments that a pattern does not mention must have the schema's defaults. A literal
matches what equals it; a sum or product of two matches either way round. A matched operation, other
than the root, must have no user outside the match: its result would have to be computed all the same.
Nor does anything match whose result is changed in place, since what replaces it may be an input's own
memory, or whose inputs are changed between its first operation and its last.

An element of a tuple that an operation gives is ``op(operator.getitem, op(aten.max.dim, ...), 0)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchstone.rewrite import graph as graphs

__all__ = ["Match", "Op", "V", "evaluate", "match", "op", "variables"]

aten = torch.ops.aten
Overload = torch._ops.OpOverload
Target = Callable[..., Any]

_COMMUTE = frozenset((aten.add.Tensor, aten.mul.Tensor, aten.multiply.Tensor))
"""Equal to the bit when their first two arguments change places."""


@dataclass(frozen=True)
class V:
    """A variable."""

    name: str
    """What the rule's replacement calls it."""


@dataclass(frozen=True)
class Op:
    """An operation and what it is applied to."""

    targets: tuple[Target, ...]
    """The overloads that it may be."""
    args: tuple[Any, ...]
    """Patterns, variables or literals, in the order of the schema."""
    bind: str = ""
    """Variable that stands for the overload found, where there may be several."""

    @property
    def depth(self) -> int:
        """Operations on the longest way down."""
        return 1 + max((a.depth for a in self.args if isinstance(a, Op)), default=0)


def op(targets: Target | tuple[Target, ...], *args: Any, bind: str = "") -> Op:
    """An operation of a pattern."""
    return Op(targets if isinstance(targets, tuple) else (targets,), args, bind)


@dataclass
class Match:
    """Where a pattern was found."""

    bound: dict[str, Any] = field(default_factory=dict)
    """What each variable stands for."""
    nodes: list[fx.Node] = field(default_factory=list)
    """The operations, the root first."""

    @property
    def root(self) -> fx.Node:
        """The operation whose result is replaced."""
        return self.nodes[0]


def variables(pattern: Op) -> tuple[str, ...]:
    """Names of the pattern's variables, in order."""
    found = [pattern.bind] if pattern.bind else []
    for one in pattern.args:
        found += variables(one) if isinstance(one, Op) else [one.name] if isinstance(one, V) else []
    return tuple(dict.fromkeys(found))


def match(pattern: Op, node: fx.Node) -> Match | None:
    """The pattern with its root at ``node``, in a graph whose arguments are all positional."""
    found = Match()
    if not _operation(pattern, node, found):
        return None
    # an operation that was met twice is kept where it was met last: after everything that reads it
    found.nodes = list(dict.fromkeys(reversed(found.nodes)))[::-1]
    inside = set(found.nodes)
    alone = all(inside.issuperset(_users(n)) for n in found.nodes if n is not node)
    return found if alone and not _written(node) and not _disturbed(found) else None


def _written(node: fx.Node) -> bool:
    """Whether an operation changes the result in place, or a view of it."""
    return any(_mutable(u) or (_is_view(u) and _written(u)) for u in node.users)


def _disturbed(found: Match) -> bool:
    """Whether an input is changed in place between the first of the operations and the root."""
    inputs = {graphs.origin(v) for v in found.bound.values() if isinstance(v, fx.Node)}
    todo, node = set(found.nodes[1:]), found.root.prev
    while todo:
        if _mutable(node) and not inputs.isdisjoint(map(graphs.origin, node.all_input_nodes)):
            return True
        todo.discard(node)
        node = node.prev
    return False


def _mutable(node: fx.Node) -> bool:
    return isinstance(node.target, Overload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and graphs.is_view(node)


def _users(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, but for elements of a tuple that nobody uses."""
    return [u for u in node.users if u.users or u.target is not operator.getitem]


def _operation(pattern: Op, node: Any, found: Match) -> bool:
    if not isinstance(node, fx.Node) or node.target not in pattern.targets:
        return False
    if not _defaults(pattern, node) or len(node.args) < len(pattern.args):
        return False
    given = node.args[: len(pattern.args)]
    orders = [given]
    if node.target in _COMMUTE and len(given) > 1:
        orders.append((given[1], given[0], *given[2:]))
    before = dict(found.bound), list(found.nodes)
    for order in orders:
        found.nodes.append(node)
        known = not pattern.bind or _bind(pattern.bind, node.target, found)
        if known and all(_argument(p, g, found) for p, g in zip(pattern.args, order, strict=True)):
            return True
        found.bound, found.nodes = dict(before[0]), list(before[1])
    return False


def _defaults(pattern: Op, node: fx.Node) -> bool:
    """Whether what the pattern does not mention is as the schema has it."""
    if not isinstance(node.target, Overload):
        return True
    schema = node.target._schema.arguments
    rest = zip(schema[len(pattern.args) :], node.args[len(pattern.args) :], strict=False)
    named = ((a, node.kwargs.get(a.name, a.default_value)) for a in schema if a.kwarg_only)
    return all(_same(given, a.default_value) for a, given in (*rest, *named))


def _argument(wanted: Any, given: Any, found: Match) -> bool:
    if isinstance(wanted, Op):
        return _operation(wanted, given, found)
    if isinstance(wanted, V):
        return _bind(wanted.name, given, found)
    return _same(given, wanted)


def _bind(name: str, value: Any, found: Match) -> bool:
    if name in found.bound:
        return _same(found.bound[name], value)
    found.bound[name] = value
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    return (type(a) is type(b) and bool(a == b)) or (_number(a) and _number(b) and a == b)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def evaluate(pattern: Any, bound: Mapping[str, Any]) -> Any:
    """What the pattern computes: its operations called on what its variables stand for."""
    if isinstance(pattern, V):
        return bound[pattern.name]
    if not isinstance(pattern, Op):
        return pattern
    target: Callable[..., Any] = bound[pattern.bind] if pattern.bind else pattern.targets[0]
    return target(*(evaluate(one, bound) for one in pattern.args))
