"""The page of a tuning: the decision, the search, what each knob did, the finals, failures, evidence."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence

from torchstone.records.tuning import Final, Measurement, Tuning
from torchstone.report import format as fmt
from torchstone.report import tune_words as words
from torchstone.report.html import plots
from torchstone.report.html import tune_draw as draw
from torchstone.report.html.document import document
from torchstone.report.html.inspection.pieces import bullets, figure, fine, strip_head, tick, who
from torchstone.report.html.markup import Cell, Html, code, details, element, facts, join, section, table
from torchstone.report.html.scale import Scale, nice
from torchstone.report.inspect_words import plural

__all__ = ["render"]

_SHOWN = 4
"""Knobs that are not folded."""
_VALUES = 16
"""Values of a knob that are drawn: the most measured."""
_TEXTS = 8
"""Reasons of one kind of failure that are listed."""
_QUICKEST = 20
_LABELS = ("default", "finalist", "control")


def render(found: Tuning) -> str:
    """The tuning as one HTML document, to be written as UTF-8.

    It holds everything it needs: no script, nothing fetched. Everything that came from the user, from a
    compiler or from a proposer is escaped.
    """
    name = words.cut(found.key.kernel, 80)
    sections = (_top, _search, _knobs, _finals, _failures, _evidence)
    main = element("main", *(make(found) for make in sections), class_="tuning inspection")
    title = f"{words.headline(found)} - {name}"
    return document(title, name, found.started_at, main)


# --- the top --------------------------------------------------------------------------------------


def _top(found: Tuning) -> Html:
    """Headline, figures, what stopped it, how to use it."""
    left, headline = words.regret(found), words.headline(found)
    notes = [f"Stopped: {words.cut(found.stop_text)} ({found.stop})."]
    if left is not None:
        notes.append(f"{left[:1].upper()}{left[1:]}.")
    if found.known:
        notes.append(f"{plural(found.known, 'row')} of this very kernel came from the cache.")
    if found.siblings:
        learned = f"{plural(found.siblings, 'row')} of other sizes, devices or versions"
        notes.append(f"The search learned from {learned}.")
    said = _sentence(found.text) if found.decision == "HOLD" else ""
    what = "Config, not a recommendation: " if said else "Config: "
    sizes = " ".join(f"{n}={s}" for n, s in found.key.sizes.items())
    where = f"{words.cut(found.key.kernel)} {sizes} on {words.cut(found.key.device)}".replace("  ", " ")
    return element(
        "section",
        element("p", f"tuning - {found.decision.replace('_', ' ').lower()}", class_="kicker"),
        element("h1", headline),
        element("p", where, class_="lede"),
        element("p", said, class_="lede") if said else "",
        element("p", what, code(words.config(found.config)), class_="lede"),
        element("div", *_tiles(found), class_="tiles"),
        bullets([*notes, *(f"Problem: {words.cut(p)}" for p in found.problems)]),
        class_="verdict promote" if found.decision == "PROMOTE" else "verdict",
    )


def _sentence(text: str) -> str:
    told = words.cut(text)
    return f"{told[:1].upper()}{told[1:]}."


def _tiles(found: Tuning) -> Iterator[Html]:
    chosen_s, default_s, won = words.choice_s(found), words.default_s(found), words.chosen(found)
    best = max(found.comparisons, key=lambda c: c.ratio, default=None)
    if won is not None:
        interval = f"{fmt.interval(won.low, won.high)} at {100 * won.confidence:.3g}% confidence"
        yield _tile("Over the default", fmt.ratio(won.ratio), interval, _noise(won.noise))
    elif best is not None:
        told = f"{fmt.interval(best.low, best.high)}: {best.relation.lower()}"
        yield _tile(
            "The quickest other over the default", fmt.ratio(best.ratio), told, _noise(best.noise)
        )
    other = f"the default: {fmt.seconds(default_s)}" if default_s and won is not None else ""
    if chosen_s is not None:
        yield _tile("A call", fmt.seconds(chosen_s), other)
    of = words.of_floor(found.floor_s, chosen_s)
    if of is not None and found.floor_s is not None:
        floor = f"no config can take less than {fmt.seconds(found.floor_s)}"
        yield _tile("Of the roofline", fmt.percent(of), floor)
    wrong = sum(f.number for f in words.failures(found.measurements))
    told = f"{plural(wrong, 'failure')}; {fmt.duration(found.seconds)} in all"
    yield _tile("Configs measured", fmt.count(len(found.measurements)), told)


def _noise(noise: float) -> str:
    return f"the control shows {fmt.percent(noise)} of noise"


def _tile(name: str, value: str, *lines: str) -> Html:
    body = (element("p", line) for line in lines if line)
    return element("div", element("h2", name), element("p", value, class_="big"), *body, class_="tile")


# --- the search -----------------------------------------------------------------------------------


def _times(found: Tuning) -> list[float]:
    return [t for m in found.measurements if (t := m.time) is not None and t > 0]


def _search(found: Tuning) -> Html:
    """Every measurement by its number, the best so far, failures, and who proposed what."""
    times = _times(found)
    if not found.measurements:
        return Html("")
    lead = (
        "One dot a config that is right, in the order of measuring: its median time, on a logarithmic "
        "axis. Pale dots were dropped early, being much slower. The line is the best so far."
    )
    content: list[Cell] = []
    if times:
        content.append(draw.chart(found, times))
        if found.floor_s and "roofline" not in draw.levels(found, times):
            lead += f" The roofline, {fmt.seconds(found.floor_s)}, is too far off to be drawn."
    content += [draw.failed_lane(found.measurements), _proposers(found.measurements), _quickest(found)]
    return section("search", "The search", *content, lead=lead if times else "")


def _proposers(measurements: Sequence[Measurement]) -> Html:
    """What each part of the searcher asked for, and what came of it."""
    by: dict[str, list[Measurement]] = {}
    for one in measurements:
        by.setdefault(one.proposer, []).append(one)
    if len(by) < 2:
        return Html("")
    bests = {id(m) for _, m in words.best_so_far(measurements)}
    rows = []
    for name, ones in sorted(by.items(), key=lambda b: -len(b[1])):
        times = [t for m in ones if (t := m.time) is not None]
        failed = len(ones) - len(times)
        better = sum(id(m) in bests for m in ones)
        best = fmt.maybe(fmt.seconds, min(times, default=None))
        rows.append(
            [words.cut(name, 60) or "not said", *map(fmt.count, (len(ones), failed, better)), best]
        )
    columns = ["Proposed by", "Measured", "Failed", "New bests", "Its best"]
    return table("Where configs came from", columns, rows, class_="figures")


def _quickest(found: Tuning) -> Html:
    right = sorted((m for m in found.measurements if m.time), key=lambda m: m.time or 0.0)[:_QUICKEST]
    if not right:
        return Html("")
    names = list(dict.fromkeys(n for m in right for n in m.facts))[:4]
    rows = [
        [
            code(words.config(m.config)),
            fmt.maybe(fmt.seconds, m.time),
            *_of_floor(found, m.time),
            fmt.error(m.relative) if m.relative is not None else fmt.DASH,
            *(fmt.maybe(fmt.count, m.facts.get(n)) for n in names),
        ]
        for m in right
    ]
    roofline = ["Of roofline"] if found.floor_s else []
    columns = ["Config", "Time", *roofline, "Error", *(words.cut(n, 30) for n in names)]
    listed = table(
        "Medians in the search; the finals are timed anew", columns, rows, class_="figures configs"
    )
    return details(f"The {plural(len(right), 'quickest config')} of the search", listed)


def _of_floor(found: Tuning, seconds: float | None) -> list[str]:
    """The cell of a column that is there where the roofline is known."""
    return [fmt.maybe(fmt.percent, words.of_floor(found.floor_s, seconds))] if found.floor_s else []


# --- knobs ----------------------------------------------------------------------------------------


def _knobs(found: Tuning) -> Html:
    """One strip plot a knob, the one that matters most first."""
    times = _times(found)
    if not times:
        return Html("")
    scale = nice(times, most=4)
    drawn = words.knobs(found.measurements)
    made = [_knob(knob, found, scale) for knob in drawn]
    rest: list[Html] = []
    if made[_SHOWN:]:
        names = ", ".join(words.cut(k.name, 30) for k in drawn[_SHOWN:])
        rest = [
            details(
                f"{plural(len(made) - _SHOWN, 'more knob')}: {words.cut(names, 200)}", *made[_SHOWN:]
            )
        ]
    return section(
        "knobs",
        "What each knob did",
        *made[:_SHOWN],
        *rest,
        lead="One tick a config that is right; the long mark is the median, the dot the best. The share "
        "is how much of the variance of log time a knob explains alone, adjusted for its number of "
        "values. A search measures more where it is fast: this is of what was measured alone.",
    )


def _knob(knob: words.Knob, found: Tuning, scale: Scale) -> Html:
    uses = knob.uses
    if len(uses) > _VALUES:
        most = {id(u) for u in sorted(uses, key=lambda u: -len(u.times))[:_VALUES]}
        uses = tuple(u for u in uses if id(u) in most)
    left = len(knob.uses) - len(uses)
    told = "too few to say" if knob.share is None else f"{fmt.percent(knob.share)} of the variance"
    told = "one value" if len(knob.uses) == 1 else told
    strips = [_use(knob.name, use, scale, _said(knob.name, use, found)) for use in uses]
    return element(
        "article",
        element("h3", words.cut(knob.name, 80), " ", element("span", told, class_="status")),
        element("ol", strip_head(plots.axis(scale, tick)), *strips, class_="strips"),
        fine(f"{plural(left, 'more value')}, measured less often" if left else ""),
        class_="knob",
    )


def _said(name: str, use: words.Use, found: Tuning) -> str:
    default, told = words.default_of(found), []
    if found.decision != "HOLD" and repr(found.config.get(name)) == repr(use.value):
        told.append("chosen")
    if default is not None and repr(default.config.get(name)) == repr(use.value):
        told.append("default")
    return ", ".join(told)


def _use(name: str, use: words.Use, scale: Scale, said: str) -> Html:
    kind = "promoted" if said.startswith("chosen") else "other"
    times = [t for t in use.times if t > 0]
    value, best, median = words.cut(words.value(use.value), 120), "none right", ""
    if times:
        best, median = fmt.seconds(min(times)), f"median {fmt.seconds(statistics.median(times))}"
    label = f"{words.cut(name, 60)} {value}: {', '.join(filter(None, (best, median)))}"
    counts = f"{len(times)} right" + (f", {use.failed} failed" if use.failed else "")
    return element(
        "li",
        who(code(value), "; ".join(filter(None, (said, counts)))),
        draw.use_lane(scale, label, times, kind),
        figure(best, median),
        class_=f"strip {kind}",
    )


# --- finals ---------------------------------------------------------------------------------------


def _finals(found: Tuning) -> Html:
    """The best few beside the default and the control: proved on held-out inputs, timed side by side."""
    entries = found.finals.entries
    if not entries:
        return Html("")
    ends = [v for c in found.comparisons for v in (c.low, c.high)]
    # never zoomed in so far that a few per cent look like a leap
    speeds = nice([0.9, 1.1, *ends], most=4, always=1.0)
    axis = plots.axis(speeds, lambda t: f"{t:g}x")
    roofline = ["Of roofline"] if found.floor_s else []
    columns: list[Cell] = ["Config", axis, "Speed-up", "Time", *roofline, "Error"]
    rows = [_final(entry, found, speeds) for entry in sorted(entries, key=_rank)]
    rounds = max((len(e.seconds) for e in entries), default=0)
    cases = found.finals.cases
    listed = words.cut(", ".join(words.cut(c, 80) for c in cases), 1200)
    return section(
        "finals",
        "The finals",
        table(
            plural(rounds, "interleaved round") if rounds else "No round was timed",
            columns,
            rows,
            class_="loads finals",
        ),
        *(_fell(e) for e in entries if e.text),
        fine(f"Proved on {plural(len(cases), 'case')}: {listed}" if listed else ""),
        lead="Each was proved on inputs that the search had not seen, then all were timed in turn, in a "
        "new order each round. The control is the leading config once more, built on its own: what it "
        "differs by is noise, shaded around 1x. A speed-up counts if its whole interval lies beyond.",
    )


def _rank(entry: Final) -> tuple[bool, int, float]:
    """The default, finalists by their time, the control; last what failed."""
    place = _LABELS.index(entry.label) if entry.label in _LABELS else 3
    return entry.status != "timed", place, statistics.median(entry.seconds) if entry.seconds else 0.0


def _final(entry: Final, found: Tuning, speeds: Scale) -> list[Cell]:
    same = words.key(entry.config) == words.key(found.config)
    chosen = same and entry.label != "control" and found.decision != "HOLD"
    kind = "baseline" if entry.label == "default" else "promoted" if chosen else "other"
    status = ", ".join([*(["chosen"] if chosen else []), entry.label, *_fate(entry)])
    seconds = statistics.median(entry.seconds) if entry.seconds else None
    figures, told = _speed(entry, found, seconds)
    noise = max((c.noise for c in found.comparisons), default=0.0)
    lane = plots.speed_lane(speeds, f"{entry.label}: {told}", figures, noise, kind)
    name = [code(words.config(entry.config)), element("span", status, class_="status")]
    return [
        element("div", *name, class_="who"),
        lane,
        told,
        fmt.maybe(fmt.seconds, seconds),
        *_of_floor(found, seconds),
        fmt.DASH if entry.relative is None else fmt.error(entry.relative),
    ]


def _fate(entry: Final) -> list[str]:
    return [] if entry.status == "timed" else [entry.status.replace("_", " ")]


def _speed(
    entry: Final, found: Tuning, seconds: float | None
) -> tuple[tuple[float, float, float] | None, str]:
    """Middle, low and high against the default, and the same as a text."""
    base_s = words.default_s(found)
    if seconds is None or not base_s:
        return None, fmt.DASH
    one = next((c for c in found.comparisons if c.recipe == words.key(entry.config)), None)
    if entry.label == "finalist" and one is not None:
        return (
            one.ratio,
            one.low,
            one.high,
        ), f"{fmt.ratio(one.ratio)} {fmt.interval(one.low, one.high)}"
    ratio = base_s / seconds if seconds > 0 else 1.0
    return (ratio, ratio, ratio), "1x" if entry.label == "default" else fmt.ratio(ratio)


def _fell(entry: Final) -> Html:
    article = "A" if entry.label == "finalist" else "The"
    name = element("b", f"{article} {entry.label} is {entry.status.replace('_', ' ')}. ")
    return element(
        "p", name, code(words.cut(words.config(entry.config), 200)), " ", words.cut(entry.text)
    )


# --- failures -------------------------------------------------------------------------------------


def _failures(found: Tuning) -> Html:
    """What failed in the search, by kind and by what was said."""
    failed = words.failures(found.measurements)
    if not failed:
        return Html("")
    rows = [row for failure in failed for row in _reasons(failure)]
    caption = f"{plural(sum(f.number for f in failed), 'config')} gave no time"
    columns = ["What", "Configs", "Why", "Such as"]
    left = sum(max(0, len(f.texts) - _TEXTS) for f in failed)
    return section(
        "failures",
        "What failed, and why",
        table(caption, columns, rows, class_="prose failed-why"),
        fine(f"and {plural(left, 'more reason')}, in tuning.json" if left else ""),
    )


def _reasons(failure: words.Failure) -> Iterator[list[Cell]]:
    name = failure.status.replace("_", " ")
    what = element("div", element("b", name), " ", words.MEANINGS[failure.status])
    for text, number, config in failure.texts[:_TEXTS]:
        such = code(words.cut(words.config(config)))
        yield [what, fmt.count(number), words.cut(text) or "nothing was said", such]


# --- evidence -------------------------------------------------------------------------------------


def _evidence(found: Tuning) -> Html:
    """What it was of, where, with what, and how to do it again."""
    key = found.key
    building = sum(m.compile_s for m in found.measurements)
    measuring = sum(m.measure_s for m in found.measurements)
    spent = f"{fmt.duration(found.seconds)} in all; building {fmt.duration(building)} over all lanes, "
    pairs: dict[str, Cell] = {
        "Kernel": words.cut(key.kernel),
        "Sizes": ", ".join(f"{words.cut(n, 60)}={size}" for n, size in key.sizes.items()) or "none",
        "Inputs": join((code(words.cut(s)) for s in key.signature), ", ") if key.signature else "none",
        "Device": words.cut(key.device),
        "Versions": ", ".join(f"{words.cut(n, 60)} {words.cut(v)}" for n, v in key.versions.items()),
        "Searcher": code(words.cut(found.searcher, 600)),
        "Seed": str(found.seed),
        "Time": f"{spent}proving and timing {fmt.duration(measuring)}",
        "Stopped": f"{words.cut(found.stop_text)} ({found.stop})",
        "Digests": join(
            [f"space {key.space}, source {key.source}, policy {key.policy}"],
        ),
    }
    use: list[Cell] = []
    if found.decision != "HOLD":
        code_ = element("code", words.snippet(found))
        use = [element("h3", "Use it"), element("pre", code_, class_="snippet", tabindex=0)]
    return section(
        "evidence",
        "Evidence",
        *use,
        element("h3", "Do it again"),
        element("pre", element("code", _command(found)), class_="snippet", tabindex=0),
        facts(pairs),
        lead="Every raw sample is in tuning.json beside this page.",
    )


def _command(found: Tuning) -> str:
    """The command that searches anew; the file is to be filled in where the record does not know it."""
    sizes = (part for n, s in found.key.sizes.items() for part in ("--size", f"{n}={s}"))
    searcher = found.searcher.partition("(")[0].lower()
    parts = [found.origin or "FILE.py:NAME", *sizes]
    if found.budget_s is not None:
        parts += ["--budget", f"{found.budget_s:g}"]
    if found.budget_measurements is not None:
        parts += ["--measurements", str(found.budget_measurements)]
    parts += ["--searcher", searcher, "--seed", str(found.seed), "--fresh"]
    if not found.siblings_allowed:
        parts.append("--no-siblings")
    return words.cut(f"torchstone tune {shlex.join(parts)}", 2000)
