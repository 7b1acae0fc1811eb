"""Guided search: models of the log of time, taught by all that is stored, choose small batches.

What siblings gave (the same kernel at other sizes, on other devices, of other versions) becomes a prior:
a forest for each sibling's time over its floor, and one pooled over all with the figures of size and
device. Each of them, their mean, and no prior at all are weighed by how likely they make what is
measured, so a sibling that misleads is soon forgotten. What the prior does not explain, :mod:`surrogate`
learns; a classifier learns from all failures what will not run. A batch mixes expected improvement
(Jones et al., J. Global Optimization 13, 1998), the best predictions, neighbours of the best measured,
and chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from torchstone.records.tuning import Config, Measurement
from torchstone.tuner.search.base import History, Problem, Proposal, Seen, Stop
from torchstone.tuner.search.surrogate import Array, each_tree, evidence, forest, process
from torchstone.tuner.space import Space, key_of

__all__ = ["Guided", "GuidedState", "Mix"]

_LEAST_SPREAD = 0.02  # of a prediction, in log seconds: no model is surer than measurements repeat
_HISTORY_ROWS = 4_000
_ENOUGH = 4  # timed configs that a model is fitted to


class Mix(NamedTuple):
    """Parts of a batch, relative to each other."""

    improvement: int = 3
    prediction: int = 0
    neighbour: int = 1
    chance: int = 0


@dataclass(frozen=True, eq=False)
class GuidedState:
    """What is known, and what was computed once from it."""

    seen: Seen
    problem: Problem
    pool: tuple[Config, ...]
    """Candidates: every valid config where they can be listed."""
    place: dict[str, int]
    """Of each candidate's key in the pool."""
    points: Array
    """Candidates as models see them, a row each."""
    prior: Array
    """One column a model of siblings: the log of time, up to a constant, of each candidate."""
    failed: Array
    """Share of siblings on which each candidate failed; 0 where none tried it."""
    gain: float | None = None
    """How much faster than the best the next batch was expected to be, a ratio less 1."""
    quiet: int = 0
    """Batches in a row of which next to nothing was expected."""
    polished: bool = False
    """Whether every neighbour of the best has been tried."""


