"""The gate: evidence and policy in, decision out. Pure.

* ``PROMOTE``: a candidate that is Verified, faster by more than the noise and by ``min_speedup`` at the
  lower end of its interval, and within every constraint that the policy states.
* ``KEEP_BASELINE``: every candidate is shown to be wrong, not faster, or outside a constraint.
* ``HOLD``: nothing can be promoted, and for at least one candidate that is because the evidence is
  missing or unclear rather than against it. Missing evidence never counts as met, nor does a NaN.

**Choice.** Among the eligible, the objective decides: the speed-up for ``latency`` and ``throughput``
(one process: capacity is the inverse of time a call), time including the build's share over the expected
``calls`` for ``cost``, and for ``p99`` the p99 at the highest rate that the baseline sustained.
**Ties.** Candidates within 2% of the best are tied. Of these the one that changes the numbers
least is taken: numerics class first (exact, reassociates, lossy), then the smaller error where lossy,
then the shorter build, then the better figure.

Load is compared at one rate, the highest that the baseline sustained: answered without leaving a request
unserved. Where a run holds several entries on the same recipe, the latest counts, except that no later
entry makes a recipe right that an earlier one did not find so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from torchstone import recipe as recipes
from torchstone.bench.cost import break_even_calls
from torchstone.policy import Policy
from torchstone.records import (
    Build,
    Comparison,
    Crashed,
    Decision,
    Entry,
    LoadResult,
    MetricResult,
    NotTried,
    Reason,
    Record,
    RunHeader,
    TimedOut,
    Unsupported,
    Unverifiable,
    VerdictEntry,
    Verified,
    Wrong,
)

__all__ = ["CODES", "TIE", "Evidence", "decide", "evidence_of"]

TIE = 0.02
"""Candidates within this of the best are as good. Not the A/A noise, which may be large: a session's
finalists are paired, and what is measured as quicker is the better guess."""

CODES = MappingProxyType(
    {
        "PROMOTED": "It is verified, clearly faster, within every constraint, and the best of those.",
        "KEPT_BASELINE": "No candidate is right, faster and within the constraints at once.",
        "HELD": "Nothing can be promoted on this evidence, and more evidence could change that.",
        "NO_CANDIDATES": "Only the baseline was asked for.",
        "ENVIRONMENT_MISMATCH": "Parts of the evidence were made in different environments.",
        "BASELINE_UNVERIFIED": "The model itself, run eagerly, is not right by its float64 reference.",
        "BETTER_EXISTS": "It could be promoted, but another is better by the policy's objective.",
        "TIE_LOST": "As good as the promoted one, which changes the numbers less or builds faster.",
        "NO_VERDICT": "It was not verified, or its verdict rests on no case.",
        "WRONG": "Its answers are wrong.",
        "UNVERIFIABLE": "No case can tell whether its answers are right.",
        "CRASHED": "It crashed.",
        "TIMED_OUT": "It did not answer in time.",
        "UNSUPPORTED": "Its engine is absent or refuses the model.",
        "NOT_TRIED": "The search time was spent before its turn.",
        "NOT_MEASURED": "There is no usable comparison with the baseline.",
        "SLOWER": "It is slower than the baseline.",
        "SAME_SPEED": "It is as fast as the baseline, within the noise.",
        "NOT_FASTER": "Its time does not differ clearly from the baseline's, and is not the better one.",
        "SPEED_UNCLEAR": "It looks faster, but not by more than chance and noise could show.",
        "BELOW_MIN_SPEEDUP": "It is faster, but not by what the policy asks.",
        "MIN_SPEEDUP_UNCLEAR": "Its speed-up reaches what the policy asks, its interval does not.",
        "METRIC_MISSING": "The workload has a metric, which was not measured for it.",
        "METRIC_DROP": "It lowers the metric by more than the policy allows.",
        "METRIC_UNCLEAR": "The metric may drop by more than allowed: too few labelled examples.",
        "LOAD_ERRORS": "It leaves requests unserved at a rate that the baseline sustains.",
        "P99_MISSING": "There is no p99 latency to hold it to: no load test, or too few requests.",
        "P99_ABOVE": "Its p99 latency under load is above the policy's.",
        "P99_NOT_BETTER": "The objective is p99, and its p99 is not better than the baseline's.",
        "BUILD_MISSING": "A constraint speaks of its build, of which there is no report.",
        "MEMORY_ABOVE": "Its peak memory is above the policy's.",
        "COMPILE_ABOVE": "Building it takes longer than the policy allows.",
        "RECOMPILES_MISSING": "It compiles lazily, and how often over the traffic was not counted.",
        "RECOMPILES_ABOVE": "The recorded traffic makes it compile more often than the policy allows.",
        "BREAK_EVEN_LATE": "The expected calls do not earn back the time spent on building it.",
    }
)
"""Every reason code and what it means."""


class Evidence(Record, frozen=True, kw_only=True):
    """What the gate judges by."""

    baseline: str
    """The baseline's recipe."""
    recipes: tuple[str, ...] = ()
    """Candidates that were asked for; any that the other fields speak of are judged too."""
    metric: str | None = None
    """The workload's metric, if it has one: then every candidate needs a result for it."""
    verdicts: tuple[VerdictEntry, ...] = ()
    """Verdicts, the baseline's own among them."""
    comparisons: tuple[Comparison, ...] = ()
    """Comparisons; only those against the baseline count."""
    loads: tuple[LoadResult, ...] = ()
    """Load results, the baseline's among them."""
    builds: tuple[Build, ...] = ()
    """Build reports, the baseline's among them."""
    metrics: tuple[MetricResult, ...] = ()
    """Metric results."""
    mismatch: str | None = None
    """How the environments of parts of the evidence differ, if they do."""


