"""Comparing two finished runs: did what ships become slower, or less right?

**What is compared.** What a user gets: the promoted recipe of each run. Where the new run promotes
nothing, the recipe that the old one promoted is looked up in it.

**What is refused.** Runs of other inputs, dims, traffic or metric, and runs from environments that
differ in what :func:`torchstone.env.differs` names, unless that is allowed. Other model code or weights
are not refused: judging them is what this is for.

**Speed.** The runs are different sessions, so their rounds cannot be paired. Each run's speed-up over
its own interleaved baseline can: a machine that is slower today is slower for both. The change of the
log speed-up is a two-sample problem: the bootstrap errors of the two sessions add in squares, with
Welch's degrees of freedom, and so do their A/A noises (see :mod:`torchstone.bench.stats`). Slower means
that the whole 98% interval lies below the noise. Where the code and the packages are the same, the
baseline is the same program and this decides. Where they are not, the baseline itself may have changed:

* a smaller speed-up counts only if the absolute time did not fall as well;
* an absolute time that rose counts too, but only beyond the noise *and* :attr:`Limits.absolute`, since
  nothing in two sessions tells how far apart the machine's own states were.

**Tails.** p99 under load at the highest offered rate that both baselines sustained, that differs by less
than a fifth between the runs, and that kept the recipe busy for at most 60% of the old run: nearer to
saturation the queue's luck decides p99, and no interval from one run of it tells how much. Waiting times
are correlated, so the interval comes from a moving block bootstrap (see
:func:`torchstone.bench.load.tail_change`); p99 is worse only if all of it lies above :attr:`Limits.p99`.

Missing evidence of a promoted recipe is a failure, not a pass. A decision that fell from PROMOTE only
because its speed-up is no longer *clear*, while the speed-up itself did not change, is a warning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar
from xml.etree import ElementTree

from torchstone import env
from torchstone import recipe as recipes
from torchstone.bench import stats
from torchstone.bench.load import tail_change
from torchstone.errors import InputError
from torchstone.records import (
    Comparison,
    Decision,
    Entry,
    LoadResult,
    MetricResult,
    Record,
    RunHeader,
    Samples,
    TimedOut,
    VerdictEntry,
    Verified,
)

__all__ = ["Check", "Limits", "RunDiff", "RunView", "compare_runs", "junit", "markdown"]

T = TypeVar("T", VerdictEntry, MetricResult)

_CHANCE = ("SPEED_UNCLEAR", "SAME_SPEED", "NOT_FASTER", "BELOW_MIN_SPEEDUP", "MIN_SPEEDUP_UNCLEAR")
"""Gate codes that chance alone can bring about for a candidate whose speed is at the threshold."""
_RATES_ALIKE = math.log(1.2)
_MOST_BUSY = 0.6


class RunView(Record, frozen=True, kw_only=True):
    """A run as far as a comparison needs it."""

    header: RunHeader
    """Its first record."""
    entries: tuple[Entry, ...]
    """Its evidence."""


class Limits(Record, frozen=True, kw_only=True):
    """From where on a change is a failure."""

    confidence: float = stats.CONFIDENCE
    """Two-sided, of the speed comparison."""
    absolute: float = 0.10
    """Rise of the absolute time that two sessions of one machine may show: 0.10 is ten per cent."""
    p99: float = 0.25
    """Likewise of p99 under load."""
    max_metric_drop: float | None = None
    """Largest drop of the metric between the runs; the old run's policy where None."""


class Check(Record, frozen=True, kw_only=True):
    """One thing that was compared."""

    name: str
    """Unique within a comparison: ``decision``, ``verdict RECIPE``, ``error RECIPE``, ``numerics``,
    ``metric``, ``speed``, ``p99``."""
    status: Literal["pass", "warn", "fail"]
    """A warning does not fail the comparison."""
    text: str
    """One sentence, with the figures."""


class RunDiff(Record, frozen=True, kw_only=True):
    """What became of a run."""

    old: str
    """When the old run started."""
    new: str
    """When the new one did."""
    refused: str | None = None
    """Why the runs cannot be compared, if so."""
    checks: tuple[Check, ...] = ()
    """Everything that was compared; none where refused."""

    @property
    def passed(self) -> bool:
        """Whether the runs could be compared and nothing became slower or less right."""
        return self.refused is None and not any(c.status == "fail" for c in self.checks)


