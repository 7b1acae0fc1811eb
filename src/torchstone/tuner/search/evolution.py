"""Differential evolution for mixed spaces.

Storn and Price, "Differential Evolution - A Simple and Efficient Heuristic for Global Optimization
over Continuous Spaces", J. Global Optimization 11, 1997: rand/1/bin. Knobs in order move by places in
their list of values, rounded at random; others change only where the two that are subtracted differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchstone.records.tuning import Config, Measurement, Value
from torchstone.tuner.search.base import Problem, Proposal, Seen
from torchstone.tuner.search.random import Simple, State, asked, hearing, opening
from torchstone.tuner.space import Space, key_of

__all__ = ["Evolution", "EvolutionState"]

_ATTEMPTS = 12
_DONORS = 4


@dataclass(frozen=True)
class EvolutionState(State):
    """The population."""

    members: tuple[Measurement, ...] = ()
    """Configs with a time, one a slot."""
    trials: tuple[tuple[str, int], ...] = ()
    """Keys of what was proposed and not yet told, each with the slot that it challenges."""
    turn: int = 0
    """How many slots were challenged."""


@dataclass(frozen=True)
class Evolution(Simple[EvolutionState]):
    """A population whose members are challenged by mixes of themselves and of what others differ in."""

    size: int = 12
    """Members of the population."""
    scale: tuple[float, float] = (0.4, 1.0)
    """Range of the factor of differences, drawn for each trial."""
    patience: int = 120
    """Measurements without gain that are enough."""
    name: str = "evolution"

    def init(self, problem: Problem, seed: int) -> EvolutionState:
        """The first state."""
        return EvolutionState(problem, Seen(seed))

    def ask(self, state: EvolutionState, count: int) -> tuple[tuple[Proposal, ...], EvolutionState]:
        """Trials against the next slots; random configs until there is a population."""
        rng = state.seen.rng()
        proposals = opening(state.problem.space, state.seen)
        members = state.members
        full = len(members) >= self.size or len(state.seen.told) >= 3 * self.size
        if not full or len(members) < _DONORS:
            return asked(state, proposals, count, rng)
        taken = set(state.seen.keys) | {key_of(p.config) for p in proposals}
        trials = dict(state.trials)
        turns = range(state.turn, state.turn + count - len(proposals))
        for turn in turns:
            slot = turn % len(members)
            trial = self._trial(state, slot, taken, rng)
            if trial is not None:
                taken.add(key_of(trial))
                trials[key_of(trial)] = slot
                proposals.append(Proposal(trial, "evolution"))
        state = replace(state, trials=tuple(trials.items()), turn=state.turn + len(turns))
        return asked(state, proposals, count, rng)

    def tell(self, state: EvolutionState, found: Sequence[Measurement]) -> EvolutionState:
        """A trial that is quicker takes its slot; what was not a trial takes the slowest's."""
        members, trials = list(state.members), dict(state.trials)
        for one in found:
            slot = trials.pop(key_of(one.config), None)
            if one.time is None:
                continue
            if slot is None and len(members) < self.size:
                members.append(one)
                continue
            slot = max(range(len(members)), key=lambda i: _time(members[i])) if slot is None else slot
            if one.time <= _time(members[slot]):
                members[slot] = one
        return replace(hearing(state, found), members=tuple(members), trials=tuple(trials.items()))

    def _trial(
        self, state: EvolutionState, slot: int, taken: set[str], rng: np.random.Generator
    ) -> Config | None:
        space, target = state.problem.space, state.members[slot].config
        others = [i for i in range(len(state.members)) if i != slot]
        for attempt in range(_ATTEMPTS):
            a, b, c = (state.members[i].config for i in rng.permutation(others)[:3])
            factor = rng.uniform(*self.scale)
            donor = {n: _moved(space, n, (a[n], b[n], c[n]), factor, rng) for n in space.knobs}
            trial = space.mix(donor, target, rng)
            if trial is None or key_of(trial) in taken:  # a population that agrees needs news
                trial = space.mutate(target, rng, 1 + attempt // 4)
            if trial is not None and key_of(trial) not in taken:
                return trial
        return None


def _moved(
    space: Space, name: str, abc: tuple[Value, Value, Value], factor: float, rng: np.random.Generator
) -> Value:
    """``a + factor * (b - c)`` for one knob."""
    a, b, c = abc
    if b == c:
        return a
    if not space.ordered(name):
        return b if rng.random() < factor else a
    values = space.knobs[name].values
    at = values.index(a) + factor * (values.index(b) - values.index(c))
    return values[min(max(math.floor(at + rng.random()), 0), len(values) - 1)]


def _time(one: Measurement) -> float:
    return math.inf if one.time is None else one.time
