"""What tests of rewriting share: capturing, rules made to fire, and how close two graphs must be."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim

from torchstone.records.inventory import Bandwidth, Peaks
from torchstone.rewrite import driver, graph, proof
from torchstone.rewrite.cost import Weigher
from torchstone.rewrite.rule import Rule

PEAKS = Peaks(
    device="a processor",
    threads=1,
    flops_per_s={"float32": 1e11},
    bandwidth=(Bandwidth(working_set_bytes=2**18, bytes_per_s=1e10),),
    beyond_cache=True,
)
WEIGHER = Weigher(PEAKS, torch.device("cpu"))


class Does(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def captured(
    module: nn.Module | Callable[..., Any], *args: torch.Tensor, fixed: int = 0
) -> fx.GraphModule:
    """A module's graph, its first dim dynamic but in the last ``fixed`` arguments."""
    made = module if isinstance(module, nn.Module) else Does(module)
    many = len(args) - fixed
    dims: Any = [{0: Dim("B", min=2, max=64)} if i < many else None for i in range(len(args))]
    if not isinstance(module, nn.Module):
        dims = [tuple(dims)]
    return graph.of(torch.export.export(made, args, dynamic_shapes=tuple(dims)))


def forced(*rules: Rule) -> tuple[Rule, ...]:
    """The rules as if they always paid."""
    return tuple(replace(rule, measured=False, always=True) for rule in rules)


def named(rules: tuple[Rule, ...], *starts: str) -> tuple[Rule, ...]:
    """Those whose names start so."""
    return tuple(rule for rule in rules if rule.name.startswith(starts))


def rewritten(
    module: nn.Module | Callable[..., Any], rules: tuple[Rule, ...], *args: torch.Tensor, fixed: int = 0
) -> driver.Rewriter:
    """A module's graph after rules have fired."""
    found = driver.Rewriter(captured(module, *args, fixed=fixed), rules, WEIGHER)
    graph.sweep(found.module.graph)
    found.run()
    return found


def fired(found: driver.Rewriter) -> list[str]:
    """Names of the rules that fired."""
    return [one.rule for one in found.fired]


def targets(module: fx.GraphModule) -> list[Any]:
    """What a graph calls."""
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def agrees(
    before: nn.Module | Callable[..., Any],
    after: fx.GraphModule,
    *args: torch.Tensor,
    exact: bool = False,
) -> None:
    """Hold a rewritten graph against the module: in float64, and in float32 within 64 epsilons."""
    reference = before if isinstance(before, nn.Module) else Does(before)
    with torch.no_grad():
        wide = [a.double() if a.is_floating_point() else a for a in args]
        wanted = leaves(copy.deepcopy(reference).double()(*wide))
        doubled = leaves(copy.deepcopy(after).double()(*wide))
        single = leaves(after(*args))
        plain = leaves(reference(*args))
    assert len(wanted) == len(doubled) == len(single) == len(plain)
    for w, d, s, p in zip(wanted, doubled, single, plain, strict=True):
        assert (s.shape, s.dtype) == (p.shape, p.dtype)
        assert _off(d, w) <= 1e-12
        assert _off(s.double(), w) <= 64 * torch.finfo(torch.float32).eps
        if exact:
            assert torch.equal(d, w)
            assert torch.equal(s, p)
            assert torch.equal(torch.signbit(s), torch.signbit(p))


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return torch.utils._pytree.tree_leaves(value)


def _off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error; NaN must be where NaN is."""
    assert torch.equal(got.isnan(), wanted.isnan())
    got, wanted = got.nan_to_num(), wanted.nan_to_num()
    scale = float(wanted.norm())
    return float((got - wanted).norm()) / scale if scale else float(got.norm())


def refuted(rule: Rule, wrong: Callable[..., Any]) -> bool:
    """Whether the proof finds a wrong variant of a rule's replacement out."""
    variant = replace(rule, replacement=wrong)
    return any(proof.prove(variant, seed).counterexample is not None for seed in range(3))
