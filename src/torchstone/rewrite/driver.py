"""Rewriting a graph by rules until no rule pays any more.

A rewrite is kept only where it saves time: by the weigher's estimate, or, for rules whose worth depends
on the library's kernels, by timing both ways on tensors of the graph's own sizes. What was kept, and
what was declined and why, is the firing log. Every kept rewrite makes the graph cheaper or smaller, so
it ends.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

from torchstone.records.rewrites import Declined, Firing
from torchstone.rewrite import constants, cost
from torchstone.rewrite import graph as graphs
from torchstone.rewrite.memory import Memory, key_of
from torchstone.rewrite.pattern import Match, match, variables
from torchstone.rewrite.rule import Rule

__all__ = ["Rewriter", "inline", "nodes_of", "trace"]

_GAIN = 0.98
"""A rewrite that leaves more than this share of the time is not worth the change."""
_MOST = 500
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass
class Rewriter:
    """Rules at work on one graph module."""

    module: fx.GraphModule
    """Normalized; it is changed."""
    rules: Sequence[Rule]
    """Those that may fire."""
    weigher: cost.Weigher
    """What things take."""
    passes: Sequence[Callable[[fx.GraphModule], int]] = ()
    """What is done once no rule fires any more, before constants are folded."""
    memory: Memory | None = None
    """What was timed before; None where nothing is kept."""
    fired: list[Firing] = field(default_factory=list)
    """What was rewritten, in order."""
    declined: dict[tuple[str, ...], Declined] = field(default_factory=dict)
    """What matched and was left, by rule, node and how the node's inputs lie in memory."""
    folded: int = 0
    """Constants that were computed ahead of time."""

    def run(self) -> None:
        """Rewrite until nothing fires, fold constants, drop what is not used.

        :raises BrokenGraphError: where a rule made another program of it.
        """
        graph = self.module.graph
        outputs = tuple(v for n in graphs.results(graph) for v in graphs.values(n))
        by_target: dict[Any, list[Rule]] = defaultdict(list)
        for rule in (r for r in self.rules if r.runs(self.weigher.device)):
            for target in rule.pattern.targets:
                by_target[target].append(rule)
        graphs.sweep(graph)
        while len(self.fired) < _MOST and self._round(by_target):
            graphs.sweep(graph)
            graphs.check(graph, outputs)
        for settle in self.passes:
            settle(self.module)
        self.folded = constants.fold(self.module)
        graphs.sweep(graph)
        graphs.check(graph, outputs)
        self.module.recompile()

    def _round(self, by_target: Mapping[Any, list[Rule]]) -> bool:
        """One walk over the graph, results first: a larger match is met before its parts."""
        fired = False
        self._constant = constants.constant(self.module)
        for node in reversed(list(self.module.graph.nodes)):
            if node in self._constant:
                continue  # computed once, ahead of time
            for rule in by_target.get(node.target, ()):
                if node.users and self._try(rule, node):
                    graphs.sweep(self.module.graph)  # or rules would be tried on what nobody uses now
                    fired = True
                    break
        return fired

    def _try(self, rule: Rule, node: fx.Node) -> bool:
        found = match(rule.pattern, node)
        if found is None or _place(rule, found) in self.declined:
            return False
        if not all(graphs.pure(n) for n in found.nodes):
            return False
        given = {name: found.bound[name] for name in variables(rule.pattern)}
        traced = trace(rule.replacement, given)
        if traced is None:
            return False
        why = _differs(traced, node, nodes_of(given))
        if why is not None:
            return self._decline(rule, found, why)
        before, after = self._seconds(rule, found, traced, given)
        if not rule.always and after > _GAIN * before:
            text = f"{after * 1e6:.3g} us in place of {before * 1e6:.3g}"
            return self._decline(rule, found, f"it would not pay: {text}")
        new = inline(traced, node, nodes_of(given))
        for one in new:
            graphs.check_node(one)
        self.fired.append(
            Firing(
                rule=rule.name,
                family=rule.family,
                numerics=rule.numerics.value,
                at=tuple(n.name for n in reversed(found.nodes)),
                source=_source(node),
                before_s=before,
                after_s=after,
                measured=rule.measured,
            )
        )
        return True

    def _decline(self, rule: Rule, found: Match, why: str) -> bool:
        self.declined[_place(rule, found)] = Declined(rule=rule.name, at=found.root.name, why=why)
        return False

    def _seconds(
        self, rule: Rule, found: Match, traced: fx.GraphModule, given: Mapping[str, Any]
    ) -> tuple[float, float]:
        """Of the matched operations, and of what would replace them."""
        inputs = nodes_of(given)
        fixed = {p for p, v in zip(_placeholders(traced), inputs, strict=True) if v in self._constant}
        for node in traced.graph.nodes:
            if node.op == "call_function" and all(n in fixed for n in node.all_input_nodes):
                fixed.add(node)
        if rule.measured:
            return self._timed(rule, found, traced, fixed)
        before = self.weigher.seconds(found.nodes, self._constant.__contains__)
        return before, self.weigher.seconds(traced.graph.nodes, fixed.__contains__)

    def _timed(
        self, rule: Rule, found: Match, traced: fx.GraphModule, fixed: set[fx.Node]
    ) -> tuple[float, float]:
        device = self.weigher.device
        inputs = nodes_of({name: found.bound[name] for name in variables(rule.pattern)})
        leaves = _leaves(found.root)
        key = key_of(rule.name, found.nodes, inputs, (device, len(fixed), leaves))
        known = self.memory.get(key) if self.memory is not None else None
        if known is not None:
            return known
        example = tuple(cost.random_like(v.meta["val"], device) for v in inputs)
        ahead = constants.ahead(traced, fixed, example)
        ways: list[Callable[..., Any]] = [_part(found, inputs), ahead]
        if leaves:  # in whatever layout a way leaves its result, the program has to give it in its own
            ways = [_contiguous(way) for way in ways]
        if self.memory is None:
            before, after = cost.stopwatch(ways, example, device)
            return before, after
        with self.memory.alone():
            before, after = cost.stopwatch(ways, example, device)
        self.memory.keep(key, (before, after))
        return before, after


