"""Candidates that run another program: rewritten, with kernels of ours, with split or half products.

Each is captured for the problem's sizes, in training mode as the suite has it, rewritten by proven rules
(:mod:`torchstone.rewrite`), and compiled. State is shared with the module that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from torchstone import compat
from torchstone.kernelbench.columns import Noted, Unfit
from torchstone.quantize.products import converted
from torchstone.recipe import FAMILIES, Rewrite
from torchstone.records import Unsupported
from torchstone.rewrite.program import rewrite_module

__all__ = ["IDENTITIES", "Rewritten", "contiguous"]

IDENTITIES = ".".join(name for name in FAMILIES if name != "kernels")
"""Families whose rules leave all kernels to the compiler."""


@dataclass(frozen=True)
class Rewritten:
    """Builds a problem's program anew."""

    families: str | None = IDENTITIES
    """Of rules, joined by a dot; None for none."""
    products: str | None = None
    """Format of products, as ``precision`` has it: split (``bf16x3``) or half (``fp16_products``);
    None as they are."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
        """A compiled callable; ``Unfit`` where it would be another candidate's program."""
        found: nn.Module = module
        notes = []
        if self.families is not None:
            rewritten = rewrite_module(module, inputs, Rewrite(self.families))
            if isinstance(rewritten, Unsupported):
                return Unfit(rewritten.text)
            found, log = rewritten
            if self.families == "all" and all(f.family != "kernels" for f in log.fired):
                return Unfit("no kernel of ours has a place in it")
            notes.append(", ".join(dict.fromkeys(f.rule for f in log.fired)))
        if self.products is not None:
            products = _with_products(found, inputs, self.products)
            if isinstance(products, Unfit):
                return products
            found, counts = products
            notes.append(", ".join(f"{n} {kind} products" for kind, n in counts.items()))
        # a layout chosen inside is nobody else's business, and costs less where it is compiled along
        call = torch.compile(lambda *given: tree_map(contiguous, found(*given)))
        return Noted(call, "; ".join(notes))


def _with_products(
    module: nn.Module, inputs: tuple[Any, ...], form: str
) -> tuple[fx.GraphModule, dict[str, int]] | Unfit:
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs)
    except compat.capture_errors() as error:
        return Unfit(f"it cannot be one graph: {' '.join(str(error).split())[:200]}")
    found, counts = converted(program, form)
    if all(counts.values()):
        return found, counts
    absent = " and ".join(kind for kind, count in counts.items() if not count)
    return Unfit(f"it has no float32 product that is large enough to be {absent}")


def contiguous(value: Any) -> Any:
    """In the layout that eager gives."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value
