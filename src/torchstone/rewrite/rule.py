"""Rules: an identity between two ways to compute the same, with its condition and its numerics class.

A rule is written once and used three times: its pattern is looked for in graphs, its replacement, plain
PyTorch, is traced into them, and both together are the proof: :mod:`torchstone.rewrite.proof` draws
tensors and constants from the rule's domain and holds one against the other in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchstone.recipe import Numerics
from torchstone.rewrite.pattern import Op, variables

__all__ = ["Family", "Rule", "anywhere", "rule"]

Family = Literal[
    "pooling", "norms", "folding", "transposed", "structured", "attention", "simplify", "kernels"
]


def anywhere(_device: torch.device) -> bool:
    """On every device."""
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One identity."""

    name: str
    """What the firing log calls it."""
    family: Family
    """Rules that are switched on together."""
    numerics: Numerics
    """EXACT: equal to the bit. REASSOCIATES: equal but for rounding. LOSSY is for number formats."""
    pattern: Op
    """What is replaced."""
    replacement: Callable[..., Any]
    """The other way: a function of the pattern's variables, in plain PyTorch. It may return
    ``NotImplemented`` where the identity does not hold or has nothing to offer."""
    shapes: Mapping[str, str]
    """Domain: the shape of each tensor variable, as ``"*b k"``: a size a letter or number, a star for
    any number of leading dims, a trailing question mark where there may be no tensor."""
    constants: Mapping[str, Sequence[Any]]
    """Domain: values of the other variables."""
    measured: bool = False
    """Whether it pays depends on the library's kernels, so both ways are timed where it is used."""
    runs: Callable[[torch.device], bool] = anywhere
    """On which devices the replacement is what it says."""
    always: bool = False
    """Whether nothing has to be weighed: it only ever removes work, or is weighed as a whole."""

    @property
    def identity(self) -> str:
        """The identity in words."""
        return inspect.getdoc(self.replacement) or ""


def rule(
    pattern: Op,
    *,
    family: Family,
    numerics: Numerics = Numerics.REASSOCIATES,
    shapes: Mapping[str, str],
    constants: Mapping[str, Sequence[Any]] | None = None,
    **more: Any,
) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule of its replacement.

    :raises TypeError: where the replacement's parameters or the domain are not the pattern's variables.
    """

    def make(replacement: Callable[..., Any]) -> Rule:
        wanted, name = set(variables(pattern)), getattr(replacement, "__name__", "rule")
        taken = set(inspect.signature(replacement).parameters)
        domain = {*shapes, *(constants or {})}
        if taken != wanted or domain != wanted:
            raise TypeError(f"rule {name}: variables {wanted}, parameters {taken}, domain {domain}")
        return Rule(
            name=name,
            family=family,
            numerics=numerics,
            pattern=pattern,
            replacement=replacement,
            shapes=shapes,
            constants=constants or {},
            **more,
        )

    return make
