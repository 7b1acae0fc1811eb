"""What tests of measuring and judging share: a clock that only moves when told, and made-up times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchstone.records import Samples

PASS_S = np.array([4, 4, 8, 16, 8, 40, 4, 20]) * 1e-3
"""A pass of eight requests of various sizes, seconds."""

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(0.0, seconds)


def lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """2% noise a call."""
    return 0.02 * rng.standard_normal(shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Student's t with 3 degrees of freedom, and one call in twenty held up, by a factor of e or so."""
    held_up = np.where(rng.random(shape) < 0.05, rng.exponential(1.0, shape), 0.0)
    return 0.015 * rng.standard_t(3, shape) + held_up


def no_drift(rng: np.random.Generator, rounds: int) -> np.ndarray:
    return np.zeros(rounds)


def drift(rng: np.random.Generator, rounds: int) -> np.ndarray:
    """A random walk of 3% a round that all labels share."""
    return np.cumsum(0.03 * rng.standard_normal(rounds))


def times(
    rng: np.random.Generator, noise: Noise, shared: np.ndarray, gain: float = 0.0
) -> tuple[tuple[float, ...], ...]:
    """Seconds, rounds x requests, of a label that is faster by ``gain``."""
    found = PASS_S * np.exp(noise(rng, (len(shared), len(PASS_S))) + shared[:, None]) / (1 + gain)
    return tuple(map(tuple, found.tolist()))


def samples(
    rounds: tuple[tuple[float, ...], ...], label: str = "candidate", recipe: str = "inductor", **changes
) -> Samples:
    values = {
        "session": "s",
        "recipe": recipe,
        "label": label,
        "rounds": rounds,
        "order": tuple(range(len(rounds))),
        "sizes": ({"B": 1},) * len(rounds[0]),
        "warmup": (),
        "steady": True,
    }
    return Samples(**(values | changes))


def session(
    rng: np.random.Generator,
    gains: tuple[float, ...],
    noise: Noise = lognormal,
    shared: Callable[[np.random.Generator, int], np.ndarray] = no_drift,
    rounds: int = 20,
) -> tuple[Samples, ...]:
    """A baseline, its control, and one candidate a gain, as one interleaved session."""
    common = shared(rng, rounds)
    return (
        samples(times(rng, noise, common), "baseline", "eager"),
        samples(times(rng, noise, common), "baseline-again", "eager"),
        *(
            samples(times(rng, noise, common, gain), "candidate", f"custom(c{i})")
            for i, gain in enumerate(gains)
        ),
    )