def compare_runs(
    old: RunView, new: RunView, limits: Limits | None = None, *, allow_environment: bool = False
) -> RunDiff:
    """Compare the evidence of two runs.

    :param allow_environment: compare although the environments differ; absolute times then still count.
    """
    foreign = env.differs(old.header.environment, new.header.environment)
    refused = _refusal(old, new, () if allow_environment else foreign)
    if refused is not None:
        return RunDiff(old=old.header.started_at, new=new.header.started_at, refused=refused)
    same_code = not foreign and old.header.workload.digest == new.header.workload.digest
    pair = _Pair(old=old, new=new, limits=limits or Limits(), same_code=same_code)
    speed = _speed(pair)
    checks = (_decision(pair, speed), *_rightness(pair), *_metric(pair), speed, *_tail(pair))
    return RunDiff(old=old.header.started_at, new=new.header.started_at, checks=checks)


@dataclass(frozen=True)
class _Pair:
    """Two runs that can be compared."""

    old: RunView
    new: RunView
    limits: Limits
    same_code: bool

    @property
    def before(self) -> str:
        """What the old run ships."""
        decision = _decided(self.old)
        assert decision is not None  # a run without is refused
        return decision.recipe

    @property
    def after(self) -> str:
        """What the new run ships; where it promotes nothing, the same as before."""
        decision = _decided(self.new)
        return decision.recipe if decision is not None and decision.kind == "PROMOTE" else self.before


def _refusal(old: RunView, new: RunView, foreign: Sequence[str]) -> str | None:
    if _decided(old) is None:
        return "the old run has no decision to compare with: it was not finished"
    a, b = old.header.workload, new.header.workload
    for name in ("name", "inputs", "dims", "example_sizes", "traffic", "metric"):
        if getattr(a, name) != getattr(b, name):
            return f"the runs are of different workloads: {name} differs"
    if foreign:
        return f"the runs were made in different environments: {'; '.join(foreign)}"
    return None


def _decided(view: RunView) -> Decision | None:
    return next((e for e in reversed(view.entries) if isinstance(e, Decision)), None)


def _latest(view: RunView, kind: type[T], recipe: str) -> T | None:
    return next((e for e in reversed(view.entries) if isinstance(e, kind) and e.recipe == recipe), None)


def _baseline(view: RunView) -> str:
    return view.header.recipes[0]


# --- decision and rightness -----------------------------------------------------------------------


def _decision(pair: _Pair, speed: Check) -> Check:
    was, now = _decided(pair.old), _decided(pair.new)
    assert was is not None
    if now is None:
        return Check(
            name="decision", status="fail", text="the new run has no decision: it was not finished"
        )
    text = f"{was.kind} {was.recipe} became {now.kind} {now.recipe}"
    if was.kind != "PROMOTE" or now.kind == "PROMOTE":
        return Check(name="decision", status="pass", text=text)
    why = [r for r in now.reasons if r.recipe == was.recipe]
    text = "; ".join([text, *(r.text for r in why)])
    by_chance = bool(why) and all(r.code in _CHANCE for r in why) and speed.status != "fail"
    return Check(name="decision", status="warn" if by_chance else "fail", text=text)


def _rightness(pair: _Pair) -> Iterator[Check]:
    shipped = dict.fromkeys((pair.before, pair.after))
    for text in shipped:
        if text == _baseline(pair.old) and pair.before == text:
            continue  # eager ships as it is; how right it is decides nothing
        check = _verdict(pair, text)
        yield check
        if check.status == "pass":
            yield from _error(pair, text)
    if pair.before != pair.after:
        yield _numerics(pair)


def _verdict(pair: _Pair, recipe: str) -> Check:
    name = f"verdict {recipe}"
    entry = _latest(pair.new, VerdictEntry, recipe)
    if entry is None and recipe != pair.after and recipe not in pair.new.header.recipes:
        text = f"the new run does not ask for it, and promotes {pair.after}"
        return Check(name=name, status="warn", text=text)
    if entry is None:
        return Check(name=name, status="fail", text="the new run has no verdict on it")
    verdict = entry.verdict
    if isinstance(verdict, Verified):
        return Check(name=name, status="pass", text=f"verified on {verdict.cases} cases")
    detail = f"no answer within {verdict.limit_s:g} s" if isinstance(verdict, TimedOut) else verdict.text
    return Check(name=name, status="fail", text=f"it is now {type(verdict).__name__}: {detail}")


def _error(pair: _Pair, recipe: str) -> Iterator[Check]:
    was, now = (_latest(v, VerdictEntry, recipe) for v in (pair.old, pair.new))
    if was is None or now is None or not isinstance(was.verdict, Verified):
        return  # new among the candidates: its verdict is all there is
    assert isinstance(now.verdict, Verified)
    a, b = was.verdict, now.verdict
    # An error may exceed the bound where eager's own does; there it may not double.
    most = max(a.bound, 2 * a.relative)
    status: Literal["pass", "fail"] = "pass" if b.relative <= most else "fail"
    text = f"relative error {a.relative:.3g} became {b.relative:.3g}; {most:.3g} is allowed"
    yield Check(name=f"error {recipe}", status=status, text=text)


