"""The proof of a rule: both ways of computing, on tensors drawn from the rule's domain, in float64.

Sizes are drawn from 1 upwards, odd ones and repeats among them; tensors have any strides (contiguous,
transposed, every other element, expanded) and magnitudes; constants are drawn from their lists. An
identity that REASSOCIATES must hold in float64 to a bound from that dtype, many thousand times finer
than what float32 would forgive: an identity that is only nearly one does not pass. One that is EXACT
must be equal to the bit, in float32 too. Infinities and NaN are not drawn where a rule only
reassociates.

Beyond what :class:`~torchstone.rewrite.rule.Rule` says of its domain, a size may be a product,
``"g*i"``, or drawn below a number, ``"k<4"``; a leading plus, ``"+n"``, draws no negative entries, and
a tilde, ``"~n"``, none but of magnitude one; bars part shapes of which one is drawn, ``"n|1 n|"``, the
last of them a scalar here. A variable with a shape and with values is one or the other, and a constant
whose values are a string is the size of that name, as the number of groups of a convolution is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from torchstone.recipe import Numerics
from torchstone.rewrite.pattern import evaluate
from torchstone.rewrite.rule import Rule

__all__ = ["Counterexample", "Proof", "draw", "prove"]

_SIZES = (1, 1, 2, 3, 4, 5, 7, 8)
_BOUND = 1e-11
_SCALES = (1.0, 1.0, 1e-3, 1e3)
_TRIES = 60


@dataclass(frozen=True)
class Counterexample:
    """Where the two ways differ."""

    given: dict[str, Any]
    """What the variables stood for; tensors as their shape and strides."""
    text: str
    """How they differ."""


@dataclass(frozen=True)
class Proof:
    """What a number of draws came to."""

    held: int
    """Draws on which both ways agree."""
    refused: int
    """Draws that the pattern or the replacement does not take."""
    worst: float
    """Largest relative error in float64."""
    counterexample: Counterexample | None
    """The first draw on which they do not agree; None where there is none."""


def prove(rule: Rule, seed: int = 0, draws: int = _TRIES) -> Proof:
    """Hold a rule's two ways against each other.

    :param draws: how many; those that the pattern itself refuses (a kernel larger than its input) are
        counted apart.
    """
    held, refused, worst = 0, 0, 0.0
    for given in draw(rule, random.Random(seed), draws):
        dtypes = (torch.float64, torch.float32) if rule.numerics is Numerics.EXACT else (torch.float64,)
        for dtype in dtypes:
            cast = {n: _cast(v, dtype) for n, v in given.items()}
            with torch.no_grad():
                try:
                    wanted = evaluate(rule.pattern, cast)
                except (
                    RuntimeError,
                    IndexError,
                    ValueError,
                ):  # no such call: nothing to hold it against
                    refused += 1
                    break
                got = rule.replacement(**cast)
            if got is NotImplemented:
                refused += 1
                break
            error, text = _distance(got, wanted, exact=rule.numerics is Numerics.EXACT)
            worst = max(worst, error)
            if text:
                return Proof(held, refused, worst, Counterexample(_described(given), text))
        else:
            held += 1
    return Proof(held, refused, worst, None)


def draw(rule: Rule, rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Values of a rule's variables."""
    for _ in range(count):
        sizes: dict[str, list[int]] = {}
        chosen = {n: values for n, values in rule.constants.items() if not isinstance(values, str)}
        found = {name: rng.choice(list(values)) for name, values in chosen.items()}
        for name, shape in rule.shapes.items():
            if name not in found or rng.random() < 0.6:
                found[name] = _tensor(shape, sizes, rng)
        for name in rule.constants.keys() - chosen.keys():
            (found[name],) = sizes[str(rule.constants[name])]
        yield found


def _tensor(shape: str, sizes: dict[str, list[int]], rng: random.Random) -> torch.Tensor | None:
    if shape.endswith("?"):
        if rng.random() < 0.4:
            return None
        shape = shape[:-1]
    shape, full = rng.choice(shape.split("|")), []
    for word in shape.lstrip("+~").split():
        full += _sizes(word, sizes, rng)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    scale = rng.choice(_SCALES) if not shape.startswith("~") else 1.0
    made = _strided(full, generator, rng.randrange(4)) * scale
    return made.abs() if shape.startswith("+") else made


def _sizes(word: str, sizes: dict[str, list[int]], rng: random.Random) -> list[int]:
    """The sizes that a word of a shape stands for: one, but for a star's."""
    if word.startswith("*"):
        if word not in sizes:
            sizes[word] = [rng.choice(_SIZES) for _ in range(rng.randrange(4))]
        return sizes[word]
    product = 1
    for factor in word.split("*"):
        name, _, below = factor.partition("<")
        if name not in sizes and not name.isdigit():
            sizes[name] = [rng.choice([s for s in _SIZES if not below or s < int(below)])]
        product *= int(name) if name.isdigit() else sizes[name][0]
    return [product]


def _strided(shape: list[int], generator: torch.Generator, how: int) -> torch.Tensor:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    if how == 1 and len(shape) > 1:  # as if transposed
        return normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if how == 2 and shape:  # every other element, not from the first on
        return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    if how == 3 and len(shape) > 1:  # one row for all
        return normal(1, *shape[1:]).expand(shape)
    return normal(*shape)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _distance(got: Any, wanted: Any, *, exact: bool) -> tuple[float, str]:
    ours, theirs = _pytree.tree_leaves(got), _pytree.tree_leaves(wanted)
    if len(ours) != len(theirs):
        return 0.0, f"{len(ours)} results, not {len(theirs)}"
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return worst, f"{tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}"
        if exact and not torch.equal(a, b):
            return worst, f"{int((a != b).sum())} of {a.numel()} elements differ, and the rule is exact"
        scale = float(b.double().norm())
        error = float((a.double() - b.double()).norm()) / scale if scale else float(a.double().norm())
        worst = max(worst, error)
        if not error <= _BOUND:
            return worst, f"off by {error:.1e} of the result in float64"
    return worst, ""


def _described(given: dict[str, Any]) -> dict[str, Any]:
    return {
        n: f"{tuple(v.shape)} strides {v.stride()}" if isinstance(v, torch.Tensor) else v
        for n, v in given.items()
    }
