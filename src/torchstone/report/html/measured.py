"""What was measured: the ladder, the raw times, the load test, the costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from torchstone.records import LoadResult, Samples, Verified, Wrong
from torchstone.report import format as fmt
from torchstone.report import words
from torchstone.report.collect import Report, Row
from torchstone.report.html import plots
from torchstone.report.html.markup import Cell, Html, code, element, join, section, table
from torchstone.report.html.scale import Scale, decades, nice

__all__ = ["costs", "kind_of", "ladder", "latency", "load", "who"]

_QUANTILES = ("p50", "p90", "p95", "p99", "p999")


def kind_of(row: Row) -> str:
    """Class of a row's marks."""
    if row.status in ("promoted", "baseline", "wrong"):
        return row.status
    return "other"


def who(name: str, status: str) -> Html:
    """A candidate's name with its status under it."""
    return element("div", code(name), element("span", status, class_="status"), class_="who")


def _figure(main: str, rest: str, word: str = "") -> Html:
    beside = (" ", element("i", word)) if word else ()
    return element("div", element("b", main), *beside, " ", element("span", rest), class_="figure")


# --- the ladder -----------------------------------------------------------------------------------


def ladder(report: Report) -> Html:
    """Every candidate: speed-up with its interval, and error beside what is allowed."""
    compared = [row.comparison for row in report.rows if row.comparison is not None]
    # never zoomed in so far that a few per cent look like a leap
    speeds = nice([0.8, 1.25, *(v for c in compared for v in (c.low, c.high))], most=5, always=1.0)
    noise = max((c.noise for c in compared), default=0.0)
    errors = decades([e / b for e, b in map(_error_of, report.rows) if e is not None and b])
    baseline = words.baseline_of(report)
    head = element(
        "li",
        element("span"),
        element("div", element("p", f"Speed-up over {baseline}"), plots.axis(speeds, _times)),
        element("span"),
        element("div", element("p", "Error over what is allowed"), plots.axis(errors, _power)),
        element("span"),
        class_="rung head",
    )
    rungs = [_rung(row, speeds, noise, errors) for row in report.rows]
    return section(
        "ladder",
        "The ladder",
        element("ol", head, *rungs, class_="ladder"),
        lead="Speed-up comes with its interval, over a band that shows what noise alone does. Error is "
        "over what is allowed; the shaded part is too much. A cross is a wrong answer. Both scales are "
        "logarithmic.",
    )


def _times(tick: float) -> str:
    return f"{tick:g}x"


def _power(tick: float) -> str:
    return (
        f"{tick:g}x" if 0.01 <= tick <= 100 else f"{tick:.0e}x".replace("e-0", "e-").replace("e+0", "e")
    )


def _error_of(row: Row) -> tuple[float | None, float | None]:
    found = words.errors(row.verdict.verdict) if row.verdict else None
    return (None, None) if found is None else found


def _rung(row: Row, speeds: Scale, noise: float, errors: Scale) -> Html:
    relative, bound = _error_of(row)
    status: str = row.status
    if row.verdict is not None and isinstance(row.verdict.verdict, Wrong):
        status = f"wrong: {row.verdict.verdict.reason.replace('_', ' ').lower()}"
    css = f"rung {kind_of(row)}"
    if bound is None and row.comparison is None and row.status != "baseline":
        text = words.reason(row.verdict.verdict) if row.verdict else "no verdict yet"
        return element("li", who(row.recipe, status), element("p", text, class_="why"), class_=css)
    return element(
        "li",
        who(row.recipe, status),
        *_speed(row, speeds, noise),
        *_error(row, errors, relative, bound),
        class_=css,
    )


def _speed(row: Row, scale: Scale, noise: float) -> tuple[Html, Html]:
    c = row.comparison
    if c is not None:
        label = f"{row.recipe}: {fmt.ratio(c.ratio)}, interval {fmt.ratio(c.low)} to {fmt.ratio(c.high)}"
        word = words.speed(c) if c.relation in ("SAME", "UNCLEAR") else ""
        figures: tuple[float, float, float] | None = (c.ratio, c.low, c.high)
        shown = _figure(fmt.ratio(c.ratio), fmt.interval(c.low, c.high), word)
    elif row.status == "baseline":
        label, figures, shown = f"{row.recipe}: 1x by definition", (1.0, 1.0, 1.0), _figure("1x", "")
    else:
        label, figures, shown = f"{row.recipe}: not timed", None, _figure("", "not timed")
    return plots.speed_lane(scale, label, figures, noise, kind_of(row)), shown


