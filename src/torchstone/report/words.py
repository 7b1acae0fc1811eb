"""Verdicts and decisions as sentences, shared by the terminal and the page; all functions are pure."""

from __future__ import annotations

import shlex

from torchstone.records import (
    Comparison,
    Crashed,
    Decision,
    Dim,
    InputSpec,
    MetricResult,
    NotTried,
    TensorSpec,
    TimedOut,
    Unsupported,
    Unverifiable,
    Verdict,
    Verified,
    Wrong,
)
from torchstone.report import format as fmt
from torchstone.report.collect import Report, Row

__all__ = [
    "baseline_of",
    "dim_of",
    "drop",
    "errors",
    "failed",
    "find",
    "headline",
    "hint",
    "input_of",
    "log_of",
    "promoted",
    "reason",
    "reasons",
    "resume",
    "speed",
    "top_rate",
    "worst_relative",
]

_FAILED = ("wrong", "unverifiable", "crashed", "timed out", "unsupported", "not tried")


def baseline_of(report: Report) -> str:
    """The recipe that every other is compared with."""
    return report.header.recipes[0]


def find(report: Report, recipe: str) -> Row | None:
    """The row of a recipe."""
    return next((row for row in report.rows if row.recipe == recipe), None)


def promoted(report: Report) -> Row | None:
    """The promoted row, if there is one."""
    return next((row for row in report.rows if row.status == "promoted"), None)


def failed(report: Report) -> tuple[Row, ...]:
    """Rows whose verdict is a failure, in ladder order."""
    return tuple(row for row in report.rows if row.status in _FAILED)


def headline(report: Report) -> str:
    """The decision in one sentence, without a full stop."""
    decision, baseline = report.decision, baseline_of(report)
    if decision is None:
        judged = sum(row.status != "pending" and row.verdict is not None for row in report.rows)
        return (
            f"UNFINISHED: {judged} of {len(report.rows)} candidates have a verdict, nothing is decided"
        )
    row = promoted(report)
    if row is None:
        kept = "keep" if decision.kind == "KEEP_BASELINE" else "stay with"
        return f"{decision.kind}: {kept} {decision.recipe}"
    facts = []
    if row.comparison is not None:
        c = row.comparison
        facts.append(f"{fmt.ratio(c.ratio)} faster than {baseline} {fmt.interval(c.low, c.high)}")
    if row.verdict is not None and isinstance(row.verdict.verdict, Verified):
        v = row.verdict.verdict
        facts.append(f"error {fmt.error(v.relative)} within {fmt.error(v.bound)}")
    return f"PROMOTE {decision.recipe}" + (f": {', '.join(facts)}" if facts else "")


def resume(report: Report) -> str:
    """What finishes a run that is not."""
    if report.header.origin is None:
        return "call torchstone.optimize again with the same arguments"
    return f"torchstone run {shlex.quote(report.header.origin)} --resume"


def speed(comparison: Comparison) -> str:
    """``FASTER``, ... as a word beside the ratio."""
    return {"FASTER": "faster", "SLOWER": "slower", "SAME": "same", "UNCLEAR": "unclear"}[
        comparison.relation
    ]


def errors(verdict: Verdict) -> tuple[float | None, float] | None:
    """A verdict's worst relative error and the bound that it was held to, where it has these."""
    return (verdict.relative, verdict.bound) if isinstance(verdict, Verified | Wrong) else None


def reason(verdict: Verdict) -> str:
    """Why, in a sentence or two."""
    match verdict:
        case Verified():
            text = f"error {fmt.error(verdict.relative)} within {fmt.error(verdict.bound)}"
            return f"{text} on {verdict.cases} cases"
        case Wrong() | Unverifiable():
            return f"{verdict.text} (case {verdict.case})"
        case Crashed():
            return f"{verdict.text} (during {verdict.stage})"
        case TimedOut():
            return f"no answer within {fmt.duration(verdict.limit_s)} (during {verdict.stage})"
        case Unsupported() | NotTried():
            return verdict.text


def reasons(decision: Decision) -> tuple[tuple[tuple[str, ...], str, str], ...]:
    """The gate's reasons as (recipes, text, code), in order; what several recipes share is said once."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for r in decision.reasons:
        recipes = grouped.setdefault((r.text, r.code), [])
        if r.recipe is not None:
            recipes.append(r.recipe)
    return tuple((tuple(recipes), text, code) for (text, code), recipes in grouped.items())


def log_of(verdict: Verdict) -> str:
    """What the candidate printed before it failed, if that was kept."""
    return verdict.log if isinstance(verdict, Crashed | TimedOut) else ""


def drop(metric: MetricResult) -> str:
    """A metric's drop; positive is worse."""
    return fmt.signed(metric.drop)


def top_rate(report: Report) -> float | None:
    """Highest rate that any candidate was loaded at, requests a second."""
    return max((result.rate for row in report.rows for result in row.load), default=None)


def worst_relative(relatives: tuple[float | None, ...]) -> float | None:
    """The largest, where None (not finite) is larger than everything; 0 of nothing."""
    return None if None in relatives else max((r for r in relatives if r is not None), default=0.0)


def hint(verdict: Verdict) -> str | None:
    """The command that would help."""
    return verdict.hint if isinstance(verdict, Unsupported) else None


def input_of(spec: InputSpec) -> str:
    """An input in a line: ``x float32[B, 3]``."""
    if isinstance(spec, TensorSpec):
        return f"{spec.name} {spec.dtype}[{', '.join(map(str, spec.shape))}]"
    return f"{spec.name} {spec.kind}"


def dim_of(dim: Dim) -> str:
    """A dim in a line: ``B = 1..64``, ``S = 16..256 by 16``."""
    step = f" by {dim.multiple}" if dim.multiple != 1 else ""
    return f"{dim.name} = {dim.low}..{dim.high}{step}"