def evidence_of(header: RunHeader, entries: Sequence[Entry]) -> Evidence:
    """The evidence that a run holds.

    The fallback is left out: it is there to be proven, and to ship where eager is kept.
    """
    fallback = str(recipes.fallback())
    return Evidence(
        baseline=header.recipes[0],
        recipes=tuple(r for r in header.recipes[1:] if r != fallback),
        metric=header.workload.metric,
        verdicts=tuple(e for e in entries if isinstance(e, VerdictEntry) and e.recipe != fallback),
        comparisons=tuple(e for e in entries if isinstance(e, Comparison) and e.recipe != fallback),
        loads=tuple(e for e in entries if isinstance(e, LoadResult)),
        builds=tuple(e for e in entries if isinstance(e, Build)),
        metrics=tuple(e for e in entries if isinstance(e, MetricResult)),
    )


def decide(evidence: Evidence, policy: Policy) -> Decision:
    """Promote the best candidate that is proven right and faster, or say why there is none."""
    facts = _Facts(evidence, policy)
    if evidence.mismatch is not None:
        return facts.decision("HOLD", Reason(code="ENVIRONMENT_MISMATCH", text=evidence.mismatch))
    own = facts.verdict(evidence.baseline)
    if own is not None and not isinstance(own.verdict, Verified):
        text = f"eager itself is not right by its float64 reference: {_why_not(own).reason.text}"
        return facts.decision(
            "HOLD", Reason(code="BASELINE_UNVERIFIED", text=text, recipe=evidence.baseline)
        )
    if not facts.candidates:
        text = f"there is no candidate beside {evidence.baseline}"
        return facts.decision("KEEP_BASELINE", Reason(code="NO_CANDIDATES", text=text))
    findings = {r: _assess(facts, r) for r in facts.candidates}
    eligible = [r for r, found in findings.items() if not found]
    others = [f.reason for r in facts.candidates for f in findings[r]]
    if eligible:
        return _promote(facts, eligible, others)
    untried = all(f.reason.code == "NOT_TRIED" for found in findings.values() for f in found)
    open_ones = [r for r, found in findings.items() if all(f.open for f in found)]
    if not untried and not open_ones:
        text = f"none of {len(findings)} candidates is right, faster and within the constraints"
        return facts.decision("KEEP_BASELINE", Reason(code="KEPT_BASELINE", text=text), *others)
    which = "any candidate" if untried else ", ".join(open_ones)
    text = f"the evidence is not enough to promote or to dismiss {which}"
    return facts.decision("HOLD", Reason(code="HELD", text=text), *others)


class _Finding(NamedTuple):
    """Why a candidate cannot be promoted."""

    reason: Reason
    open: bool
    """Whether more evidence could lift it."""


