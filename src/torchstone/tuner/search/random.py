"""Random search, and what simple searchers share: a state, an opening, fresh configs, when to stop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from torchstone.errors import InputError
from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.search.base import Problem, Proposal, Seen, Stop
from torchstone.tuner.space import Space, key_of

__all__ = ["Random", "Simple", "State", "asked", "hearing", "opening", "stop", "unseen"]

_TRIES = 30
_EMPTY = 10


@dataclass(frozen=True)
class State:
    """What every simple searcher knows."""

    problem: Problem
    seen: Seen
    known: int = 0
    """How many measurements were told before the first ``ask``."""
    dry: bool = False
    """Whether the last ``ask`` could not find as many configs as it was to."""


AnyState = TypeVar("AnyState", bound=State)


class Simple(Generic[AnyState]):
    """What simple searchers do alike: remember, and stop where nothing gets better."""

    @property
    def patience(self) -> int | None:
        """Measurements without gain that are enough; None: no number is."""
        return None

    def tell(self, state: AnyState, found: Sequence[Measurement]) -> AnyState:
        """Only remembers."""
        return hearing(state, found)

    def done(self, state: AnyState) -> Stop | None:
        """When nothing is left, or nothing gets better."""
        return stop(state, self.patience)


@dataclass(frozen=True)
class Random(Simple[State]):
    """Random configs, each valid one as likely as another: what any other searcher has to beat."""

    name: str = "random"

    def init(self, problem: Problem, seed: int) -> State:
        """The first state."""
        return State(problem, Seen(seed))

    def ask(self, state: State, count: int) -> tuple[tuple[Proposal, ...], State]:
        """The default, then what chance brings."""
        return asked(state, opening(state.problem.space, state.seen), count, state.seen.rng())


def opening(space: Space, seen: Seen) -> list[Proposal]:
    """The default config at the first ``ask``, unless it was told before."""
    if seen.asked:
        return []
    default = space.default()
    return [] if key_of(default) in seen.keys else [Proposal(default, "default")]


def unseen(space: Space, keys: Collection[str], rng: np.random.Generator, count: int) -> list[Config]:
    """Random valid configs whose keys are not among ``keys``; fewer where no more are found."""
    taken, found, empty = set(keys), list[Config](), 0
    for _ in range(_TRIES * count):
        if len(found) == count:
            return found
        if empty == _EMPTY:
            break
        try:
            config = space.sample(rng)
        except InputError:  # nothing valid in many draws: it is rare, but there may be some
            empty += 1
            continue
        if key_of(config) not in taken:
            taken.add(key_of(config))
            found.append(config)
    left = [c for c in space.all or () if key_of(c) not in taken] if len(found) < count else []
    return found + [dict(left[i]) for i in rng.permutation(len(left))[: count - len(found)]]


def asked(
    state: AnyState, proposals: list[Proposal], count: int, rng: np.random.Generator
) -> tuple[tuple[Proposal, ...], AnyState]:
    """The proposals, filled up to ``count`` with random ones, and the state that has proposed them."""
    proposals = proposals[:count]
    keys = state.seen.keys | {key_of(p.config) for p in proposals}
    drawn = unseen(state.problem.space, keys, rng, count - len(proposals))
    made = (*proposals, *(Proposal(c, "random") for c in drawn))
    return made, replace(state, seen=state.seen.after(made), dry=len(made) < count)


def hearing(state: AnyState, found: Sequence[Measurement]) -> AnyState:
    """The state that was told these."""
    seen = state.seen.hearing(found)
    return replace(state, seen=seen, known=state.known if seen.asked else len(seen.told))


def stop(state: State, patience: int | None = None) -> Stop | None:
    """Stop where nothing is left, or where ``patience`` measurements in a row brought nothing better."""
    if state.dry:
        return Stop("EXHAUSTED", "no config is left that was not tried")
    best, told = state.seen.best, state.seen.told
    if patience is None or best is None:
        return None
    since = len(told) - max(told.index(best) + 1, state.known)
    if since < patience:
        return None
    return Stop("CONVERGED", f"the last {since} measurements brought nothing better")
