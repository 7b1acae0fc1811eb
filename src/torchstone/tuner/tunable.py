"""What can be tuned: how to build it from a config, what to feed it, and what it must compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchstone.recipe import Numerics
from torchstone.records.tuning import Config
from torchstone.tuner.space import Space

__all__ = ["Tunable"]


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """A kernel, or anything else with knobs.

    Its functions run in worker processes, so they must be importable or pickle by value; a fresh process
    calls ``inputs`` and ``build`` anew.
    """

    name: str
    """For reports and for the cache."""
    build: Callable[[Config], Callable[..., Any]]
    """A function of the inputs for one config: gives a tensor, or a tuple of them. Expensive work that
    can be done ahead belongs here, except what Triton compiles: the tuner does that ahead."""
    space: Space
    """The configs."""
    inputs: Callable[..., tuple[Any, ...]]
    """``inputs(seed, **sizes)``: arguments for what ``build`` gives, the same for the same seed."""
    reference: Callable[..., Any] | None = None
    """The same function in plain PyTorch. It is run in float64 too, which is the truth. None: what the
    default config gives is taken for right, and nobody is held to more."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes to be fast at."""
    odd: tuple[Mapping[str, int], ...] = ()
    """Other sizes at which a winner must be right."""
    work: Callable[..., tuple[float, float]] | None = None
    """``work(**sizes)``: bytes that must move, and floating-point operations, for the roofline."""
    limits: Callable[[Config], Mapping[str, float]] | None = None
    """What a config needs of the device: ``shared_bytes``, ``threads``, ``registers`` (a thread)."""
    numerics: Numerics = Numerics.REASSOCIATES
    """What it promises about its numbers; tuning never changes it."""
    max_relative_error: float = 0.0
    """The budget, where ``numerics`` is LOSSY."""
