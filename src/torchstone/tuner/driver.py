"""The only search loop: ask, look up, measure, tell.

Knows neither how a searcher chooses nor how a config is measured. Recorded tables, kernels on a device
and whole-model recipes go through this loop alike, each with a :class:`Measurer` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchstone.errors import InputError
from torchstone.records.tuning import Measurement
from torchstone.tuner.search.base import AnySearcher, Problem, Proposal, Stop
from torchstone.tuner.space import key_of

__all__ = ["Budget", "Found", "Measurer", "Watcher", "search"]


class Measurer(Protocol):
    """Measures configs: builds, proves, times."""

    def now(self) -> float:
        """Seconds since it began; simulated where measurements are replayed."""

    def measure(self, proposals: Sequence[Proposal], best_s: float | None) -> Iterator[Measurement]:
        """Measure each config once; in the order in which they are ready.

        :param best_s: the quickest median so far: what is much slower may be dropped early.
        """


@dataclass(frozen=True)
class Budget:
    """When to stop, whatever the searcher thinks."""

    seconds: float | None = None
    measurements: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is None and self.measurements is None:
            raise InputError("a budget needs seconds, or a number of measurements, or both")


@dataclass(frozen=True)
class Found:
    """What a search has come to."""

    measurements: tuple[Measurement, ...]
    """All, in the order told; those that were known beforehand come first."""
    known: int
    """How many of them were known: they cost nothing."""
    stop: Stop
    """Why it ended."""
    seconds: float
    """How long it took, by the measurer's clock."""

    @property
    def best(self) -> Measurement | None:
        """The quickest that is right."""
        return min(
            (m for m in self.measurements if m.time is not None),
            key=lambda m: m.time or 0.0,
            default=None,
        )


Watcher = Callable[[Measurement, float, float | None], None]
"""Called with each measurement, the seconds since the search began, and, where the searcher can say, how
much faster than the best the optimum is expected to be, a ratio."""


def search(  # noqa: PLR0913  the loop's parts, and where it starts
    problem: Problem,
    searcher: AnySearcher,
    measurer: Measurer,
    budget: Budget,
    *,
    seed: int = 0,
    known: Iterable[Measurement] = (),
    watch: Watcher | None = None,
) -> Found:
    """Search until the searcher or the budget has had enough.

    :param known: rows of the very same key: told first, and never measured again.
    :param watch: called after each measurement; what it appends to a cache survives a kill.
    """
    known = tuple(known)
    have: Mapping[str, Measurement] = {key_of(m.config): m for m in known}
    state = searcher.tell(searcher.init(problem, seed), known)
    told = list(known)
    began = measurer.now()
    while True:
        stop = _spent(budget, len(told) - len(known), measurer.now() - began) or searcher.done(state)
        if stop is not None:
            break
        proposals, state = searcher.ask(state, _room(budget, len(told) - len(known), problem.lanes))
        fresh = [p for p in proposals if key_of(p.config) not in have]
        if not fresh:
            stop = Stop("EXHAUSTED", "no config is left to try")
            break
        found, gain = [], getattr(state, "gain", None)
        best = min((m.time for m in told if m.time is not None), default=None)
        for measurement in measurer.measure(fresh, best):
            found.append(measurement)
            if watch is not None:
                watch(measurement, measurer.now() - began, None if gain is None else 1 + gain)
            if budget.seconds is not None and measurer.now() - began > budget.seconds:
                break  # the rest of the batch would be over the budget
        told += found
        state = searcher.tell(state, found)
    return Found(tuple(told), len(known), stop, measurer.now() - began)


def _spent(budget: Budget, measured: int, seconds: float) -> Stop | None:
    if budget.measurements is not None and measured >= budget.measurements:
        return Stop("ENOUGH", f"the budget of {budget.measurements} measurements is spent")
    if budget.seconds is not None and seconds >= budget.seconds:
        return Stop("ENOUGH", f"the budget of {budget.seconds:g} s is spent")
    return None


def _room(budget: Budget, measured: int, lanes: int) -> int:
    wanted = max(lanes, 1)
    return wanted if budget.measurements is None else min(wanted, budget.measurements - measured)
