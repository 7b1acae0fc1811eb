"""Drawings of a tuning as inline SVG: places are in per cent, so each fills what it is given."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from torchstone.records.tuning import Measurement, Status, Tuning
from torchstone.report import format as fmt
from torchstone.report import tune_words as words
from torchstone.report.html.inspection.pieces import tick
from torchstone.report.html.markup import Html, element, join
from torchstone.report.html.scale import Scale, nice
from torchstone.report.inspect_words import plural

__all__ = ["chart", "failed_lane", "levels", "use_lane"]

_TICKS = 6
_FAR = 8.0
"""A level is drawn if it is no further than this factor from the times."""
_MARKS: dict[Status, str] = {
    "wrong": "cross late",
    "unverifiable": "cross",
    "crashed": "event late",
    "timed_out": "event slow",
    "invalid": "event",
}
"""Class of the mark of each kind of failure."""


def chart(found: Tuning, times: Sequence[float]) -> Html:
    """Each config's time by its number, the best so far, the default and the roofline.

    :param times: of those that are right, positive; at least one.
    """
    number, best = len(found.measurements), words.best_so_far(found.measurements)
    known = levels(found, times)
    ys = nice([*times, *known.values()])
    dots = {
        kind: [(i, m.time) for i, m in enumerate(found.measurements, 1) if m.status == kind and m.time]
        for kind in ("timed", "dropped")
    }
    drawn = [
        *(_level(ys.at(t), "grid") for t in ys.ticks),
        *(_level(ys.at(level), f"level {name}") for name, level in known.items()),
        _cached(found.known, number),
        _stretched(
            *(_dots(spots, number, ys, f"shots {kind}") for kind, spots in reversed(dots.items())),
            _staircase(best, number, ys),
        ),
        *(_label(0, ys.at(t), tick(t), dy=-4) for t in ys.ticks),
        *_level_labels(known, ys),
    ]
    quickest = fmt.seconds(min(times))
    label = f"Time of {plural(number, 'config')} in the order of measuring; the best takes {quickest}"
    drawing = element("svg", *drawn, width="100%", height="100%", role="img", aria_label=label)
    return element(
        "figure",
        element("p", "Median time of a call", class_="unit"),
        element("div", drawing, class_="chart"),
        _numbers(number),
        element("p", "Measurement", class_="unit below"),
        class_="roofline",
    )


def levels(found: Tuning, times: Sequence[float]) -> dict[str, float]:
    """The roofline and the default, seconds; without what is so far off that the rest would shrink."""
    given = {"roofline": found.floor_s, "default": words.default_s(found)}
    low, high = min(times) / _FAR, max(times) * _FAR
    return {name: level for name, level in given.items() if level and low <= level <= high}


def _x(number: int, of: int) -> float:
    return round(100 * (number - 0.5) / of, 3)


def _level(y: float, class_: str) -> Html:
    place = f"{100 - y:.2f}%"
    return element("line", x1="0", x2="100%", y1=place, y2=place, class_=class_)


def _label(x: float, y: float, text: str, **attributes: str | int) -> Html:
    return element("text", text, x=f"{x:g}%", y=f"{100 - y:.2f}%", **attributes)


def _level_labels(known: Mapping[str, float], ys: Scale) -> Iterator[Html]:
    """The upper one over its line, the lower one under it, so that close ones do not touch."""
    top = max(known.values(), default=0.0)
    for name, level in known.items():
        text = f"{name} {fmt.seconds(level)}"
        down = -6 if level == top else 15
        yield _label(100, ys.at(level), text, dy=down, text_anchor="end", class_="named")


def _cached(known: int, number: int) -> Html:
    """What was known beforehand, shaded; nothing where there is none."""
    if not known:
        return Html("")
    width = round(100 * min(known, number) / number, 2)
    text = _label(0, 100, "from the cache", dy=14, dx=64)
    return join([element("rect", width=f"{width}%", height="100%", class_="shade"), text])


def _dots(spots: Sequence[tuple[int, float | None]], number: int, ys: Scale, class_: str) -> Html:
    """All dots as one path of round caps: small, however many there are."""
    path = "".join(f"M{_x(i, number):g} {100 - ys.at(t):.2f}h0" for i, t in spots if t)
    return element("path", d=path, class_=class_) if path else Html("")


def _staircase(best: Sequence[tuple[int, Measurement]], number: int, ys: Scale) -> Html:
    steps, last = [], None
    for at, one in best:
        if one.time is None or one.time <= 0:
            continue
        x, y = _x(at, number), 100 - ys.at(one.time)
        steps.append(f"M{x:g} {y:.2f}" if last is None else f"H{x:g}V{y:.2f}")
        last = y
    return element("path", d="".join([*steps, "H100"]), class_="staircase") if steps else Html("")


def _numbers(number: int) -> Html:
    """Numbers of measurements under a drawing, evenly spaced at round figures."""
    rough = max(1, number / _TICKS)
    power = 10 ** math.floor(math.log10(rough))
    step = max(1, next(s * power for s in (1, 2, 5, 10) if s * power >= rough))
    labels = (
        element("text", str(i), x=f"{_x(i, number):g}%", y=12, text_anchor="middle")
        for i in sorted({1, *range(step, number + 1, step)})
        if i == 1 or i >= step / 2
    )
    return element("svg", *labels, class_="axis", width="100%", height=16, aria_hidden="true")


def _mark(status: Status, x: str) -> Html:
    class_ = _MARKS.get(status, "event")
    shape = "M-4 -4L4 4M-4 4L4 -4" if class_.startswith("cross") else "M0 -7V7"
    return element("svg", element("path", d=shape, class_=class_), x=x, y="50%", overflow="visible")


def failed_lane(measurements: Sequence[Measurement]) -> Html:
    """Failures at their place in the search, and what each mark means."""
    number, failed = len(measurements), words.failures(measurements)
    if not failed:
        return Html("")
    marks = (
        _mark(m.status, f"{_x(i, number):g}%")
        for i, m in enumerate(measurements, 1)
        if m.status not in ("timed", "dropped")
    )
    label = "Failures by number: " + ", ".join(
        f"{f.number} {f.status.replace('_', ' ')}" for f in failed
    )
    line = element("line", x1="0", x2="100%", y1="50%", y2="50%", class_="grid")
    lane = element(
        "svg", line, *marks, class_="lane", width="100%", height=24, role="img", aria_label=label
    )
    keys = (
        element(
            "span",
            element("svg", _mark(f.status, "50%"), width=16, height=16, aria_hidden="true"),
            f"{fmt.count(f.number)} {f.status.replace('_', ' ')}: {words.MEANINGS[f.status]}",
        )
        for f in failed
    )
    return element("figure", lane, element("p", *keys, class_="legend"), class_="failed")


def use_lane(scale: Scale, label: str, times: Sequence[float], kind: str) -> Html:
    """Times as ticks, their median as a long mark, the best as a dot.

    :param times: positive; none draws the empty lane.
    :param kind: class of the marks: ``promoted`` or ``other``.
    """
    marks: list[Html] = [
        element("line", x1=f"{scale.at(t)}%", x2=f"{scale.at(t)}%", y1=0, y2="100%", class_="grid")
        for t in scale.ticks
    ]
    if times:
        ticks = "".join(f"M{p:g} 28v44" for p in sorted({round(scale.at(t), 1) for t in times}))
        middle = f"{scale.at(statistics.median(times))}%"
        marks += [
            _stretched(element("path", d=ticks, class_=f"rug {kind}")),
            element("line", x1=middle, x2=middle, y1="8%", y2="92%", class_="median"),
            element("circle", cx=f"{scale.at(min(times))}%", cy="50%", r=4, class_=f"dot {kind}"),
        ]
    box = {"class_": "lane", "width": "100%", "height": "100%", "role": "img"}
    return element("div", element("svg", *marks, aria_label=label, **box), class_="plot")


def _stretched(*marks: Html) -> Html:
    """Marks whose coordinates are per cent of what they fill."""
    box = {"viewBox": "0 0 100 100", "width": "100%", "height": "100%", "overflow": "visible"}
    return element("svg", *marks, preserveAspectRatio="none", **box)