def _numerics(pair: _Pair) -> Check:
    """A recipe that changes the numbers more may take over only if the old run had it verified too."""
    order = tuple(recipes.Numerics)
    was, now = (recipes.parse(r).numerics for r in (pair.before, pair.after))
    known = _latest(pair.old, VerdictEntry, pair.after)
    text = f"{pair.before} ({was.value}) became {pair.after} ({now.value})"
    if order.index(now) <= order.index(was) or (
        known is not None and isinstance(known.verdict, Verified)
    ):
        return Check(name="numerics", status="pass", text=text)
    return Check(name="numerics", status="fail", text=f"{text}, which the old run had not verified")


def _metric(pair: _Pair) -> Iterator[Check]:
    name = pair.old.header.workload.metric
    if name is None:
        return
    was, now = _score(pair.old, pair.before), _score(pair.new, pair.after)
    if was is None:
        yield Check(name="metric", status="warn", text=f"the old run did not measure {name}")
        return
    if now is None or not math.isfinite(now):
        yield Check(name="metric", status="fail", text=f"the new run has no {name} of {pair.after}")
        return
    most = pair.limits.max_metric_drop
    if most is None:
        stated = pair.old.header.policy.get("max_metric_drop")
        most = float(stated) if isinstance(stated, int | float) else 0.0
    text = f"{name} {was:.4g} became {now:.4g}; a drop of {most:g} is allowed"
    yield Check(name="metric", status="pass" if was - now <= most else "fail", text=text)


def _score(view: RunView, recipe: str) -> float | None:
    if recipe == _baseline(view):
        return next((e.baseline for e in reversed(view.entries) if isinstance(e, MetricResult)), None)
    found = _latest(view, MetricResult, recipe)
    return None if found is None else found.value


# --- speed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Timed:
    """A recipe within its last session: its speed-up over the baseline, its time, and the A/A noise."""

    gain: float
    gain_error: float
    time: float
    time_error: float
    rounds: int
    noise: float


def _speed(pair: _Pair) -> Check:
    try:
        was, now = _timed(pair.old, pair.before), _timed(pair.new, pair.after)
    except InputError as error:
        return Check(name="speed", status="fail", text=f"it cannot be judged: {error.what}")
    level = pair.limits.confidence
    margin = math.hypot(math.log1p(was.noise), math.log1p(now.noise))
    gain = now.gain - was.gain
    half = stats.welch_half_width((was.gain_error, was.rounds), (now.gain_error, now.rounds), level)
    slower_relative = gain + half < -margin
    time = now.time - was.time
    time_half = stats.welch_half_width((was.time_error, was.rounds), (now.time_error, now.rounds), level)
    slower_absolute = time - time_half > max(margin, math.log1p(pair.limits.absolute))
    text = (
        f"speed-up {math.exp(was.gain):.3f}x became {math.exp(now.gain):.3f}x: {_percent(gain)} "
        f"[{_percent(gain - half)}, {_percent(gain + half)}], noise {100 * math.expm1(margin):.1f}%; "
        f"absolute time {_percent(time)} [{_percent(time - time_half)}, {_percent(time + time_half)}]"
    )
    if pair.same_code:
        failed = slower_relative
    else:
        failed = (slower_relative and time >= 0) or slower_absolute
        text += "; the code or its packages differ, so absolute time counts too"
    status: Literal["pass", "warn", "fail"] = "fail" if failed else "warn" if slower_relative else "pass"
    return Check(name="speed", status=status, text=text)


def _timed(view: RunView, recipe: str) -> _Timed:
    """:raises InputError: where no session holds the recipe, the baseline and its control."""
    samples = [e for e in view.entries if isinstance(e, Samples)]
    own = [s for s in samples if s.recipe == recipe and s.label != "baseline-again"]
    if not own:
        raise InputError(f"the run of {view.header.started_at} has no samples of {recipe}")
    subject = own[-1]
    session = {s.label: s for s in samples if s.session == subject.session and s.label != "candidate"}
    if set(session) != {"baseline", "baseline-again"}:
        raise InputError(f"session {subject.session} lacks the baseline or its control")
    baseline = session["baseline"]
    gain = stats.change(subject, baseline)
    time, time_error = stats.level(subject)
    return _Timed(
        gain=gain.log_ratio,
        gain_error=gain.error,
        time=time,
        time_error=time_error,
        rounds=gain.rounds,
        noise=stats.noise_of(baseline, session["baseline-again"]),
    )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.1f}%"


# --- tails ----------------------------------------------------------------------------------------