def _error(row: Row, scale: Scale, relative: float | None, bound: float | None) -> tuple[Html, Html]:
    if bound is None:
        return plots.error_lane(scale, f"{row.recipe}: error unknown", None, "none"), _figure("", "-")
    if bound == 0 and row.verdict is not None and isinstance(row.verdict.verdict, Verified):
        lane = plots.error_lane(scale, f"{row.recipe}: equal to eager, bit by bit", None, "none")
        return lane, _figure(fmt.error(relative), "its own")
    figure = _figure(fmt.error(relative), f"of {fmt.error(bound)}")
    label = f"{row.recipe}: error {fmt.error(relative)}, allowed {fmt.error(bound)}"
    # a bound of nothing is met by nothing but an exact answer
    share = None if relative is None else relative / bound if bound else 0.0 if relative == 0 else None
    return plots.error_lane(scale, label, share, kind_of(row)), figure


# --- raw times ------------------------------------------------------------------------------------


def latency(report: Report) -> Html:
    """Raw times of the interleaved benchmark, one hill a candidate."""
    chosen = [(row, samples) for row in report.rows for samples in _samples_of(report, row)]
    if not chosen:
        return Html("")
    times = [[t for calls in samples.rounds for t in calls if t > 0] for _, samples in chosen]
    scale = nice([t for calls in times for t in calls], most=5)
    rows = [_hill(row, s, t, scale) for (row, s), t in zip(chosen, times, strict=True) if t]
    head = element(
        "li", element("span"), plots.axis(scale, _seconds), element("span"), class_="strip head"
    )
    sizes = max(len(samples.sizes) for _, samples in chosen)
    mixed = f"A round replays {sizes} requests, so a hill may have several peaks. " if sizes > 1 else ""
    return section(
        "latency",
        "How long calls take",
        element("ol", head, *rows, class_="strips"),
        lead="Every timed call is a tick under its hill; the upright line is the median. "
        f"{mixed}The scale is logarithmic.",
    )


def _seconds(tick: float) -> str:
    """A tick's label: ``20 ms`` where a figure would say ``20.0 ms``."""
    number, unit = fmt.seconds(tick).split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _samples_of(report: Report, row: Row) -> Sequence[Samples]:
    """The candidate's samples of the session that its comparison speaks of; for the baseline, of the
    session of the best comparison, and the A/A control after it."""
    mine = [s for s in report.samples if s.recipe == row.recipe]
    compared = row.comparison
    if row.recipe == words.baseline_of(report):
        compared = next((r.comparison for r in report.rows if r.comparison), None)
    session = compared.session if compared else mine[-1].session if mine else None
    return sorted((s for s in mine if s.session == session), key=lambda s: s.label == "baseline-again")


def _hill(row: Row, samples: Samples, times: Sequence[float], scale: Scale) -> Html:
    again = samples.label == "baseline-again"
    status: str = "again, as the control" if again else row.status
    if not samples.steady:
        status += ", warm-up had not settled"
    median, p95 = statistics.median(times), sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]
    figure = _figure(fmt.seconds(median), f"p95 {fmt.seconds(p95)}")
    label = f"{row.recipe}: {len(times)} calls, median {fmt.seconds(median)}, p95 {fmt.seconds(p95)}"
    lane = plots.ridge_lane(scale, label, times, kind_of(row))
    return element("li", who(row.recipe, status), lane, figure, class_=f"strip {kind_of(row)}")


# --- load -----------------------------------------------------------------------------------------


