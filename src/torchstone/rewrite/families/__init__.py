"""The rules, a file for each family, and the literal tuple of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from torchstone.rewrite.families import (
    attention,
    folding,
    kernels,
    longhand,
    norms,
    pooling,
    simplify,
    structured,
    transposed,
)
from torchstone.rewrite.rule import Rule

__all__ = ["PASSES", "RULES", "Pass"]

Pass = Callable[[fx.GraphModule], int]
"""Changes a graph where its constants allow it; gives how often."""

RULES: tuple[Rule, ...] = (
    *attention.RULES,
    *simplify.RULES,
    *longhand.RULES,
    *pooling.RULES,
    *norms.RULES,
    *folding.RULES,
    *structured.RULES,
    *transposed.RULES,
    *kernels.RULES,
)
"""Every rule; where several fit, the first that pays is taken."""

PASSES: Mapping[str, Pass] = {"attention": attention.settle}
"""By family."""
