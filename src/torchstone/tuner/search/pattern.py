"""Pattern search: steps of one knob from the best configs, and a new start where no step helps.

A generating set search (Kolda, Lewis and Torczon, "Optimization by Direct Search", SIAM Review 45(3),
2003) whose set is :meth:`~torchstone.tuner.space.Space.neighbours`, with several centres at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.search.base import Problem, Proposal, Seen
from torchstone.tuner.search.random import Simple, State, asked, opening
from torchstone.tuner.space import key_of

__all__ = ["Pattern", "PatternState", "beside"]


@dataclass(frozen=True)
class PatternState(State):
    """Which descent it is on."""

    since: int = 0
    """How many had been told when the descent began: its centres are among those told later."""


@dataclass(frozen=True)
class Pattern(Simple[PatternState]):
    """Descends from the best of some random configs, and starts anew at a local optimum."""

    starts: int = 16
    """Random configs of a start."""
    centres: int = 3
    """How many of the best are polled around."""
    patience: int = 96
    """Measurements without gain, over all starts, that are enough."""
    name: str = "pattern"

    def init(self, problem: Problem, seed: int) -> PatternState:
        """The first state."""
        return PatternState(problem, Seen(seed))

    def ask(self, state: PatternState, count: int) -> tuple[tuple[Proposal, ...], PatternState]:
        """Neighbours of the centres, the best centre's first; random configs at a start."""
        rng = state.seen.rng()
        proposals = opening(state.problem.space, state.seen)
        descent = state.seen.told[state.since :]
        if len(descent) >= self.starts:
            taken = state.seen.keys | {key_of(p.config) for p in proposals}
            steps = beside(state.problem, descent, self.centres, taken, rng)
            proposals += [Proposal(c, "neighbour") for c in steps]
            if not steps:  # a local optimum, or nothing of this start worked
                state = replace(state, since=len(state.seen.told))
        return asked(state, proposals, count, rng)


def beside(
    problem: Problem,
    told: Sequence[Measurement],
    centres: int,
    taken: frozenset[str],
    rng: np.random.Generator,
) -> list[Config]:
    """Neighbours, not ``taken``, of the quickest configs told; those of one centre in random order."""
    right = sorted((m for m in told if m.time is not None), key=lambda m: m.time or 0.0)
    found: dict[str, Config] = {}
    for centre in right[:centres]:
        near = problem.space.neighbours(centre.config)
        for i in rng.permutation(len(near)):
            key = key_of(near[i])
            if key not in taken:
                found.setdefault(key, near[i])
    return list(found.values())