def _tail(pair: _Pair) -> Iterator[Check]:
    was, now = _sustained(pair.old, pair.before), _sustained(pair.new, pair.after)
    if not was:
        return
    if not now:
        text = f"the new run has no load test of {pair.after} at a rate that its baseline sustained"
        yield Check(name="p99", status="fail", text=text)
        return
    call_s = _seconds_a_call(pair.old, pair.before)
    alike = [
        (a, b)
        for a in was
        for b in now
        if call_s is not None
        and a.rate * call_s <= _MOST_BUSY
        and abs(math.log(a.rate / b.rate)) <= _RATES_ALIKE
        and a.errors == 0
    ]
    if not alike:
        text = "the runs share no offered rate that both baselines sustained at a moderate load"
        yield Check(name="p99", status="warn", text=text)
        return
    nearest = max(alike, key=lambda ab: (ab[0].rate, -abs(math.log(ab[0].rate / ab[1].rate))))
    yield _p99(*nearest, pair.limits)


def _p99(was: LoadResult, now: LoadResult, limits: Limits) -> Check:
    a, b = was.quantiles_s.get("p99"), now.quantiles_s.get("p99")
    at = f"at {was.rate:.3g}/s and {now.rate:.3g}/s"
    if now.errors:
        text = f"{now.errors} of {now.requests} requests are now left unserved {at}"
        return Check(name="p99", status="fail", text=text)
    if a is None or b is None:
        return Check(name="p99", status="warn", text=f"too few requests for a p99 {at}")
    low, high = tail_change(was.latencies_s, now.latencies_s, 0.99)
    text = (
        f"p99 {1000 * a:.4g} ms became {1000 * b:.4g} ms {at}: {_percent(math.log(b / a))} "
        f"[{_percent(low)}, {_percent(high)}], {100 * limits.p99:g}% is allowed"
    )
    # Written so that a NaN fails.
    return Check(name="p99", status="pass" if low <= math.log1p(limits.p99) else "fail", text=text)


def _seconds_a_call(view: RunView, recipe: str) -> float | None:
    found = [e for e in reversed(view.entries) if isinstance(e, Comparison)]
    if recipe == _baseline(view):
        return next((e.against_s for e in found if e.against == recipe), None)
    return next((e.candidate_s for e in found if e.recipe == recipe), None)


def _sustained(view: RunView, recipe: str) -> list[LoadResult]:
    """Load results of a recipe at the rates at which the run's baseline left nothing unserved."""
    loads = [e for e in view.entries if isinstance(e, LoadResult)]
    fine = {e.rate for e in loads if e.recipe == _baseline(view) and e.errors == 0}
    return [e for e in loads if e.recipe == recipe and e.rate in fine]


# --- output ---------------------------------------------------------------------------------------

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(diff: RunDiff) -> str:
    """The comparison as JUnit XML: one test case a check; a refusal is an error, a warning is output."""
    failures = sum(c.status == "fail" for c in diff.checks)
    counts = {
        "tests": str(len(diff.checks) or 1),
        "failures": str(failures),
        "errors": str(int(diff.refused is not None)),
    }
    root = ElementTree.Element("testsuites", {"name": "torchstone compare", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": "torchstone compare", **counts, "time": "0"}
    )
    if diff.refused is not None:
        case = _case(suite, "comparable")
        ElementTree.SubElement(case, "error", {"message": _clean(diff.refused), "type": "refused"})
    for check in diff.checks:
        case = _case(suite, check.name)
        if check.status == "fail":
            kind = check.name.split(" ", 1)[0]
            message = {"message": _clean(check.text), "type": _clean(kind)}
            ElementTree.SubElement(case, "failure", message)
        else:
            ElementTree.SubElement(case, "system-out").text = _clean(f"{check.status}: {check.text}")
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    attributes = {"classname": "torchstone.compare", "name": _clean(name), "time": "0"}
    return ElementTree.SubElement(suite, "testcase", attributes)


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def markdown(diff: RunDiff) -> str:
    """The comparison as Markdown, for a terminal or a pull request's summary."""
    failed = sum(c.status == "fail" for c in diff.checks)
    if diff.refused is not None:
        return f"## torchstone compare: refused\n\n{_line(diff.refused)}\n"
    verdict = (
        "Nothing became slower or less right"
        if diff.passed
        else f"{failed} of {len(diff.checks)} failed"
    )
    lines = [
        f"## torchstone compare: {'passed' if diff.passed else 'failed'}",
        "",
        f"{verdict}: run of {diff.new} against run of {diff.old}",
        "",
        "| check | result | |",
        "|---|---|---|",
    ]
    lines += [f"| {_line(c.name)} | {_WORDS[c.status]} | {_line(c.text)} |" for c in diff.checks]
    return "\n".join(lines) + "\n"


_WORDS = {"pass": "passed", "warn": "warning", "fail": "**failed**"}


def _line(text: str) -> str:
    """Text that stays within one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
