"""Likelihood-free Bayesian optimization: a forest that says good or bad filters neighbours of the best.

Song et al., "A General Recipe for Likelihood-free Bayesian Optimization", ICML 2022 (a classifier whose
good examples are weighted by their utility stands for expected improvement), after Tiao et al., "BORE:
Bayesian Optimization by Density-Ratio Estimation", ICML 2021. A forest is fitted anew for each batch,
chooses from many changes of a few copies of the best, and says by shared leaves which are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchstone.records.tuning import Config
from torchstone.tuner.search.base import Problem, Proposal, Seen
from torchstone.tuner.search.pattern import beside
from torchstone.tuner.search.random import Simple, State, asked, opening, unseen
from torchstone.tuner.search.surrogate import forest
from torchstone.tuner.space import key_of

__all__ = ["LFBO"]

_KIND = "RandomForestClassifier"


@dataclass(frozen=True)
class LFBO(Simple[State]):
    """Random start, then batches that a random forest thinks good and not alike."""

    start: int = 24
    """Measurements before the forest is asked."""
    copies: int = 15
    """How many of the best are changed."""
    changes: int = 60
    """Changed configs of each, from which to choose."""
    quantile: float = 0.1
    """Which share of those timed is good."""
    trees: int = 100
    """Trees of the forest."""
    variety: float = 0.5
    """What likeness, from 0 to 1, to one already chosen costs, in probability of being good."""
    patience: int = 96
    """Measurements without gain that are enough."""
    name: str = "lfbo"

    def init(self, problem: Problem, seed: int) -> State:
        """The first state.

        :raises EnvironmentLacksError: where scikit-learn is not installed.
        """
        forest(_KIND, self.trees, np.random.default_rng(0))
        return State(problem, Seen(seed))

    def ask(self, state: State, count: int) -> tuple[tuple[Proposal, ...], State]:
        """What the forest chooses; random configs at the start, or where all is good or all is bad."""
        rng = state.seen.rng()
        proposals = opening(state.problem.space, state.seen)
        if len(state.seen.told) >= self.start:
            fitted = self._fit(state, rng)
            if fitted is not None:
                pool = self._pool(state, rng)
                chosen = self._choose(fitted, state.problem.space.encode(pool), count) if pool else []
                proposals += [Proposal(pool[i], self.name) for i in chosen]
        return asked(state, proposals, count, rng)

    def _fit(self, state: State, rng: np.random.Generator) -> Any | None:
        """A forest of what was told; None where it is all of one class. What failed is bad."""
        told = state.seen.told
        cost = np.array([np.inf if m.time is None else np.log(max(m.time, 1e-12)) for m in told])
        if not np.isfinite(cost).any():
            return None
        bar = float(np.quantile(cost[np.isfinite(cost)], self.quantile))
        good = cost <= bar
        if good.all():
            return None
        weights = np.ones(len(told))
        utility = bar - cost[good] + 1e-3  # the bar itself is good, a little
        weights[good] = utility / utility.mean()
        encoded = state.problem.space.encode([m.config for m in told])
        made = forest(_KIND, self.trees, rng, criterion="log_loss", min_samples_leaf=2)
        return made.fit(encoded, good, sample_weight=weights)

    def _pool(self, state: State, rng: np.random.Generator) -> list[Config]:
        """Configs to choose from: neighbours and wider changes of the best, and some from anywhere."""
        space, seen = state.problem.space, state.seen
        pool = {key_of(c): c for c in beside(state.problem, seen.told, self.copies, seen.keys, rng)}
        right = sorted((m for m in seen.told if m.time is not None), key=lambda m: m.time or 0.0)
        for copy in right[: self.copies]:
            for _ in range(self.changes):
                changed = space.mutate(copy.config, rng, int(rng.integers(1, 4)))
                if changed is not None and key_of(changed) not in seen.keys:
                    pool.setdefault(key_of(changed), changed)
        for config in unseen(space, seen.keys | pool.keys(), rng, self.changes // 3):
            pool[key_of(config)] = config
        return list(pool.values())

    def _choose(self, fitted: Any, encoded: np.ndarray, count: int) -> list[int]:
        """The best by probability of being good, less likeness to those chosen before: shared leaves."""
        good = fitted.predict_proba(encoded)[:, 1]
        leaves = fitted.apply(encoded)
        alike, chosen = np.zeros(len(good)), list[int]()
        for _ in range(min(count, len(good))):
            score = good - self.variety * alike
            score[chosen] = -np.inf
            chosen.append(int(np.argmax(score)))
            alike = np.maximum(alike, (leaves == leaves[chosen[-1]]).mean(axis=1))
        return chosen
