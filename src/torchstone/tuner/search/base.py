"""What a searcher is: frozen hyperparameters, and four pure functions of a state.

It never measures and never keeps time. Its random state is in the state: the same seed and the same
measurements give the same proposals, on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.space import Space, key_of

__all__ = ["History", "Problem", "Proposal", "Searcher", "Seen", "Stop"]


@dataclass(frozen=True)
class History:
    """What is known of a sibling: the same space at another size, or on another device."""

    measurements: tuple[Measurement, ...]
    features: Mapping[str, float] = field(default_factory=dict)
    floor_s: float | None = None


@dataclass(frozen=True)
class Problem:
    """What is searched."""

    space: Space
    features: Mapping[str, float] = field(default_factory=dict)
    """Figures of the problem's sizes and of the device, the same for all configs."""
    floor_s: float | None = None
    """Seconds below which no config can be, if known: the roofline."""
    histories: tuple[History, ...] = ()
    """What siblings gave; priors to learn from, never answers."""
    lanes: int = 1
    """Configs that can be built at once: how many to ask for at a time."""
    about: str = ""
    """What is tuned, in words: for a searcher that reads."""


@dataclass(frozen=True)
class Proposal:
    """A config to measure."""

    config: Config
    by: str
    """Which part of the searcher wants it."""


@dataclass(frozen=True)
class Stop:
    """Why a searcher has had enough."""

    code: str
    """``EXHAUSTED``, ``NEAR_ROOFLINE``, ``NO_GAIN_EXPECTED``, ``CONVERGED``, ``ENOUGH``."""
    text: str
    regret: float | None = None
    """How much faster than the best the optimum is expected to be, a ratio; None: nothing is known."""


@dataclass(frozen=True)
class Seen:
    """What a searcher has proposed and been told; every state has one."""

    seed: int
    asked: int = 0
    """Number of calls of ``ask``: with the seed, the random state."""
    keys: frozenset[str] = frozenset()
    """Every config proposed or told, by key."""
    told: tuple[Measurement, ...] = ()
    """In the order told."""

    def rng(self) -> np.random.Generator:
        """The random numbers of this call of ``ask``."""
        return np.random.default_rng([self.seed, self.asked])

    def after(self, proposals: Sequence[Proposal]) -> Seen:
        """With these proposed."""
        keys = self.keys | {key_of(p.config) for p in proposals}
        return Seen(self.seed, self.asked + 1, keys, self.told)

    def hearing(self, found: Sequence[Measurement]) -> Seen:
        """With these told."""
        keys = self.keys | {key_of(m.config) for m in found}
        return Seen(self.seed, self.asked, keys, (*self.told, *found))

    @property
    def best(self) -> Measurement | None:
        """The quickest that is right."""
        return min(
            (m for m in self.told if m.time is not None), key=lambda m: m.time or 0.0, default=None
        )


S = TypeVar("S")


class Searcher(Protocol[S]):
    """Chooses what to measure. Implementations are frozen dataclasses; ``S`` is their state, a value.

    A proposal is always a valid config of the space that was neither proposed nor told before; where
    none is left, ``ask`` gives fewer, or none.
    """

    @property
    def name(self) -> str:
        """Its name, for reports."""

    def init(self, problem: Problem, seed: int) -> S:
        """The first state."""

    def ask(self, state: S, count: int) -> tuple[tuple[Proposal, ...], S]:
        """At most ``count`` configs to measure next."""

    def tell(self, state: S, found: Sequence[Measurement]) -> S:
        """What was measured, asked for or not."""

    def done(self, state: S) -> Stop | None:
        """Why there is no use in going on; None while there is."""


AnySearcher = Searcher[Any]
