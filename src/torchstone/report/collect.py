"""The report: one record made from a run's header and entries, pure, as ``report.json`` holds it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from torchstone.records import (
    Build,
    Capture,
    Comparison,
    Crashed,
    Decision,
    Divergence,
    Entry,
    LoadResult,
    MetricResult,
    NotTried,
    Record,
    ReferenceErrors,
    RunHeader,
    Samples,
    TimedOut,
    Unsupported,
    Unverifiable,
    Verdict,
    VerdictEntry,
    Verified,
    Wrong,
)

__all__ = ["FORMAT", "Report", "Row", "Status", "collect", "from_json", "to_json"]

FORMAT = 1
"""Version of ``report.json``: raised when a field changes its meaning or goes away."""

Status = Literal[
    "promoted",
    "baseline",
    "verified",
    "wrong",
    "unverifiable",
    "crashed",
    "timed out",
    "unsupported",
    "not tried",
    "pending",
]

_WORDS: tuple[tuple[type[Verdict], Status], ...] = (
    (Verified, "verified"),
    (Wrong, "wrong"),
    (Unverifiable, "unverifiable"),
    (Crashed, "crashed"),
    (TimedOut, "timed out"),
    (Unsupported, "unsupported"),
    (NotTried, "not tried"),
)
_FAILED: tuple[Status, ...] = (
    "wrong",
    "unverifiable",
    "crashed",
    "timed out",
    "unsupported",
    "not tried",
    "pending",
)
"""In the order in which the ladder lists them, after those that are right."""


class Row(Record, frozen=True, kw_only=True):
    """Everything known of one candidate."""

    recipe: str
    """The recipe's text form."""
    status: Status
    """One word. The baseline is ``baseline`` as long as it is not found to fail itself; ``pending``
    means that the run ended before its verdict."""
    verdict: VerdictEntry | None
    """The verdict with its evidence, case by case."""
    build: Build | None
    """How it was built."""
    comparison: Comparison | None
    """Its speed against the baseline; for the baseline, against itself, if that was recorded."""
    peers: tuple[Comparison, ...]
    """Its speed against other candidates, where that was measured."""
    metric: MetricResult | None
    """The user's metric on the holdout."""
    load: tuple[LoadResult, ...]
    """Under open-loop load, by rising rate."""
    reproduce: tuple[str, ...]
    """Commands that make this row again; a line of Python where the run was made from Python."""
    divergence: Divergence | None = None
    """Where it first diverges from the model in float64, if it is wrong."""


class Report(Record, frozen=True, kw_only=True):
    """A whole run, ready to be read; ``report.json`` is this record."""

    format: int
    """Version of this format, 1."""
    header: RunHeader
    """What was asked, of what, where: workload, policy, recipes, environment, seed."""
    capture: Capture | None
    """How the model was captured."""
    decision: Decision | None
    """What the gate decided; None for a run that is not finished."""
    rows: tuple[Row, ...]
    """One for each recipe asked for: the promoted one, then by falling speed, then what failed."""
    references: tuple[ReferenceErrors, ...]
    """Eager's own errors against float64, one for each verification case."""
    samples: tuple[Samples, ...]
    """Raw times of every benchmark session."""


def collect(header: RunHeader, entries: Sequence[Entry]) -> Report:
    """Make the report of a run.

    Where a run holds several entries on the same thing (it was resumed and something measured again),
    the last one counts; otherwise the order of the entries does not matter to the rows. Entries on
    recipes that the header does not name are left out of the rows.

    :param header: the run's first record; its first recipe is the baseline.
    :param entries: what the run appended, in order; may be incomplete.
    """
    decision = _last_of(Decision, entries)
    rows = _rows(header, entries, decision)
    return Report(
        format=FORMAT,
        header=header,
        capture=_last_of(Capture, entries),
        decision=decision,
        rows=tuple(sorted(rows, key=_rung)),
        references=tuple(_latest(ReferenceErrors, entries, lambda r: r.case.name).values()),
        samples=tuple(
            _latest(Samples, entries, lambda s: (s.session, s.recipe, s.label)).values(),
        ),
    )


def _rows(header: RunHeader, entries: Sequence[Entry], decision: Decision | None) -> Iterable[Row]:
    verdicts = _latest(VerdictEntry, entries, lambda e: e.recipe)
    builds = _latest(Build, entries, lambda e: e.recipe)
    metrics = _latest(MetricResult, entries, lambda e: e.recipe)
    comparisons = _latest(Comparison, entries, lambda e: (e.recipe, e.against))
    divergences = _latest(Divergence, entries, lambda e: e.b)
    loads = _latest(LoadResult, entries, lambda e: (e.recipe, e.rate))
    baseline = header.recipes[0]
    for recipe in header.recipes:
        verdict = verdicts.get(recipe)
        yield Row(
            recipe=recipe,
            status=_status(recipe, baseline, verdict, decision),
            verdict=verdict,
            build=builds.get(recipe),
            comparison=comparisons.get((recipe, baseline)),
            peers=tuple(c for (r, a), c in sorted(comparisons.items()) if r == recipe and a != baseline),
            metric=metrics.get(recipe),
            load=tuple(result for (r, _), result in sorted(loads.items(), key=_by_rate) if r == recipe),
            reproduce=_reproduce(header, recipe),
            divergence=divergences.get(recipe),
        )


def _by_rate(item: tuple[tuple[str, float], LoadResult]) -> float:
    return item[0][1]


def _status(recipe: str, baseline: str, entry: VerdictEntry | None, decision: Decision | None) -> Status:
    if decision is not None and decision.kind == "PROMOTE" and decision.recipe == recipe:
        return "promoted"
    if recipe == baseline and (entry is None or isinstance(entry.verdict, Verified)):
        return "baseline"
    if entry is None:
        return "pending"
    return next(word for kind, word in _WORDS if isinstance(entry.verdict, kind))


def _rung(row: Row) -> tuple[int, float]:
    """Key of the ladder's order; equal keys keep the order in which the recipes were asked for."""
    if row.status == "promoted":
        return (0, 0.0)
    if row.status in _FAILED:
        return (3 + _FAILED.index(row.status), 0.0)
    if row.comparison is not None:
        return (1, -row.comparison.ratio)
    return (1, -1.0) if row.status == "baseline" else (2, 0.0)


def _reproduce(header: RunHeader, recipe: str) -> tuple[str, ...]:
    if header.origin is None:
        return (f"torchstone.optimize(model, inputs, recipes=({recipe!r},), seed={header.seed})",)
    origin, quoted = shlex.quote(header.origin), shlex.quote(recipe)
    seed = f" --seed {header.seed}" if header.seed else ""
    return tuple(f"torchstone {verb} {origin} --recipe {quoted}{seed}" for verb in ("verify", "bench"))


E = TypeVar("E")
K = TypeVar("K", bound=Hashable)


def _latest(kind: type[E], entries: Iterable[object], key: Callable[[E], K]) -> dict[K, E]:
    return {key(e): e for e in entries if isinstance(e, kind)}


def _last_of(kind: type[E], entries: Sequence[object]) -> E | None:
    return next((e for e in reversed(entries) if isinstance(e, kind)), None)


def to_json(report: Report) -> bytes:
    """The report as ``report.json`` holds it, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def from_json(data: bytes | str) -> Report:
    """Read ``report.json`` back, strictly.

    :raises msgspec.ValidationError: where the data is not a report of this version.
    """
    return msgspec.json.decode(data, type=Report)
