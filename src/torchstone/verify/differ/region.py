"""The operations at fault with names and values: what a report shows and a reproduction runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torchstone.records import OperandStats, Site
from torchstone.verify.differ.explain import Answer
from torchstone.verify.differ.search import Search
from torchstone.verify.differ.trace import Op, Trace, refs, site

__all__ = ["Region", "Side", "of_answer", "statistics"]


@dataclass
class Side:
    """Operations from named operands to one result."""

    ops: list[Op]
    """The operations, in order."""
    names: dict[int, str]
    """What each value is called: ``x0`` for an operand, ``t0`` for a result."""
    result: int
    """The value that counts."""

    def sites(self, named: Iterable[int] | None = None) -> tuple[Site, ...]:
        """The operations for a report; only those at these positions of :attr:`ops`, if given."""
        kept = range(len(self.ops)) if named is None else named
        return tuple(site(self.ops[k], lambda n: self.names.get(n, "?")) for k in kept)


@dataclass
class Region:
    """Both sides of a divergence, on the same operands."""

    a: Side
    """What should be done."""
    b: Side
    """What is done."""
    operands: dict[str, torch.Tensor] = field(default_factory=dict)
    """The operands by name: B's own values."""
    labels: dict[str, str] = field(default_factory=dict)
    """What an operand is where that is known: a parameter's path, ``input[0]``."""
    recorded: torch.Tensor | None = None
    """B's result as it was recorded."""


def of_answer(search: Search, answer: Answer) -> Region:
    """Name what an answer speaks of. Operands of which only a sample was kept are left out."""
    region = Region(
        a=Side([search.a.ops[k] for k in answer.a_ops], {}, answer.failed.a),
        b=Side([search.b.ops[k] for k in answer.b_ops], {}, answer.failed.b),
        recorded=search.b.values[answer.failed.b].tensor,
    )
    _name(region, region.b, search.b, lambda n: n)
    _name(region, region.a, search.a, search.stand_in.get, theirs=search)
    return region


def _name(
    region: Region,
    side: Side,
    trace: Trace,
    stands_for: Callable[[int], int | None],
    theirs: Search | None = None,
) -> None:
    """Name a side's operands, A's by the value of B that stands for them, then its results."""
    made = {n for op in side.ops for n in op.outs if n is not None}
    read = [n for op in side.ops for n in refs(op) if n not in made]
    for n in dict.fromkeys((*read, *(() if side.result in made else (side.result,)))):
        mine = stands_for(n)
        known = region.b.names.get(mine) if mine is not None else None
        if known is not None:
            side.names[n] = known
            continue
        value = trace.values[n] if mine is None or theirs is None else theirs.b.values[mine]
        side.names[n] = name = f"x{len(region.operands)}"
        if value.tensor is not None:
            alone = theirs is not None and mine is None  # A has it alone, perhaps widened
            region.operands[name] = theirs.narrow(value.tensor) if theirs and alone else value.tensor
        if value.name and value.name != "constant":
            region.labels[name] = value.name
        if theirs is not None and mine is not None:
            region.b.names.setdefault(mine, name)
    for n in (n for op in side.ops for n in dict.fromkeys(op.outs) if n is not None):
        side.names.setdefault(n, f"t{len(side.names)}")


def statistics(operands: dict[str, torch.Tensor], labels: dict[str, str]) -> tuple[OperandStats, ...]:
    """Figures of each operand."""
    return tuple(_figures(name, labels.get(name, ""), t) for name, t in operands.items())


def _figures(name: str, label: str, tensor: torch.Tensor) -> OperandStats:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    finite = real.detach().to(torch.float64)
    finite = finite[finite.isfinite()]
    some = finite.numel() > 0
    return OperandStats(
        name=f"{name} = {label}" if label else name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        low=float(finite.min()) if some else None,
        high=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
        rms=float(finite.square().mean().sqrt()) if some else None,
        non_finite=real.numel() - finite.numel(),
    )


def positions(ops: Sequence[int], named: Sequence[int]) -> list[int]:
    """Where the named operations are among these."""
    return [ops.index(k) for k in named if k in ops]