def nodes_of(given: Mapping[str, Any]) -> list[fx.Node]:
    """The nodes among what variables stand for, those inside lists too, in order."""
    leaves = _pytree.tree_leaves(dict(given))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def trace(
    function: Callable[..., Any], given: Mapping[str, Any], *, composite: bool = True
) -> fx.GraphModule | None:
    """The graph of a replacement, for nodes with fake values and for constants.

    :param composite: keep operations that PyTorch composes of others; else trace these others.
    :returns: a normalized graph whose inputs are :func:`nodes_of` what is given; None where the
        replacement says that it does not apply.
    """
    leaves, form = _pytree.tree_flatten(dict(given))
    refused = []

    def call(*args: Any) -> Any:
        filled = iter(args)
        whole = [next(filled) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        out = function(**_pytree.tree_unflatten(whole, form))
        refused.extend([out] if out is NotImplemented else [])
        return args[0] if out is NotImplemented else out

    values = [n.meta["val"] for n in nodes_of(given)]
    mode = next(v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor))
    with mode, torch.no_grad():
        traced = make_fx(call, pre_dispatch=composite, tracing_mode="real")(*values)
    if refused:
        return None
    graphs.normalize(traced.graph)
    traced.recompile()
    return traced


def _differs(traced: fx.GraphModule, node: fx.Node, inputs: Sequence[fx.Node]) -> str | None:
    if any(n.op == "call_function" and "val" not in n.meta for n in traced.graph.nodes):
        return "the replacement computes what is no tensor"
    (out,) = graphs.results(traced.graph)
    made, wanted = graphs.values(out), graphs.values(node)
    if [str(v) for v in made] != [str(v) for v in wanted]:
        return f"the replacement gives {made}, not {wanted}"
    places = dict(zip(_placeholders(traced), inputs, strict=True))
    source = places.get(graphs.origin(out))
    given = source is not None and graphs.origin(source).op != "call_function"
    if given and not graphs.is_view(node) and _returned(node):
        return "the program would return memory that it was given, in place of new memory"
    return None


def _returned(node: fx.Node) -> bool:
    """Whether the graph returns it, or a view of it."""
    return any(
        u.op == "output" or (u.op == "call_function" and graphs.is_view(u) and _returned(u))
        for u in node.users
    )


def _leaves(node: fx.Node) -> bool:
    """Whether its layout reaches a result of the graph, through operations on single elements alone."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    for user in node.users:
        if user.op == "output":
            return True
        tags = user.target.tags if isinstance(user.target, torch._ops.OpOverload) else ()
        if (torch.Tag.pointwise in tags or graphs.is_view(user)) and _leaves(user):
            return True
    return False


def _contiguous(way: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: way(*given).contiguous()


def _placeholders(traced: fx.GraphModule) -> list[fx.Node]:
    return [n for n in traced.graph.nodes if n.op == "placeholder"]


def inline(traced: fx.GraphModule, node: fx.Node, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Put a replacement's graph before ``node`` and have it used in its place; gives the new nodes."""
    graph = node.graph
    places = dict(zip(_placeholders(traced), inputs, strict=True))
    new: list[fx.Node] = []
    with graph.inserting_before(node):
        for one in traced.graph.nodes:
            if one.op == "call_function":
                places[one] = graph.node_copy(one, places.__getitem__)
                places[one].meta["stack_trace"] = node.meta.get("stack_trace")
                new.append(places[one])
            elif one.op == "get_attr":
                places[one] = constants.attach(graph, getattr(traced, str(one.target)))
    (result,) = graphs.results(traced.graph)
    node.replace_all_uses_with(places[result])
    return new


def _part(found: Match, inputs: Sequence[fx.Node]) -> fx.GraphModule:
    """The matched operations as a function of the same inputs as their replacement."""
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in inputs}
    for node in reversed(found.nodes):
        places[node] = graph.node_copy(node, places.__getitem__)
    graph.output(places[found.root])
    return fx.GraphModule({}, graph)


def _place(rule: Rule, found: Match) -> tuple[str, ...]:
    inputs = [n for v in found.bound.values() for n in (v if isinstance(v, list | tuple) else [v])]
    fakes = (n.meta.get("val") for n in inputs if isinstance(n, fx.Node))
    strides = [str(v.stride()) for v in fakes if isinstance(v, torch.Tensor)]
    return (rule.name, found.root.name, *strides)


def _source(node: fx.Node) -> str:
    """Last line of the user's code on the way to the node, as ``file.py:12``; empty where not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
