"""What tests of rules share: proofs, variants blind to a variable, and programs held to float64."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from rewrite_samples import captured, fired, rewritten
from torchstone.rewrite import proof
from torchstone.rewrite.driver import Rewriter
from torchstone.rewrite.rule import Rule

MOOT = frozenset(("cudnn", "momentum", "padded", "padded_1"))
"""Variables that say how to compute, or that nothing depends on while windows are full."""


def proved(rule: Rule, seeds: int = 3) -> None:
    """That a rule holds wherever it applies, and applies often enough to say so."""
    found = [proof.prove(rule, seed, draws=150) for seed in range(seeds)]
    assert [p.counterexample for p in found if p.counterexample is not None] == []
    assert sum(p.held for p in found) >= 10, found


def seen(rule: Rule, name: str) -> bool | None:
    """Whether the proof finds out a variant that does not see what one variable stands for.

    A tensor is another to it, a constant another of the domain's; None where there is no other.
    """

    def variant(**given: Any) -> Any:
        return rule.replacement(**{**given, name: _other(rule, name, given[name])})

    if name in rule.constants and _other(rule, name, next(iter(rule.constants[name]))) is None:
        return None
    blind = replace(rule, replacement=variant)
    try:
        return any(proof.prove(blind, seed, draws=200).counterexample is not None for seed in range(4))
    except (RuntimeError, TypeError, IndexError, ValueError, ZeroDivisionError):
        return True  # what it does cannot even be done


def _other(rule: Rule, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value + value.abs() + 1  # neither a shift nor a scale, to which norms are blind
    values = rule.constants.get(name, ())
    if isinstance(values, str):
        return value + 1 if isinstance(value, int) else 1
    return next((v for v in values if v != value), None)


class Several(nn.Module):
    """Layers on one input, and what is made of each one's result: one capture for many."""

    def __init__(self, *pairs: tuple[nn.Module, Callable[..., Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer, _ in pairs)
        self.then = [then for _, then in pairs]

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(then(layer(x)) for layer, then in zip(self.layers, self.then, strict=True))


def paying(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules, those that would be timed as if they paid: nothing in a test hangs on a clock."""
    return tuple(replace(r, measured=False, always=True) if r.measured else r for r in rules)


class With(nn.Module):
    """A layer that shares its module with parameters."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call
        self.beside = nn.ParameterList(nn.Parameter(torch.randn(shape) + 3) for shape in shapes)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.layer, x, *self.beside)


def held(module: nn.Module, rules: tuple[Rule, ...], *args: torch.Tensor, batch: int = 3) -> Rewriter:
    """Rewrite a module in float64 and in float32, and hold both against it; gives the second.

    :param args: an example, the batch first; it is held at another batch size as well.
    """
    found = []
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 64 * torch.finfo(torch.float32).eps)):
        example = [a.to(dtype) for a in args]
        now = rewritten(copy.deepcopy(module).to(dtype), paying(rules), *example)
        for given in (example, [torch.randn(batch, *a.shape[1:]).to(dtype) for a in args]):
            with torch.no_grad():
                got = now.module(*given)
                wanted = copy.deepcopy(module).double()(*[a.double() for a in given])
            pairs = zip(_pytree.tree_leaves(got), _pytree.tree_leaves(wanted), strict=True)
            assert all(g.shape == w.shape and g.dtype == dtype for g, w in pairs)
            close(got, wanted, most)
        found.append(now)
    assert fired(found[0]) == fired(found[1])
    return found[1]


def close(got: Any, wanted: Any, most: float) -> None:
    """That the relative error of each result is at most so much."""
    for g, w in zip(_pytree.tree_leaves(got), _pytree.tree_leaves(wanted), strict=True):
        scale = float(w.double().norm()) or 1.0
        assert float((g.double() - w.double()).norm()) / scale <= most


def left(module: nn.Module, rules: tuple[Rule, ...], *args: torch.Tensor) -> None:
    """That nothing fires, and the graph is as it was captured."""
    before = captured(copy.deepcopy(module), *args)
    found = rewritten(copy.deepcopy(module), rules, *args)
    assert fired(found) == []
    assert _calls(before) == _calls(found.module)


def _calls(module: Any) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function" and n.users]
