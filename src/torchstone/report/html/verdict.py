"""The top of the page: what to run, how much faster it is, how that was proven, what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torchstone.records import Comparison, LoadResult, MetricResult, Verified
from torchstone.report import format as fmt
from torchstone.report import words
from torchstone.report.collect import Report, Row
from torchstone.report.html.markup import Cell, Html, code, element, join

__all__ = ["section"]


def section(report: Report) -> Html:
    """The verdict, its figures and its reasons."""
    kind = report.decision.kind if report.decision else "UNFINISHED"
    row = words.promoted(report)
    return element(
        "section",
        element("p", kind.replace("_", " ").lower(), class_="kicker"),
        element("h1", _headline(report, row)),
        element("p", _lede(report, row), class_="lede"),
        element("div", *_tiles(report, row), class_="tiles") if row else "",
        _reasons(report, row),
        element("p", _tally(report), class_="tally"),
        class_=f"verdict {kind.lower()}",
    )


def _headline(report: Report, row: Row | None) -> Html:
    if report.decision is None:
        return join(["This run is not finished"])
    recipe = code(report.decision.recipe)
    if row is None:
        return join(
            ["Keep ", recipe] if report.decision.kind == "KEEP_BASELINE" else ["Stay with ", recipe]
        )
    if row.comparison is None:
        return join(["Run ", recipe])
    times = element("span", fmt.ratio(row.comparison.ratio), class_="times")
    return join(["Run ", recipe, ", ", times, " faster than ", code(words.baseline_of(report))])


def _lede(report: Report, row: Row | None) -> Cell:
    if report.decision is None:
        judged = sum(r.verdict is not None for r in report.rows)
        done = f"{judged} of {len(report.rows)} candidates have a verdict. To go on: "
        return join([done, code(words.resume(report))])
    if row is not None and row.comparison is not None:
        c = row.comparison
        return (
            f"Between {fmt.ratio(c.low)} and {fmt.ratio(c.high)} with {fmt.percent(c.confidence)} "
            f"confidence, timed in turns with {words.baseline_of(report)}; "
            f"the same model against itself varies by {fmt.percent(c.noise)}."
        )
    if report.decision.kind == "HOLD":
        return "The evidence does not suffice to promote a candidate, nor to rule all of them out."
    return "No candidate was found to be better within the policy."


def _tiles(report: Report, row: Row) -> Iterable[Html]:
    baseline = words.find(report, words.baseline_of(report))
    verdict = row.verdict.verdict if row.verdict else None
    if row.comparison is not None:
        yield _speed_tile(row.comparison)
    if isinstance(verdict, Verified):
        yield _error_tile(verdict)
    if row.metric is not None:
        yield _metric_tile(row.metric, report.header.policy.get("max_metric_drop"))
    if row.load:
        yield _load_tile(row.load[-1], baseline)
    yield from _cost_tiles(row, baseline)


def _tile(name: str, figure: str, *lines: str) -> Html:
    body = (element("p", line) for line in lines if line)
    return element("div", element("h2", name), element("p", figure, class_="big"), *body, class_="tile")


def _speed_tile(c: Comparison) -> Html:
    return _tile(
        "Median call",
        fmt.seconds(c.candidate_s),
        f"{c.against}: {fmt.seconds(c.against_s)}",
        f"speed-up {fmt.ratio(c.ratio)} {fmt.interval(c.low, c.high)}",
    )


def _error_tile(verdict: Verified) -> Html:
    return _tile(
        "Error against float64",
        fmt.error(verdict.relative),
        f"allowed: {fmt.error(verdict.bound)}; eager's own: {fmt.error(verdict.eager_relative)}",
        f"worst of {verdict.cases} cases, in {verdict.worst_case}",
        *verdict.notes,
    )


def _metric_tile(metric: MetricResult, allowed: object) -> Html:
    limit = f" (allowed: {allowed:g})" if isinstance(allowed, int | float) else ""
    return _tile(
        f"Drop of {metric.name}",
        words.drop(metric),
        f"at most {fmt.signed(metric.drop_high)}{limit}",
        f"{fmt.significant(metric.baseline, 4)} to {fmt.significant(metric.value, 4)} "
        f"on {fmt.count(metric.examples)} examples",
    )


def _load_tile(result: LoadResult, baseline: Row | None) -> Html:
    same = next((r for r in (baseline.load if baseline else ()) if r.rate == result.rate), None)
    other = same.quantiles_s.get("p99") if same else None
    return _tile(
        "p99 under load",
        fmt.maybe(fmt.seconds, result.quantiles_s.get("p99")),
        f"at {fmt.rate(result.rate)}, open loop",
        f"{baseline.recipe}: {fmt.seconds(other)}" if baseline and other is not None else "",
    )


def _cost_tiles(row: Row, baseline: Row | None) -> Iterable[Html]:
    build = row.build
    if build is not None:
        earned = next((r.break_even_calls for r in row.load if r.break_even_calls is not None), None)
        yield _tile(
            "Build",
            fmt.seconds(build.seconds),
            f"first call: {fmt.seconds(build.first_call_s)}",
            f"earned back after {fmt.count(earned)} calls" if earned is not None else "",
        )
        other = baseline.build if baseline else None
        yield _tile(
            "Peak memory",
            fmt.size(build.peak_memory_bytes),
            f"{other.recipe}: {fmt.size(other.peak_memory_bytes)}" if other else "",
        )


def _reasons(report: Report, row: Row | None) -> Html:
    items = [
        join(
            [
                *_named(recipes),
                text,
                " ",
                element("span", reason_code, class_="code"),
            ]
        )
        for recipes, text, reason_code in (words.reasons(report.decision) if report.decision else ())
    ]
    for peer in row.peers if row else ():
        against = f": {fmt.ratio(peer.ratio)} {fmt.interval(peer.low, peer.high)} ({words.speed(peer)})"
        items.append(join(["Against ", code(peer.against), against]))
    if not items:
        return Html("")
    return element("ul", *(element("li", item) for item in items), class_="reasons")


def _named(recipes: tuple[str, ...]) -> Iterable[Cell]:
    for i, recipe in enumerate(recipes):
        yield code(recipe)
        yield ": " if i == len(recipes) - 1 else ", "


def _tally(report: Report) -> str:
    counts = Counter(row.status for row in report.rows)
    total = len(report.rows)
    parts = ", ".join(f"{n} {status}" for status, n in counts.items())
    return f"{total} candidate{'s' if total != 1 else ''}: {parts}."