def load(report: Report) -> Html:
    """Latency quantiles under open-loop load, a table for each rate on one scale."""
    results = [(row, result) for row in report.rows for result in row.load]
    stated = [q for _, result in results for q in result.quantiles_s.values() if q]
    if not stated:
        return Html("")
    limit = report.header.policy.get("p99_s")
    allowed = float(limit) if isinstance(limit, int | float) else None
    scale = nice(stated, most=4)
    tables = [
        _load_table(rate, [pair for pair in results if pair[1].rate == rate], scale, allowed)
        for rate in sorted({result.rate for _, result in results})
    ]
    bound = f" What is beyond the policy's p99 of {fmt.seconds(allowed)} is shaded." if allowed else ""
    return section(
        "load",
        "Under load",
        *tables,
        lead="Requests arrive at random (Poisson), whether or not earlier ones are answered; latency "
        "counts from the moment of arrival. The dot is p50, the ticks p90 to p99.9, where there were "
        f"requests enough to state them.{bound}",
    )


def _load_table(
    rate: float, results: Sequence[tuple[Row, LoadResult]], scale: Scale, limit: float | None
) -> Html:
    columns: list[Cell] = ["Candidate", plots.axis(scale, _seconds), "p50", "p90", "p95", "p99", "p99.9"]
    rows: list[list[Cell]] = []
    for row, result in results:
        quantiles = [result.quantiles_s.get(name) for name in _QUANTILES]
        label = f"{row.recipe}: " + ", ".join(
            f"{name} {fmt.maybe(fmt.seconds, q)}" for name, q in zip(_QUANTILES, quantiles, strict=True)
        )
        lane = plots.quantile_lane(scale, label, [q for q in quantiles if q], limit, kind_of(row))
        figures = [fmt.maybe(fmt.seconds, q) for q in quantiles]
        answered = fmt.maybe(fmt.rate, result.goodput)
        rows.append([who(row.recipe, row.status), lane, *figures, answered, fmt.count(result.errors)])
    slo = next((r.slo_s for _, r in results if r.slo_s is not None), None)
    within = f"; goodput counts answers within {fmt.seconds(slo)}" if slo else ""
    caption = f"{fmt.rate(rate)} offered, {fmt.count(results[0][1].requests)} requests{within}"
    return table(caption, [*columns, "Goodput", "Errors"], rows, class_="loads")


# --- costs ----------------------------------------------------------------------------------------


def costs(report: Report) -> Html:
    """Build, memory, metric and money, candidate by candidate."""
    rows = [row for row in report.rows if row.build is not None or row.metric is not None]
    columns: dict[str, Callable[[Row], Cell]] = {
        "Build": lambda r: fmt.maybe(fmt.seconds, r.build.seconds if r.build else None),
        "First call": lambda r: fmt.maybe(fmt.seconds, r.build.first_call_s if r.build else None),
        "Peak memory": lambda r: fmt.maybe(fmt.size, r.build.peak_memory_bytes if r.build else None),
        "Compiled graphs": lambda r: fmt.maybe(fmt.count, r.build.recompiles if r.build else None),
        "Metric": lambda r: fmt.maybe(_four, r.metric.value if r.metric else None),
        "Drop": _drop,
        "Per million": lambda r: fmt.maybe(fmt.money, _loaded(r, "cost_per_million")),
        "Earned back after": _break_even,
    }
    shown = {name: f for name, f in columns.items() if any(f(row) != fmt.DASH for row in rows)}
    if not rows or not shown:
        return Html("")
    cells = [[who(row.recipe, row.status), *(f(row) for f in shown.values())] for row in rows]
    metric = next((row.metric for row in rows if row.metric), None)
    said = f"The metric is {metric.name} on {fmt.count(metric.examples)} examples." if metric else ""
    caption = join(["Time, memory and money. ", said]) if said else "Time, memory and money"
    return section(
        "costs", "What each costs", table(caption, ["Candidate", *shown], cells, class_="figures")
    )


def _four(value: float) -> str:
    return fmt.significant(value, 4)


def _drop(row: Row) -> Cell:
    if row.metric is None:
        return fmt.DASH
    m = row.metric
    between = f"[{fmt.signed(m.drop_low)}, {fmt.signed(m.drop_high)}]"
    return join([words.drop(m), " ", element("span", between)])


def _loaded(row: Row, field: str) -> float | None:
    return next((v for v in (getattr(r, field) for r in row.load) if v is not None), None)


def _break_even(row: Row) -> str:
    calls = _loaded(row, "break_even_calls")
    return fmt.DASH if calls is None else f"{fmt.count(calls)} calls"
