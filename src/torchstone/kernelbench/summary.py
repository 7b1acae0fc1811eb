"""Figures of a level from its problems. Pure.

Counted are problems that were judged, and those without a float64 reference, whose baseline is kept at a
ratio of 1. Degenerate ones, whose output does not depend on the input, and those that cannot be run are
listed and not counted. ``fast_p`` is the suite's: the share that is right and more than p times as fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from torchstone.records.kernelbench import (
    BenchOurs,
    BenchProblem,
    ContractSummary,
    LevelSummary,
)

__all__ = ["levels", "worst"]

Half = Literal["all", "even", "odd"]
_HALVES: tuple[Half, ...] = ("all", "even", "odd")
_WORST = 10


def levels(problems: Sequence[BenchProblem], contracts: Sequence[float]) -> tuple[LevelSummary, ...]:
    """For each level, all problems first, then both halves, unless one is empty."""
    return tuple(_summaries(problems, contracts))


def worst(problems: Sequence[BenchProblem], contract: float) -> tuple[str, ...]:
    """Keys of the ten counted problems with the least ratio, the least first."""
    rated = [(one.ratio, p) for p in problems if _counts(p) and (one := p.under(contract)) is not None]
    return tuple(p.key for _, p in sorted(rated, key=lambda r: (r[0], r[1].level, r[1].number))[:_WORST])


def _summaries(problems: Sequence[BenchProblem], contracts: Sequence[float]) -> Iterator[LevelSummary]:
    for level in sorted({p.level for p in problems}):
        for half in _HALVES:
            wanted = [p for p in problems if p.level == level and _of_half(p, half)]
            if wanted:
                yield _summary(level, half, wanted, contracts)


def _summary(
    level: int, half: Half, problems: Sequence[BenchProblem], contracts: Sequence[float]
) -> LevelSummary:
    counted = [p for p in problems if _counts(p)]
    shares = [p.bandwidth_share for p in counted if p.bandwidth_share is not None]
    return LevelSummary(
        level=level,
        half=half,
        problems=len(problems),
        counted=len(counted),
        correct=sum(_right(p) for p in counted),
        degenerate=_keys(problems, "degenerate"),
        failed=_keys(problems, "failed"),
        unverifiable=_keys(problems, "unverifiable"),
        contracts=tuple(_contract(c, counted) for c in contracts),
        memory_bound=len(shares),
        bandwidth_median=_median(shares),
        optimize_cold_s=_median([p.optimize_cold_s for p in counted if p.optimize_cold_s is not None]),
        optimize_warm_s=_median([p.optimize_warm_s for p in counted if p.optimize_warm_s is not None]),
    )


def _contract(contract: float, counted: Sequence[BenchProblem]) -> ContractSummary:
    ours = [one for p in counted if (one := p.under(contract)) is not None]
    ratios = [one.ratio for one in ours]
    strong = [one.strong_ratio for one in ours if one.strong_ratio is not None]
    return ContractSummary(
        contract=contract,
        promoted=sum(one.promoted for one in ours),
        kept=sum(not one.promoted for one in ours),
        geomean=_geomean(ratios),
        median=_median(ratios),
        least=min(ratios, default=None),
        fast_1=_faster(ours, 1.0),
        fast_2=_faster(ours, 2.0),
        strong_geomean=_geomean(strong),
        strong_timed=len(strong),
    )


def _faster(ours: Sequence[BenchOurs], p: float) -> float | None:
    return sum(one.ratio > p for one in ours) / len(ours) if ours else None


def _counts(problem: BenchProblem) -> bool:
    return problem.outcome in ("judged", "unverifiable")


def _right(problem: BenchProblem) -> bool:
    """Whether what we would run is right: each candidate promoted keeps to its contract."""

    def proved(one: BenchOurs) -> bool:
        column = problem.column(one.choice)
        return column is not None and column.status == "timed" and column.keeps(one.contract)

    return all(not one.promoted or proved(one) for one in problem.ours)


def _keys(problems: Sequence[BenchProblem], outcome: str) -> tuple[str, ...]:
    return tuple(p.key for p in problems if p.outcome == outcome)


def _of_half(problem: BenchProblem, half: Half) -> bool:
    return half == "all" or (problem.number % 2 == 0) == (half == "even")


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