class _Facts:
    """Evidence by recipe."""

    def __init__(self, evidence: Evidence, policy: Policy) -> None:
        self.evidence = evidence
        self.policy = policy
        named = (
            *evidence.recipes,
            *(v.recipe for v in evidence.verdicts),
            *(c.recipe for c in evidence.comparisons),
        )
        self.candidates = tuple(r for r in dict.fromkeys(named) if r != evidence.baseline)
        sustained = [x.rate for x in evidence.loads if x.recipe == evidence.baseline and x.errors == 0]
        self.rate = max(sustained, default=None)

    def decision(self, kind: Literal["KEEP_BASELINE", "HOLD"], *reasons: Reason) -> Decision:
        """A decision to stay with the baseline."""
        return Decision(kind=kind, recipe=self.evidence.baseline, reasons=reasons)

    def verdict(self, recipe: str) -> VerdictEntry | None:
        """The first verdict that is not Verified, else the latest."""
        found = [v for v in self.evidence.verdicts if v.recipe == recipe]
        bad = [v for v in found if not isinstance(v.verdict, Verified)]
        if bad:
            return bad[0]
        return found[-1] if found else None

    def comparison(self, recipe: str) -> Comparison | None:
        """The latest comparison with the baseline, if its figures can be used."""
        found = [
            c
            for c in self.evidence.comparisons
            if c.recipe == recipe and c.against == self.evidence.baseline
        ]
        if not found:
            return None
        c = found[-1]
        figures = (c.ratio, c.low, c.high, c.candidate_s, c.against_s)
        usable = all(_known(x) and x > 0 for x in figures) and _known(c.noise) and c.noise >= 0
        return c if usable and c.low <= c.ratio <= c.high else None

    def build(self, recipe: str) -> Build | None:
        """The latest build report, if its figures can be used."""
        found = [b for b in self.evidence.builds if b.recipe == recipe]
        if not found:
            return None
        b = found[-1]
        usable = _known(b.seconds) and b.seconds >= 0 and _known(b.first_call_s) and b.first_call_s >= 0
        return b if usable and b.peak_memory_bytes > 0 else None

    def metric(self, recipe: str) -> MetricResult | None:
        """The latest result of the workload's metric, if its figures can be used."""
        found = [
            m for m in self.evidence.metrics if m.recipe == recipe and m.name == self.evidence.metric
        ]
        if not found or not (_known(found[-1].drop) and _known(found[-1].drop_high)):
            return None
        return found[-1] if found[-1].drop <= found[-1].drop_high else None

    def load(self, recipe: str) -> LoadResult | None:
        """The latest load result at the rate that counts."""
        if self.rate is None:
            return None
        found = [
            x for x in self.evidence.loads if x.recipe == recipe and math.isclose(x.rate, self.rate)
        ]
        return found[-1] if found else None

    def p99(self, recipe: str) -> float | None:
        """Its p99 latency at the rate that counts, seconds."""
        result = self.load(recipe)
        value = None if result is None else result.quantiles_s.get("p99")
        return value if value is not None and _known(value) and value >= 0 else None


def _assess(facts: _Facts, recipe: str) -> tuple[_Finding, ...]:
    """Everything that stands against promoting a candidate; empty if it is eligible."""
    entry = facts.verdict(recipe)
    if entry is None:
        return (_finding("NO_VERDICT", "it was not verified", recipe, is_open=True),)
    verdict = entry.verdict
    if not isinstance(verdict, Verified) or verdict.cases < 1 or not _known(verdict.relative):
        return (_why_not(entry),)
    comparison = facts.comparison(recipe)
    if comparison is None:
        text = f"there is no usable comparison with {facts.evidence.baseline}"
        return (_finding("NOT_MEASURED", text, recipe, is_open=True),)
    checks = (_speed, _metric, _latency, _resources, _break_even)
    return tuple(f for check in checks for f in check(facts, comparison) if f is not None)


def _why_not(entry: VerdictEntry) -> _Finding:
    verdict, recipe = entry.verdict, entry.recipe
    match verdict:
        case Wrong():
            return _finding("WRONG", f"{verdict.text} (case {verdict.case})", recipe)
        case Unverifiable():
            return _finding(
                "UNVERIFIABLE", f"{verdict.text} (case {verdict.case})", recipe, is_open=True
            )
        case Crashed():
            return _finding("CRASHED", f"{verdict.text} (during {verdict.stage})", recipe)
        case TimedOut():
            text = f"no answer within {verdict.limit_s:g} s (during {verdict.stage})"
            return _finding("TIMED_OUT", text, recipe)
        case Unsupported():
            return _finding("UNSUPPORTED", verdict.text, recipe)
        case NotTried():
            return _finding("NOT_TRIED", verdict.text, recipe)
        case Verified():
            text = f"its verdict rests on {verdict.cases} cases with error {verdict.relative!r}"
            return _finding("NO_VERDICT", text, recipe, is_open=True)


