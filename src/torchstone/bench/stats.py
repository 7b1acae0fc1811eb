"""Comparing samples of one interleaved session. Pure; numpy only.

**Statistic.** For request *j* of round *i*, the log ratio ``r[i, j]`` of the two times: whatever both
labels met alike in that round drops out. The requests of a round are then weighted by what they cost:
with ``w`` and ``v`` the shares of each request in the candidate's and in the other's pass (medians over
rounds), ``d[i]`` is half of ``log(sum w exp r) - log(sum v exp -r)``. That is Fisher's ideal index: on
typical times it is exactly the ratio of the passes' total times, and swapping sides flips its sign. A
median over a pass would be blind to the large requests, and a plain total is at the mercy of one context
switch, so ``r`` is first winsorised: values over two scaled median absolute deviations from the median
of their request are brought back to that distance (Huber, *Robust Statistics*, 1981).

**Interval.** The mean of ``d`` with Student's t times the bootstrap's standard error over whole rounds,
corrected for the bootstrap's narrowness and for the winsorised share (Hesterberg, "What teachers should
know about the bootstrap", The American Statistician 69, 2015: percentile intervals are too narrow for
samples this small, and cannot reach beyond the data at all, which 5 rounds at 99.8% would need).

**Noise.** The same statistic between the baseline and its twin in another process: the end of its 95%
interval that is farther from 1, and never below 1%, since two processes of the same code differ by their
memory layout alone (Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!",
ASPLOS 2009), and one control shows only one such draw.

**Relation.** FASTER or SLOWER only if the whole interval clears the noise *and* the plain totals, with
nothing winsorised, do not say the opposite: a candidate that is usually quick but sometimes stalls is
UNCLEAR. SAME if the whole interval lies within the noise or 2%, whichever is more. Confidence is 98%
shared among the candidates of the session (Bonferroni): one per cent above, so even without the noise
margin an A/A session shows any candidate faster at most once in a hundred, however many it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from torchstone.bench.sample import MIN_ROUNDS
from torchstone.errors import InputError
from torchstone.records import Comparison, Relation, Samples

__all__ = [
    "CONFIDENCE",
    "MIN_NOISE",
    "Change",
    "change",
    "compare",
    "compare_all",
    "noise_of",
    "t_quantile",
    "welch_half_width",
]

Array = NDArray[np.float64]

CONFIDENCE = 0.98
"""Two-sided, shared among all candidates of a session."""
MIN_NOISE = 0.01
"""Least noise of any session: what two processes of the same code may differ by."""

_NOISE_CONFIDENCE = 0.95
_SAME_MARGIN = 0.02
_RESAMPLES = 4000
_FENCE = 2.0
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Change:
    """The log of a time ratio and how well it is known."""

    log_ratio: float
    """Log of the other's time over the candidate's: above 0 is faster."""
    error: float
    """Its standard error."""
    plain: float
    """The same from plain total times, nothing winsorised."""
    plain_error: float
    """Its standard error."""
    rounds: int
    """Rounds that it rests on."""

    def half_width(self, confidence: float) -> float:
        """Half of the interval of :attr:`log_ratio`."""
        return t_quantile(0.5 + confidence / 2, self.rounds - 1) * self.error


def change(candidate: Samples, against: Samples) -> Change:
    """The paired log ratio of two labels of one session.

    Where a label's warm-up had not settled, the first half of the rounds counts as warm-up too, though
    five rounds always remain.

    :raises InputError: for samples of different sessions, passes or numbers of rounds, fewer than five
        rounds, or times that are not positive.
    """
    _refuse_unpaired(candidate, against)
    t_c, t_a = _settled(candidate, against)
    weights = _bootstrap_weights(len(t_c))
    r = np.log(t_a) - np.log(t_c)
    clipped, share_clipped = _winsorised(r)
    w, v = _shares(t_c), _shares(t_a)
    d = 0.5 * (np.log(np.exp(clipped) @ w) - np.log(np.exp(-clipped) @ v))
    kept = 1 - float(share_clipped @ (w + v)) / 2
    totals_c, totals_a = t_c.sum(1), t_a.sum(1)
    return Change(
        log_ratio=float(d.mean()),
        error=_spread(weights @ d, len(d)) / kept,
        plain=math.log(totals_a.sum() / totals_c.sum()),
        plain_error=_spread(np.log((weights @ totals_a) / (weights @ totals_c)), len(d)),
        rounds=len(d),
    )


def level(samples: Samples) -> tuple[float, float]:
    """The log of a label's typical pass time in seconds, and its standard error.

    For comparing times of different sessions, where rounds cannot be paired.

    :raises InputError: for times that are not positive, or fewer than five rounds.
    """
    times, _ = _settled(samples, samples)
    if len(times) < MIN_ROUNDS:
        raise InputError(f"{len(times)} rounds are too few to compare; it takes {MIN_ROUNDS}")
    clipped, _ = _winsorised(np.log(times))
    totals = np.log(np.exp(clipped).sum(1))
    return float(totals.mean()), _spread(_bootstrap_weights(len(totals)) @ totals, len(totals))


def welch_half_width(a: tuple[float, int], b: tuple[float, int], confidence: float) -> float:
    """Half of the interval of the difference of two independent means (Welch, Biometrika 34, 1947).

    :param a: standard error and number of values of one mean.
    :param b: of the other.
    """
    error = math.hypot(a[0], b[0])
    if error == 0:
        return 0.0
    x, y = (a[0] / error) ** 4, (b[0] / error) ** 4
    freedom = int(1 / (x / (a[1] - 1) + y / (b[1] - 1)))
    return t_quantile(0.5 + confidence / 2, max(1, freedom)) * error


def noise_of(baseline: Samples, again: Samples) -> float:
    """What A/A shows: the largest ratio, less 1, by which the two may differ at 95%."""
    control = change(again, baseline)
    bound = abs(control.log_ratio) + control.half_width(_NOISE_CONFIDENCE)
    return max(MIN_NOISE, math.expm1(bound))


def compare(
    candidate: Samples, against: Samples, noise: float | None, confidence: float = CONFIDENCE
) -> Comparison:
    """How much faster ``candidate`` is than ``against``.

    :param noise: of the session, see :func:`noise_of`; None if its control failed, and then the
        relation is UNCLEAR, whatever the figures.
    :raises InputError: as :func:`change`.
    """
    found = change(candidate, against)
    half = found.half_width(confidence)
    floor = MIN_NOISE if noise is None else noise
    return Comparison(
        session=candidate.session,
        recipe=candidate.recipe,
        against=against.recipe,
        ratio=math.exp(found.log_ratio),
        low=math.exp(found.log_ratio - half),
        high=math.exp(found.log_ratio + half),
        confidence=confidence,
        noise=floor,
        relation="UNCLEAR" if noise is None else _relation(found, floor, confidence),
        candidate_s=_seconds_a_call(candidate),
        against_s=_seconds_a_call(against),
    )


def compare_all(
    samples: Sequence[Samples], against: str | None = None, family: int | None = None
) -> tuple[Comparison, ...]:
    """Every candidate of one session against its baseline.

    :param against: recipe to compare with instead of the baseline; the baseline is then compared too.
    :param family: how many candidates the confidence is shared among, where a decision rests on the
        candidates of other sessions as well; those of this session where not given.
    :returns: one a candidate, in order; none if what to compare with did not finish.
    :raises InputError: as :func:`change`.
    """
    baseline = next((s for s in samples if s.label == "baseline"), None)
    again = next((s for s in samples if s.label == "baseline-again"), None)
    noise = None if baseline is None or again is None else noise_of(baseline, again)
    ones = [s for s in samples if s.label != "baseline-again"]
    other = baseline if against is None else next((s for s in ones if s.recipe == against), None)
    if other is None:
        return ()
    candidates = [s for s in ones if s is not other]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(candidates), family or 1)
    return tuple(compare(c, other, noise, confidence) for c in candidates)


def _relation(found: Change, noise: float, confidence: float) -> Relation:
    half, margin = found.half_width(confidence), math.log1p(noise)
    plain_half = t_quantile(0.5 + confidence / 2, found.rounds - 1) * found.plain_error
    if found.log_ratio - half > margin:
        return "UNCLEAR" if found.plain + plain_half < 0 else "FASTER"
    if found.log_ratio + half < -margin:
        return "UNCLEAR" if found.plain - plain_half > 0 else "SLOWER"
    if abs(found.log_ratio) + half <= max(margin, math.log1p(_SAME_MARGIN)):
        return "SAME"
    return "UNCLEAR"


def _refuse_unpaired(a: Samples, b: Samples) -> None:
    if a.session != b.session:
        raise InputError(
            f"{a.recipe} was measured in session {a.session}, {b.recipe} in {b.session}",
            hint="only times measured side by side can be compared; bench both recipes in one run",
        )
    if a.sizes != b.sizes or len(a.rounds) != len(b.rounds):
        raise InputError(f"samples of {a.recipe} and {b.recipe} do not replay the same rounds")
    if len(a.rounds) < MIN_ROUNDS:
        raise InputError(f"{len(a.rounds)} rounds are too few to compare; it takes {MIN_ROUNDS}")


def _settled(candidate: Samples, against: Samples) -> tuple[Array, Array]:
    rounds = len(candidate.rounds)
    steady = candidate.steady and against.steady
    first = 0 if steady else max(0, rounds - max(MIN_ROUNDS, rounds - rounds // 2))
    return _times(candidate)[first:], _times(against)[first:]


def _times(samples: Samples) -> Array:
    """Seconds, rounds x requests."""
    times = np.array(samples.rounds, dtype=np.float64)
    if times.ndim != 2 or times.shape[1] == 0 or not np.all(np.isfinite(times) & (times > 0)):
        raise InputError(f"samples of {samples.recipe} hold times that are missing or not positive")
    return times


def _shares(times: Array) -> Array:
    typical: Array = np.median(times, axis=0)
    shares: Array = typical / typical.sum()
    return shares


def _winsorised(r: Array) -> tuple[Array, Array]:
    """Values of each column within its fence, and the share of each column that was outside."""
    middle = np.median(r, axis=0)
    fence = _FENCE * _MAD_TO_SIGMA * np.median(np.abs(r - middle), axis=0)
    # Rounding must not put values outside a fence that they define.
    outside = np.abs(r - middle) > fence + 1e-12
    return np.clip(r, middle - fence, middle + fence), outside.mean(axis=0)


@lru_cache(maxsize=64)
def _bootstrap_weights(rounds: int) -> Array:
    """Resamples x rounds: how often each round was drawn, over the number of rounds.

    The same draws serve every comparison of so many rounds, so a comparison does not depend on which
    others are made.
    """
    rng = np.random.default_rng(20150101 + rounds)
    counts = rng.multinomial(rounds, np.full(rounds, 1 / rounds), size=_RESAMPLES)
    weights: Array = counts / rounds
    weights.flags.writeable = False
    return weights


def _spread(replicates: Array, rounds: int) -> float:
    """Standard error from bootstrap replicates, without the bootstrap's narrowness."""
    return float(replicates.std(ddof=1)) * math.sqrt(rounds / (rounds - 1))


def _seconds_a_call(samples: Samples) -> float:
    """Mean over the pass of each request's median over the rounds."""
    return float(np.median(_times(samples), axis=0).mean())


@lru_cache(maxsize=1024)
def t_quantile(level: float, freedom: int) -> float:
    """Quantile of Student's t, by bisection on its exact distribution for whole degrees of freedom.

    Series 26.7.3 and 26.7.4 of Abramowitz and Stegun, *Handbook of Mathematical Functions*.

    :param level: between 0.5 and 1.
    :param freedom: degrees of freedom, 1 or more.
    """
    if not 0.5 <= level < 1 or freedom < 1:
        raise InputError(f"no t quantile for level {level!r} and {freedom!r} degrees of freedom")
    low, high = 0.0, 1.0
    while _t_central(high, freedom) < 2 * level - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_central(middle, freedom) < 2 * level - 1 else (low, middle)
    return (low + high) / 2


def _t_central(t: float, freedom: int) -> float:
    """Probability that Student's t lies within ``-t .. t``."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
