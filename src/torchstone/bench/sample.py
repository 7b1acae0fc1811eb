"""Interleaved sampling: every label once a round, adjacent in time, in an order that changes.

What changes on a machine during a benchmark (frequency, neighbours, temperature) changes for all labels
of a round alike, so differences are taken within rounds. A long pass is cut into parts, and the labels
take turns part by part: the nearer in time two calls are, the more they have in common. The order is
drawn anew for each part, so that no label always runs after the same other one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from torchstone.bench.clock import Clock
from torchstone.errors import InputError
from torchstone.records import Failure, Record, Samples

__all__ = ["BASELINE_AGAIN", "MIN_ROUNDS", "Plan", "Runner", "Session", "interleave", "steady"]

Runner = Callable[[slice], tuple[float, ...] | Failure]
"""Runs some requests of a pass; gives the seconds of each call, or why there are none."""

BASELINE_AGAIN = "baseline-again"
"""Label of the A/A control: the baseline once more, in a process of its own."""
MIN_ROUNDS = 5
"""Rounds are never cut below this, whatever the time budget."""

_WARMUP_SHARE = 0.25  # of the budget, over all labels
_WARMUP_FEWEST = 2
_WARMUP_USUAL = 3
_WARMUP_MOST = 30
_WINDOW = 3
_TOLERANCE = 0.05


class Plan(Record, frozen=True, kw_only=True):
    """What a session is to measure."""

    session: str
    """Identifies the session."""
    baseline: str
    """Label and recipe of the baseline: ``eager``."""
    sizes: tuple[dict[str, int], ...]
    """Sizes of the requests of one pass, in order."""
    rounds: int
    """Rounds wanted."""
    budget_s: float
    """Time for warm-up and rounds of all labels, seconds."""
    seed: int
    """Of the order within rounds."""
    parts: int = 1
    """Parts that a pass is cut into."""

    def cuts(self) -> tuple[slice, ...]:
        """The requests of each part, in order."""
        count = len(self.sizes)
        ends = [count * i // self.parts for i in range(self.parts + 1)]
        return tuple(slice(a, b) for a, b in pairwise(ends) if a < b)


class Session(Record, frozen=True, kw_only=True):
    """What a session measured."""

    samples: tuple[Samples, ...]
    """One for each label that answered to the end; all have the same number of rounds."""
    failures: dict[str, Failure]
    """Why each other label did not."""


@dataclass
class _Label:
    runner: Runner
    warmup: list[tuple[float, ...]] = field(default_factory=list)
    settled: bool = False
    last_s: float = 0.0
    rounds: list[tuple[float, ...]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


def interleave(
    runners: Mapping[str, Runner],
    plan: Plan,
    clock: Clock,
    on_round: Callable[[int, int], None] | None = None,
) -> Session:
    """Warm all labels up, then run them in interleaved rounds.

    A label that fails is left out from then on, and its samples with it; the others go on. Rounds are
    cut to the budget, first by what warm-up took, then as they run, but never below
    :data:`MIN_ROUNDS`.

    :param runners: by label: ``plan.baseline``, :data:`BASELINE_AGAIN`, and candidates by recipe text.
    :param on_round: called with (rounds done, rounds planned) after each.
    :raises InputError: for a runner whose pass has another number of calls than the plan.
    """
    start = clock.now()
    labels = {name: _Label(runner) for name, runner in runners.items()}
    failures: dict[str, Failure] = {}
    for name, label in labels.items():
        failure = _warm_up(label, plan, clock, _WARMUP_SHARE * plan.budget_s / len(labels))
        if failure is not None:
            failures[name] = failure
    rng = np.random.default_rng(plan.seed)
    total = _affordable(labels, failures, plan.rounds, plan.budget_s - (clock.now() - start))
    done = 0
    while done < total and len(failures) < len(labels):
        began = clock.now()
        _round(labels, failures, plan, rng)
        done += 1
        if on_round is not None:
            on_round(done, total)
        now = clock.now()
        if done >= MIN_ROUNDS and now - start + (now - began) > plan.budget_s:
            break
    samples = tuple(_samples(n, label, plan) for n, label in labels.items() if n not in failures)
    return Session(samples=samples, failures=failures)


def steady(totals: Sequence[float]) -> bool:
    """Whether passes have stopped getting faster.

    They have not while each of the last ``k`` is faster than each of the ``k`` before, and their medians
    differ by more than 5%; ``k`` is 3, or half of the passes while there are fewer than 6. One-sided,
    since warming up only ever makes a pass faster; and one compilation or context switch is no trend.

    :param totals: seconds of each pass, in order.
    """
    k = min(_WINDOW, len(totals) // 2)
    if k == 0:
        return False
    last, before = totals[-k:], totals[-2 * k : -k]
    if max(last) >= min(before):
        return True
    return statistics.median(last) >= statistics.median(before) * (1 - _TOLERANCE)


def _warm_up(label: _Label, plan: Plan, clock: Clock, share_s: float) -> Failure | None:
    """Passes until steady: three at least, two where time is short, thirty at most."""
    start = clock.now()
    while True:
        began = clock.now()
        whole = slice(0, len(plan.sizes))
        result = label.runner(whole)
        if not isinstance(result, tuple):
            return result
        _check(result, whole)
        label.warmup.append(result)
        label.last_s = clock.now() - began
        label.settled = steady([sum(p) for p in label.warmup])
        passes = len(label.warmup)
        # The next pass takes about as long as this one: stop before the share is overdrawn.
        spent = clock.now() - start + label.last_s > share_s
        if passes >= _WARMUP_MOST or (spent and passes >= _WARMUP_FEWEST):
            return None
        if label.settled and passes >= _WARMUP_USUAL:
            return None


def _affordable(
    labels: Mapping[str, _Label], failures: Mapping[str, Failure], wanted: int, left_s: float
) -> int:
    round_s = sum(label.last_s for name, label in labels.items() if name not in failures)
    fits = int(left_s / round_s) if round_s > 0 else wanted
    return max(MIN_ROUNDS, min(wanted, fits))


def _round(
    labels: Mapping[str, _Label], failures: dict[str, Failure], plan: Plan, rng: np.random.Generator
) -> None:
    times: dict[str, list[float]] = {name: [] for name in labels if name not in failures}
    for part in plan.cuts():
        alive = [name for name in times if name not in failures]
        for position, index in enumerate(rng.permutation(len(alive)).tolist()):
            name = alive[index]
            result = labels[name].runner(part)
            if isinstance(result, tuple):
                _check(result, part)
                times[name] += result
                labels[name].order.append(position)
            else:
                failures[name] = result
    for name, seconds in times.items():
        labels[name].rounds.append(tuple(seconds))


def _check(result: tuple[float, ...], part: slice) -> None:
    if len(result) != part.stop - part.start:
        raise InputError(f"a pass gave {len(result)} times for {part.stop - part.start} requests")


def _samples(name: str, label: _Label, plan: Plan) -> Samples:
    again = name == BASELINE_AGAIN
    kind = BASELINE_AGAIN if again else "baseline" if name == plan.baseline else "candidate"
    return Samples(
        session=plan.session,
        recipe=plan.baseline if again else name,
        label=kind,
        rounds=tuple(label.rounds),
        order=tuple(label.order),
        sizes=plan.sizes,
        warmup=tuple(seconds for one in label.warmup for seconds in one),
        steady=steady([sum(seconds) for seconds in label.rounds[: 2 * _WINDOW]]),
    )