def _speed(facts: _Facts, c: Comparison) -> list[_Finding | None]:
    figures = f"{_times(c)} at {100 * c.confidence:.4g}% confidence, noise {100 * c.noise:.2g}%"
    if c.relation == "SLOWER":
        return [_finding("SLOWER", f"it is slower: {figures}", c.recipe)]
    if c.relation == "SAME":
        return [_finding("SAME_SPEED", f"it is as fast as the baseline: {figures}", c.recipe)]
    # A relation that its own interval contradicts is not believed.
    if c.relation == "UNCLEAR" or c.low <= 1 + c.noise:
        if c.ratio <= 1:
            return [_finding("NOT_FASTER", f"it is not shown to be faster: {figures}", c.recipe)]
        return [_finding("SPEED_UNCLEAR", f"it may be faster: {figures}", c.recipe, is_open=True)]
    least = facts.policy.min_speedup
    if c.low >= least:
        return []
    if c.ratio < least:
        return [_finding("BELOW_MIN_SPEEDUP", f"{figures}; the policy asks for {least:g}x", c.recipe)]
    text = f"{figures}; the lower end misses the {least:g}x that the policy asks for"
    return [_finding("MIN_SPEEDUP_UNCLEAR", text, c.recipe, is_open=True)]


def _metric(facts: _Facts, c: Comparison) -> list[_Finding | None]:
    if facts.evidence.metric is None:
        return []
    found, most = facts.metric(c.recipe), facts.policy.max_metric_drop
    if found is None:
        text = f"{facts.evidence.metric} was not measured for it"
        return [_finding("METRIC_MISSING", text, c.recipe, is_open=True)]
    if found.drop_high <= most:
        return []
    text = (
        f"{found.name} {found.value:.4g} against {found.baseline:.4g}: a drop of {found.drop:.2g}, "
        f"{found.drop_high:.2g} at worst, where {most:g} is allowed ({found.examples} examples)"
    )
    if found.drop > most:
        return [_finding("METRIC_DROP", text, c.recipe)]
    return [_finding("METRIC_UNCLEAR", text, c.recipe, is_open=True)]


def _latency(facts: _Facts, c: Comparison) -> list[_Finding | None]:
    policy, result, p99 = facts.policy, facts.load(c.recipe), facts.p99(c.recipe)
    if result is not None and result.errors > 0:
        text = f"{result.errors} of {result.requests} requests unserved at {result.rate:.3g}/s"
        return [_finding("LOAD_ERRORS", text, c.recipe)]
    if policy.p99_s is None and policy.objective != "p99":
        return []
    at = "any rate" if facts.rate is None else f"{facts.rate:.3g}/s"
    if p99 is None:
        return [_finding("P99_MISSING", f"no p99 was measured at {at}", c.recipe, is_open=True)]
    found: list[_Finding | None] = []
    if policy.p99_s is not None and p99 > policy.p99_s:
        text = f"p99 is {_ms(p99)} at {at}, where {_ms(policy.p99_s)} is allowed"
        found.append(_finding("P99_ABOVE", text, c.recipe))
    if policy.objective == "p99":
        own = facts.p99(facts.evidence.baseline)
        if own is None:
            text = f"no p99 of the baseline was measured at {at}"
            found.append(_finding("P99_MISSING", text, c.recipe, is_open=True))
        elif p99 >= own:
            text = f"p99 is {_ms(p99)} at {at}, the baseline's {_ms(own)}"
            found.append(_finding("P99_NOT_BETTER", text, c.recipe))
    return found


def _resources(facts: _Facts, c: Comparison) -> list[_Finding | None]:
    p, build = facts.policy, facts.build(c.recipe)
    limits = (p.max_peak_memory_bytes, p.max_compile_s, p.max_recompiles)
    if all(limit is None for limit in limits):
        return []
    if build is None:
        text = "there is no usable report of its build"
        return [_finding("BUILD_MISSING", text, c.recipe, is_open=True)]
    found: list[_Finding | None] = []
    if p.max_peak_memory_bytes is not None and build.peak_memory_bytes > p.max_peak_memory_bytes:
        text = f"peak memory is {build.peak_memory_bytes:,} bytes of {p.max_peak_memory_bytes:,} allowed"
        found.append(_finding("MEMORY_ABOVE", text, c.recipe))
    if p.max_compile_s is not None and _build_s(build) > p.max_compile_s:
        text = f"build and first call take {_build_s(build):.3g} s of {p.max_compile_s:g} s allowed"
        found.append(_finding("COMPILE_ABOVE", text, c.recipe))
    if p.max_recompiles is not None:
        found.append(_recompiles(build, p.max_recompiles))
    return found


