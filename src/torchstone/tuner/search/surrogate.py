"""What is expected of configs not measured yet: two models of the log of time, averaged.

A forest of extremely randomized trees (Geurts et al., Machine Learning 63, 2006) finds interactions and
cliffs; a Gaussian process with an additive and a product kernel (Duvenaud et al., "Additive Gaussian
Processes", NeurIPS 2011) finds what each knob does by itself, from fewer configs than trees need, and
knows better where it knows nothing. Neither is better everywhere.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from torchstone.errors import EnvironmentLacksError

__all__ = ["Array", "each_tree", "evidence", "forest", "process"]

Array = np.ndarray[Any, np.dtype[Any]]

_LENGTHS = (0.3, 1.0, 3.0)
_ADDITIVE = (0.2, 0.6, 0.9)
_NOISE = (1e-3, 1e-2)
_KEPT = 3  # kernels that are averaged, of those tried
_COMMON = (1.0, 0.6, 1e-2)  # length, additive share, noise: to compare prior means by


class _Fitted(NamedTuple):
    """One kernel on what is measured."""

    evidence: float
    length: float
    additive: float
    factor: Array
    weights: Array
    scale: float


def forest(kind: str, trees: int, rng: np.random.Generator, **options: Any) -> Any:
    """A forest of scikit-learn's, not fitted yet; one thread, so that the same seed gives the same.

    :param kind: ``ExtraTreesRegressor``, or another of its forests, which takes these ``options``.
    :raises EnvironmentLacksError: where scikit-learn is not installed.
    """
    try:
        from sklearn import ensemble
    except ImportError:
        raise EnvironmentLacksError(
            "this search needs scikit-learn", hint="pip install 'torchstone[tune]'"
        ) from None
    return getattr(ensemble, kind)(trees, random_state=int(rng.integers(1 << 31)), **options)


def each_tree(fitted: Any, rows: Array) -> Array:
    """Each tree's own prediction; (trees, rows)."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    return np.stack([one.tree_.predict(rows)[:, 0] for one in fitted.estimators_])


def process(points: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """Mean and variance of the additive process at ``rows``.

    :param points: what is measured, columns scaled to [0, 1]; (n, knobs).
    :param values: (n,).
    """
    mean = values.mean()
    scale = float(values.std()) or 1.0
    between, across = _Distances(points, points), _Distances(points, rows)
    fits = [
        fitted
        for length, additive in itertools.product(_LENGTHS, _ADDITIVE)
        for fitted in _fits(between.kernel(length, additive), (values - mean) / scale, length, additive)
    ]
    best = sorted(fits, key=lambda f: -f.evidence)[:_KEPT]
    first, second, total = np.zeros(len(rows)), np.zeros(len(rows)), 0.0
    for fitted in best:
        weight = float(np.exp(fitted.evidence - best[0].evidence))
        kernel = across.kernel(fitted.length, fitted.additive)
        expected = kernel.T @ fitted.weights
        shadow = np.linalg.solve(fitted.factor, kernel)
        variance = fitted.scale * np.maximum(1 - (shadow * shadow).sum(0), 1e-9)
        first, second, total = (
            first + weight * expected,
            second + weight * (variance + expected**2),
            total + weight,
        )
    first, second = first / total, second / total
    return first * scale + mean, np.maximum(second - first**2, 1e-9) * scale**2


def evidence(points: Array, values: Array) -> float:
    """The log of how likely values are under one common kernel: weighs what was subtracted from them."""
    length, additive, noise = _COMMON
    kernel = _Distances(points, points).kernel(length, additive)
    return _fit(kernel, values - values.mean(), (length, additive, noise)).evidence


class _Distances:
    """Distances between two sets of points; kernels of several lengths are made of them."""

    def __init__(self, a: Array, b: Array) -> None:
        self._each = [np.abs(a[:, [j]] - b[:, j]) for j in range(a.shape[1])]
        self._sum = sum(self._each, np.zeros((len(a), len(b))))

    def kernel(self, length: float, additive: float) -> Array:
        """``additive`` of it says what each knob does by itself, the rest what they do together."""
        alone = sum((np.exp(-d / length) for d in self._each), np.zeros_like(self._sum))
        together: Array = np.exp(-self._sum / (1.5 * length))
        return additive * alone / max(len(self._each), 1) + (1 - additive) * together


def _fits(kernel: Array, values: Array, length: float, additive: float) -> list[_Fitted]:
    return [_fit(kernel, values, (length, additive, noise)) for noise in _NOISE]


def _fit(kernel: Array, values: Array, shape: tuple[float, float, float]) -> _Fitted:
    length, additive, noise = shape
    factor = np.linalg.cholesky(kernel + noise * np.eye(len(values)))
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
    scale = max(float(values @ weights) / len(values), 1e-9)
    likely = -0.5 * len(values) * np.log(scale) - np.log(np.diag(factor)).sum()
    return _Fitted(float(likely), length, additive, factor, weights, scale)
