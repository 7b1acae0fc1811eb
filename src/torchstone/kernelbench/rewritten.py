"""Candidates that run another program: rewritten, with kernels of ours, with split products.

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
from torchstone.kernelbench.columns import Unfit
from torchstone.quantize.split import PARTS, split
from torchstone.recipe import FAMILIES, Rewrite
from torchstone.records import Unsupported
from torchstone.rewrite.program import rewrite_module

__all__ = ["IDENTITIES", "Rewritten"]

IDENTITIES = ".".join(name for name in FAMILIES if name != "kernels")
"""Families whose rules leave all kernels to the compiler."""


@dataclass(frozen=True)
class Rewritten:
    """Builds a problem's program anew."""

    families: str | None = IDENTITIES
    """Of rules, joined by a dot; None for none."""
    split: str | None = None
    """Format of split products, see :data:`torchstone.quantize.split.PARTS`; None for none."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any] | Unfit:
        """A compiled callable; ``Unfit`` where nothing was rewritten or split."""
        found: nn.Module = module
        rewritten = None
        if self.families is not None:
            rewritten = rewrite_module(module, inputs, Rewrite(self.families))
            if not isinstance(rewritten, Unsupported):
                found, log = rewritten
                if self.families == "all" and all(f.family != "kernels" for f in log.fired):
                    return Unfit("no kernel of ours has a place in it")
            elif self.split is None:
                return Unfit(rewritten.text)
        if self.split is not None:
            products = _split(found, inputs, PARTS[self.split])
            if isinstance(products, Unfit):
                return products
            found = products
        call = torch.compile(found)
        return lambda *given: tree_map(_contiguous, call(*given))


def _split(module: nn.Module, inputs: tuple[Any, ...], parts: int) -> fx.GraphModule | Unfit:
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs)
    except compat.capture_errors() as error:
        return Unfit(f"it cannot be one graph: {' '.join(str(error).split())[:200]}")
    found, count = split(program, parts)
    return found if count else Unfit("it has no float32 product large enough to be split")


def _contiguous(value: Any) -> Any:
    """In the layout that eager gives: a layout chosen inside is nobody else's business."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value
