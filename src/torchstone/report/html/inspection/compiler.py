"""What torch.compile makes of the model: graph breaks, and recompiles over the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchstone.records import (
    Break,
    BreakStudy,
    Capturing,
    GuardFailure,
    Inspection,
    Limit,
    RecompileStudy,
    Stale,
    Storm,
    Tried,
)
from torchstone.report import format as fmt
from torchstone.report import inspect_words as words
from torchstone.report.html import plots
from torchstone.report.html.inspection import draw
from torchstone.report.html.inspection.pieces import (
    failed,
    figure,
    fine,
    flow,
    snippet,
    source,
    strip_head,
    who,
)
from torchstone.report.html.markup import Cell, Html, code, details, element, facts, join, section, table

__all__ = ["breaks", "recompiles"]

_LIMITS = {
    "TRY": "a try block",
    "GENERATOR": "a generator",
    "COMPREHENSION": "a comprehension",
    "LOOP": "a loop over modules",
}
_STORMS = 12
"""Causes with a line of their own in the timeline."""


# --- breaks ---------------------------------------------------------------------------------------


def breaks(found: Inspection) -> Html:
    """Every graph break, what it costs, and the model as it is against nested graph breaks."""
    study = found.breaks
    if study is None:
        return failed(found, "breaks", "breaks")
    if study.refused is not None:
        return section("breaks", words.PARTS["breaks"], element("p", study.refused))
    count = len(study.breaks)
    lead = (
        f"{words.plural(count, 'place')} that no graph can cross. What a break costs is the time "
        "between leaving the graph that it ends and entering the next."
        if count
        else "No graph breaks on the example."
    )
    return section(
        "breaks",
        words.PARTS["breaks"],
        *map(_break, study.breaks),
        _ways(study),
        _recipe(study),
        lead=lead,
    )


def _break(one: Break) -> Html:
    depth = "in forward itself" if not one.depth else f"{words.plural(one.depth, 'call')} deep"
    return element(
        "article",
        element("h3", one.reason, element("span", f"in {one.function}, {depth}", class_="status")),
        source(one.file, one.line, one.text),
        flow(element("b", "Edit: "), one.edit),
        fine(_cost(one)),
        *map(_limit, one.limits),
        details("The way to it, and Dynamo's words", _path(one)),
        class_="failure",
    )


def _cost(one: Break) -> str:
    parts = [f"breaks the graph {words.plural(one.times, 'time')}"]
    if one.nested_times is not None:
        parts.append(f"{one.nested_times} with nested graph breaks")
    if one.outside_s is not None:
        parts.append(f"costs {fmt.seconds(one.outside_s)} a call")
    if one.nested_outside_s is not None:
        parts.append(f"{fmt.seconds(one.nested_outside_s)} nested")
    return f"It {', '.join(parts)}."


def _limit(limit: Limit) -> Html:
    what = f"It is inside {_LIMITS[limit.kind]}, where nested graph breaks have no effect: "
    return join([flow(what, limit.edit), source(limit.file, limit.line, limit.text)])


def _path(one: Break) -> Html:
    steps = (element("li", code(words.short(step))) for step in one.path)
    way = element("ol", *steps) if one.path else Html("")
    return join([way, element("pre", one.raw, tabindex=0) if one.raw else ""])


def _ways(study: BreakStudy) -> Html:
    ways = {"as it is": study.plain, "nested graph breaks": study.nested}
    known = {name: way for name, way in ways.items() if way is not None}
    if not known:
        return Html("")
    columns: dict[str, Callable[[Capturing], str]] = {
        "Graphs": lambda w: fmt.count(w.graphs),
        "Breaks": lambda w: fmt.count(w.breaks),
        "Operations": lambda w: fmt.count(w.operations),
        "Entered a call": lambda w: fmt.count(w.entered),
        "Capture": lambda w: fmt.seconds(w.capture_s),
        "Compile": lambda w: fmt.seconds(w.compile_s),
        "A call": lambda w: fmt.seconds(w.steady_s),
        "Outside graphs": lambda w: fmt.seconds(w.outside_s),
    }
    rows = [[name, *(show(way) for show in columns.values())] for name, way in known.items()]
    made = table(f"Compiled by {study.backend}", ["Way", *columns], rows, class_="figures")
    eager = [f for way in known.values() for f in way.eager_functions]
    told = ", ".join(words.short(f) for f in dict.fromkeys(eager))
    return join([made, fine(f"Dynamo gave up, and they run eagerly: {told}.") if told else ""])


def _recipe(study: BreakStudy) -> Html:
    pairs: dict[str, Cell] = {"Recipe": join([code(study.recipe), " ", study.why])}
    if study.eager_s is not None:
        pairs["Eager, in the same session"] = f"{fmt.seconds(study.eager_s)} a call"
    if study.relative is not None:
        alike = (
            "equal to the bit" if study.relative == 0 else f"relative error {fmt.error(study.relative)}"
        )
        pairs["Outputs, nested against as it is"] = alike
    return facts(pairs)


# --- recompiles -----------------------------------------------------------------------------------


def recompiles(found: Inspection) -> Html:
    """When and why it compiled again over the traffic; a wrong answer of compiled code first."""
    study = found.recompiles
    wrong = [_stale(found.stale)] if found.stale is not None else []
    if study is None:
        alone = section("stale", "Wrong answers", *wrong)
        return join([failed(found, "recompiles", "recompiles"), alone])
    title = words.PARTS["recompiles"]
    if study.refused is not None:
        return section("recompiles", title, *wrong, element("p", study.refused))
    return section(
        "recompiles",
        title,
        *wrong,
        _timeline(study),
        *(_storm(storm, failure) for storm, failure in words.storms(study)),
        _tried(study.tried),
        _every(study),
        lead=f"The traffic, replayed through torch.compile as it is: {words.compiled(study)}.",
    )


def _stale(stale: Stale) -> Html:
    apart = (
        "not finite, or not alike" if stale.relative is None else f"off by {fmt.error(stale.relative)}"
    )
    title = f"Compiled call {stale.call} answers wrongly"
    tests = (element("li", one) for one in stale.evidence)
    return element(
        "article",
        element("h3", title, element("span", apart, class_="status")),
        element("p", stale.sentence),
        flow("Changed unseen: ", ", ".join(stale.what)) if stale.what else "",
        flow(element("b", "Fix: "), stale.fix),
        snippet(stale.code or ""),
        details("How this was found", element("ul", *tests)) if stale.evidence else "",
        class_="failure warning",
    )


def _timeline(study: RecompileStudy) -> Html:
    """A strip for each cause over the calls of the replay."""
    if not study.storms and not study.eager_calls:
        return Html("")
    strips = [
        _strip(words.CAUSES[s.cause], s.guarded, s.calls, study.calls, "other")
        for s in study.storms[:_STORMS]
    ]
    if study.eager_calls:
        strips.append(
            _strip("ran eagerly", "after torch's limit", study.eager_calls, study.calls, "late")
        )
    lead = fine("Position of each call in the replay; a tick is a recompile.")
    head = strip_head(draw.calls_axis(study.calls))
    return join([lead, element("ol", head, *strips, class_="strips")])


def _strip(name: str, status: str, calls: tuple[int, ...], total: int, kind: str) -> Html:
    places = [draw.place_of_call(call, total) for call in calls]
    told = ", ".join(map(str, calls[:20])) + (" ..." if len(calls) > 20 else "")
    lane = plots.event_lane(f"{name} {status}: calls {told}", places, kind)
    return element(
        "li",
        who(name, status),
        lane,
        figure(*words.plural(len(calls), "call" if kind == "late" else "recompile").split(" ")),
        class_="strip",
    )


def _storm(storm: Storm, failure: GuardFailure | None) -> Html:
    cause = words.CAUSES[storm.cause]
    status = f"{words.plural(storm.count, 'recompile')} by {storm.guarded}"
    line = source(failure.file, failure.line, failure.source) if failure is not None else Html("")
    guard = [details("The guard", element("pre", failure.text, tabindex=0))] if failure else []
    return element(
        "article",
        element("h3", cause[:1].upper() + cause[1:], element("span", status, class_="status")),
        element("p", storm.sentence),
        line,
        flow(element("b", "Fix: "), storm.fix),
        snippet(storm.code or ""),
        *guard,
        class_="failure",
    )


def _tried(tried: tuple[Tried, ...]) -> Html:
    if not tried:
        return Html("")
    rows = [(element("div", code(one.code)), words.tried(one)) for one in tried]
    return table("Fixes that were tried on the same replay", ["Code", "Outcome"], rows, class_="prose")


def _every(study: RecompileStudy) -> Html:
    """All recompiles, folded."""
    if not study.recompiles:
        return Html("")
    rows = [*_rows(study)]
    made = table("In order", ["Call", "Function", "Guard that failed"], rows, class_="prose")
    return details(f"Every recompile ({len(rows)})", made)


def _rows(study: RecompileStudy) -> Iterator[tuple[Cell, ...]]:
    for one in study.recompiles:
        limit = " (stopped by torch's limit: it ran eagerly)" if one.at_limit else ""
        others = [element("p", code(other), class_="fine") for other in one.others]
        yield str(one.call), words.short(one.function) + limit, join([code(one.failure.text), *others])