@dataclass(frozen=True)
class Guided:
    """Ours.

    :param batch: configs of a batch where few can be built at once; half of those that can, otherwise.
    :param pool: candidates considered in a batch, where there are more.
    :param near: it stops within this of the roofline.
    :param least_gain: it stops after ``patience`` batches of which less is expected, and a polish.
    """

    trees: int = 64
    process: float = 0.7
    """Weight of the Gaussian process against the forest."""
    mix: Mix = field(default_factory=Mix)
    batch: int = 4
    centres: int = 3
    pool: int = 4096
    near: float = 0.03
    least_gain: float = 0.005
    patience: int = 4

    @property
    def name(self) -> str:
        """``guided``."""
        return "guided"

    def init(self, problem: Problem, seed: int) -> GuidedState:
        """See :class:`~torchstone.tuner.search.base.Searcher`; fits the models of siblings."""
        space = problem.space
        listed = space.all
        if listed is None:  # too many to list: a sample, and what neighbours of good ones add to it
            rng = np.random.default_rng([seed, 1 << 20])
            drawn = (space.default(), *(space.sample(rng) for _ in range(4 * self.pool)))
            listed = tuple({key_of(c): c for c in drawn}.values())
        points = _points(space, listed)
        prior, failed = _siblings(problem, listed, points, seed, self.trees)
        place = {key_of(c): i for i, c in enumerate(listed)}
        return GuidedState(Seen(seed), problem, listed, place, points, prior, failed)

    def tell(self, state: GuidedState, found: Sequence[Measurement]) -> GuidedState:
        """See :class:`~torchstone.tuner.search.base.Searcher`."""
        state = replace(state, seen=state.seen.hearing(found))
        best = state.seen.best
        if state.problem.space.all is None and best is not None:
            state = _widened(state, [best.config, *(m.config for m in found)])
        return state

    def done(self, state: GuidedState) -> Stop | None:
        """See :class:`~torchstone.tuner.search.base.Searcher`."""
        best, floor = state.seen.best, state.problem.floor_s
        if best is None or best.time is None:
            return None
        if floor is not None and best.time <= floor * (1 + self.near):
            text = f"the best is within {self.near:.0%} of the roofline"
            return Stop("NEAR_ROOFLINE", text, best.time / floor)
        if state.quiet > self.patience and state.polished:
            text = (
                f"less than {self.least_gain:.1%} expected of {self.patience} batches, neighbours tried"
            )
            return Stop("NO_GAIN_EXPECTED", text, 1 + (state.gain or 0.0))
        return None

    def ask(self, state: GuidedState, count: int) -> tuple[tuple[Proposal, ...], GuidedState]:
        """See :class:`~torchstone.tuner.search.base.Searcher`."""
        rng = state.seen.rng()
        free = np.array([i for k, i in state.place.items() if k not in state.seen.keys], dtype=np.int64)
        if len(free) == 0:
            return (), replace(state, seen=state.seen.after(()))
        chosen = _Chosen(state, min(count, max(self.batch, count // 2)))
        if not state.seen.told:
            _first(state, chosen, free)
        elif sum(m.time is not None for m in state.seen.told) >= _ENOUGH:
            state = self._modelled(state, chosen, free, rng)
        chosen.add(rng.permutation(free), "random")
        proposals = chosen.proposals()
        return proposals, replace(state, seen=state.seen.after(proposals))

    def _modelled(
        self, state: GuidedState, chosen: _Chosen, free: Array, rng: np.random.Generator
    ) -> GuidedState:
        told = [(state.place[k], m) for m in state.seen.told if (k := key_of(m.config)) in state.place]
        at = np.array([i for i, m in told if m.time is not None])
        times = np.log(np.array([m.time for _, m in told if m.time is not None], dtype=np.float64))
        order = at[np.argsort(times, kind="stable")]
        near = _near(state, free, order[: self.centres])
        if len(free) > self.pool:
            free = np.union1d(rng.permutation(free)[: self.pool], near)
        mean, spread = self._predict(state, at, times, free, rng)
        works = self._works(state, told, free, rng)
        improvement = _expected(float(times.min()), mean, spread) * works
        ranked = free[np.argsort(mean - np.log(np.maximum(works, 1e-3)), kind="stable")]
        gain = float(improvement.max())
        quiet = state.quiet + 1 if gain < self.least_gain else 0
        if quiet > self.patience:  # polish: every neighbour of the best that is left
            own = ranked[np.isin(ranked, _near(state, free, order[:1]))]
            chosen.add(own, "polish")
            state = replace(state, polished=len(own) == 0)
        parts = [round(chosen.count * part / sum(self.mix)) for part in self.mix]
        chosen.add(_apart(state.points, free, improvement, parts[0]), "expected-improvement", parts[0])
        chosen.add(ranked, "prediction", parts[1])
        chosen.add(ranked[np.isin(ranked, near)], "neighbour", parts[2])
        chosen.add(rng.permutation(free), "random", parts[3])
        chosen.add(ranked, "prediction")
        return replace(state, gain=math.expm1(gain), quiet=quiet)

    def _predict(
        self, state: GuidedState, at: Array, times: Array, free: Array, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """Mean and standard deviation of the log of time of candidates."""
        known, line = state.points, _line(state, at, times)
        rest = times - line[at]
        fitted = forest("ExtraTreesRegressor", self.trees, rng).fit(known[at], rest)
        each = each_tree(fitted, known[free])
        mean, variance = process(known[at], rest, known[free])
        share = self.process
        spread = np.sqrt(share * variance + (1 - share) * each.var(0) + _LEAST_SPREAD**2)
        return line[free] + share * mean + (1 - share) * each.mean(0), spread

    def _works(
        self,
        state: GuidedState,
        told: Sequence[tuple[int, Measurement]],
        free: Array,
        rng: np.random.Generator,
    ) -> Array:
        """Probability that a candidate can be measured."""
        broken = np.array([m.time is None for _, m in told])
        known: Array = 0.9 * state.failed[free]
        if not broken.any() or broken.all():
            return 1.0 - known
        at = np.array([i for i, _ in told])
        fitted = forest("ExtraTreesClassifier", self.trees, rng).fit(state.points[at], broken)
        fails: Array = fitted.predict_proba(state.points[free])[:, 1]
        return 1.0 - np.maximum(fails, known)


class _Chosen:
    """A batch as it fills: each config once, no more than asked for."""

    def __init__(self, state: GuidedState, count: int) -> None:
        self.count = count
        self._state = state
        self._by: dict[int, str] = {}

    def add(self, places: Sequence[int] | Array, by: str, most: int | None = None) -> None:
        """Take at most ``most`` that are not taken yet, in order."""
        left = self.count - len(self._by) if most is None else min(most, self.count - len(self._by))
        for place in places:
            if left <= 0:
                return
            if int(place) not in self._by:
                self._by[int(place)] = by
                left -= 1

    def proposals(self) -> tuple[Proposal, ...]:
        """What was taken."""
        return tuple(Proposal(dict(self._state.pool[i]), by) for i, by in self._by.items())


def _first(state: GuidedState, chosen: _Chosen, free: Array) -> None:
    """The author's default, and what siblings recommend."""
    default = state.place.get(key_of(state.problem.space.default()))
    if default is not None:
        chosen.add([default], "default")
    if state.prior.shape[1]:
        works = 1 - state.failed[free]
        for column in state.prior.T[: chosen.count // 2]:  # each sibling's own best
            chosen.add(_apart(state.points, free, np.exp(-column[free]) * works, 1), "prior")
        score = np.exp(-state.prior[free].mean(1)) * works
        chosen.add(_apart(state.points, free, score, chosen.count), "prior")


def _points(space: Space, configs: Sequence[Config]) -> Array:
    """Configs as models see them, columns scaled to [0, 1] over these.

    Beside the space's own encoding, integers that need not be powers of two say which power divides
    them: what makes memory accesses whole and vectors full.
    """
    columns = [space.encode(configs)]
    for name, knob in space.knobs.items():
        numbers = [v for v in knob.values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
        if len(numbers) > 2 and any(n & (n - 1) for n in numbers):
            values = (c[name] for c in configs)
            divisor = [v & -v if isinstance(v, int) and v > 0 else 1 for v in values]
            columns.append(np.log2(np.array(divisor, dtype=np.float64)).reshape(-1, 1))
    return _scaled(np.concatenate(columns, axis=1))


def _scaled(columns: Array) -> Array:
    low, width = columns.min(0, initial=np.inf), np.ptp(columns, axis=0)
    scaled: Array = ((columns - low) / np.where(width > 0, width, 1.0))[:, width > 0]
    return scaled


def _siblings(
    problem: Problem, pool: tuple[Config, ...], points: Array, seed: int, trees: int
) -> tuple[Array, Array]:
    """Predictions of models of the siblings, a column each, and the share on which candidates failed."""
    place = {key_of(c): i for i, c in enumerate(pool)}
    rng = np.random.default_rng([seed, 1 << 21])
    columns, pooled = [], []
    failed, tried = np.zeros(len(pool)), np.zeros(len(pool))
    for history in problem.histories:
        rows = [(place[k], m) for m in history.measurements if (k := key_of(m.config)) in place]
        for i, m in rows:
            tried[i] += 1
            failed[i] += m.time is None
        timed = [(i, m.time) for i, m in rows if m.time is not None]
        if len(timed) > _HISTORY_ROWS:
            timed = [timed[i] for i in sorted(rng.permutation(len(timed))[:_HISTORY_ROWS].tolist())]
        if len(timed) >= _ENOUGH:
            at = np.array([i for i, _ in timed])
            times = np.log(np.array([t for _, t in timed]))
            columns.append(
                forest("ExtraTreesRegressor", trees, rng).fit(points[at], times).predict(points)
            )
            pooled.append(
                (at, times - (math.log(history.floor_s) if history.floor_s else times.min()), history)
            )
    if len(pooled) > 1:
        columns.append(_pooled(problem, pooled, points, trees, rng))
    prior = np.stack([c - c.mean() for c in columns], axis=1) if columns else np.zeros((len(pool), 0))
    return prior, failed / np.maximum(tried, 1)


def _pooled(
    problem: Problem,
    parts: Sequence[tuple[Array, Array, History]],
    points: Array,
    trees: int,
    rng: np.random.Generator,
) -> Array:
    """One forest for all siblings, told their sizes and devices, asked about this problem's."""
    names = sorted(n for n in problem.features if all(n in h.features for _, _, h in parts))

    def told(rows: Array, features: dict[str, float]) -> Array:
        figures = np.log2(1 + np.abs([features[n] for n in names]))
        return np.concatenate([rows, np.tile(figures, (len(rows), 1))], axis=1)

    inputs = np.concatenate([told(points[at], dict(h.features)) for at, _, h in parts])
    values = np.concatenate([times for _, times, _ in parts])
    predicted: Array = (
        forest("ExtraTreesRegressor", trees, rng)
        .fit(inputs, values)
        .predict(told(points, dict(problem.features)))
    )
    return predicted


def _line(state: GuidedState, at: Array, times: Array) -> Array:
    """What is expected before anything is learned: nothing, one sibling's times, or their mean.

    Each is weighed by how likely it makes what is measured.
    """
    priors = [np.zeros(len(state.pool))]
    if state.prior.shape[1]:
        priors += [state.prior.mean(1), *state.prior.T]
    if len(priors) == 1:
        return np.full(len(state.pool), times.mean())
    likely = np.array([evidence(state.points[at], times - prior[at]) for prior in priors])
    weights = np.exp(likely - likely.max())
    lines = [prior + (times - prior[at]).mean() for prior in priors]
    line: Array = np.average(lines, axis=0, weights=weights)
    return line


def _expected(best: float, mean: Array, spread: Array) -> Array:
    """Expected improvement over ``best``, of logs."""
    z = (best - mean) / spread
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in z]))
    improvement: Array = spread * (z * below + density)
    return improvement


def _apart(points: Array, free: Array, score: Array, count: int) -> list[int]:
    """The best by score, each making what lies near it less attractive."""
    score, taken = score.copy(), []
    for _ in range(min(count, len(free))):
        top = int(score.argmax())
        taken.append(int(free[top]))
        apart = np.abs(points[free] - points[free[top]]).sum(1)
        score *= 1 - 0.7 * np.exp(-4 * apart)
        score[top] = -np.inf
    return taken


def _near(state: GuidedState, free: Array, centres: Array) -> Array:
    """Candidates that are neighbours of the centres."""
    space = state.problem.space
    keys = [key_of(n) for i in centres.tolist() for n in space.neighbours(state.pool[int(i)])]
    found = np.array([state.place[k] for k in keys if k in state.place], dtype=np.int64)
    return np.intersect1d(found, free)


def _widened(state: GuidedState, around: Sequence[Config]) -> GuidedState:
    """With what was told, and its neighbours, among the candidates."""
    space = state.problem.space
    near = (one for config in around for one in (config, *space.neighbours(config)))
    more = {k: one for one in near if (k := key_of(one)) not in state.place}
    if not more:
        return state
    pool = (*state.pool, *more.values())
    prior = np.repeat(state.prior.mean(0, keepdims=True), len(more), axis=0)
    return replace(
        state,
        pool=pool,
        place={**state.place, **{k: len(state.pool) + i for i, k in enumerate(more)}},
        points=_points(space, pool),
        prior=np.concatenate([state.prior, prior]),
        failed=np.concatenate([state.failed, np.zeros(len(more))]),
    )