def _recompiles(build: Build, most: int) -> _Finding | None:
    if build.recompiles is not None:
        if build.recompiles <= most:
            return None
        text = f"the traffic makes it compile {build.recompiles} graphs of {most} allowed"
        return _finding("RECOMPILES_ABOVE", text, build.recipe)
    lazy = isinstance(recipes.parse(build.recipe).engine, recipes.Inductor | recipes.Custom)
    text = "how often it compiles over the traffic was not counted"
    return _finding("RECOMPILES_MISSING", text, build.recipe, is_open=True) if lazy else None


def _break_even(facts: _Facts, c: Comparison) -> list[_Finding | None]:
    calls = facts.policy.calls
    if calls is None:
        return []
    build, own = facts.build(c.recipe), facts.build(facts.evidence.baseline)
    if build is None or own is None:
        text = "without build reports of it and of the baseline there is no break-even"
        return [_finding("BUILD_MISSING", text, c.recipe, is_open=True)]
    needed = break_even_calls(_build_s(build) - _build_s(own), c.against_s - c.candidate_s)
    if needed is not None and needed <= calls:
        return []
    when = "never" if needed is None else f"after {needed:,.0f} calls"
    text = f"its build is earned back {when}; {calls:,.0f} calls are expected"
    return [_finding("BREAK_EVEN_LATE", text, c.recipe)]


def _promote(facts: _Facts, eligible: list[str], others: list[Reason]) -> Decision:
    score, unit = _objective(facts)
    scores = {r: score(r) for r in eligible}
    best = min(scores.values())
    tied = [r for r in eligible if scores[r] <= best * (1 + TIE)]
    winner = min(tied, key=lambda r: (*_closeness(facts, r), scores[r], r))
    comparison, entry = facts.comparison(winner), facts.verdict(winner)
    assert comparison is not None
    assert entry is not None
    assert isinstance(entry.verdict, Verified)
    right = entry.verdict
    text = (
        f"{_times(comparison)} the speed of {facts.evidence.baseline}, "
        f"error {right.relative:.2g} within {right.bound:.2g} on {right.cases} cases"
    )
    reasons = [Reason(code="PROMOTED", text=text, recipe=winner)]
    for r in sorted((r for r in eligible if r != winner), key=lambda r: scores[r]):
        code = "TIE_LOST" if r in tied else "BETTER_EXISTS"
        text = f"{unit(scores[r])} against {unit(scores[winner])} of {winner}"
        if r in tied:
            text += ", which is as good; the promoted one changes the numbers less or builds faster"
        reasons.append(Reason(code=code, text=text, recipe=r))
    return Decision(kind="PROMOTE", recipe=winner, reasons=(*reasons, *others))


def _objective(facts: _Facts) -> tuple[Callable[[str], float], Callable[[float], str]]:
    """What an eligible candidate is scored by, lower is better, and how the score is said."""
    policy = facts.policy

    def p99(recipe: str) -> float:
        value = facts.p99(recipe)
        return math.inf if value is None else value

    def share(recipe: str) -> float:
        comparison = facts.comparison(recipe)
        return math.inf if comparison is None else 1 / comparison.ratio

    def lifetime(recipe: str) -> float:
        comparison, build = facts.comparison(recipe), facts.build(recipe)
        if comparison is None or build is None or policy.calls is None:
            return math.inf
        return share(recipe) * comparison.against_s + _build_s(build) / policy.calls

    if policy.objective == "p99":
        return p99, lambda s: f"p99 {_ms(s)}"
    if policy.objective == "cost" and policy.calls is not None:
        return lifetime, lambda s: f"{_ms(s)} a call with its build's share"
    return share, lambda s: f"{1 / s:.3f}x"


def _closeness(facts: _Facts, recipe: str) -> tuple[int, float, float]:
    """Numerics class, error where lossy, and build time: the order in which ties are broken."""
    numerics = recipes.parse(recipe).numerics
    entry, build = facts.verdict(recipe), facts.build(recipe)
    lossy = numerics is recipes.Numerics.LOSSY
    error = entry.verdict.relative if lossy and entry and isinstance(entry.verdict, Verified) else 0.0
    return tuple(recipes.Numerics).index(numerics), error, math.inf if build is None else _build_s(build)


def _build_s(build: Build) -> float:
    """Build and first call: where a lazy engine compiles."""
    return build.seconds + build.first_call_s


def _finding(code: str, text: str, recipe: str, *, is_open: bool = False) -> _Finding:
    return _Finding(Reason(code=code, text=text, recipe=recipe), is_open)


def _known(value: float) -> bool:
    return math.isfinite(value)


def _times(c: Comparison) -> str:
    return f"{c.ratio:.3f}x [{c.low:.3f}, {c.high:.3f}]"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"
