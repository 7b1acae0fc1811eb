"""Drawings of the inspection as inline SVG: places are in per cent, so each fills what it is given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from torchstone.records import Peaks, SizeBin
from torchstone.report import format as fmt
from torchstone.report.html import plots
from torchstone.report.html.markup import Html, element
from torchstone.report.html.scale import Scale, nice

__all__ = ["Mark", "Roof", "calls_axis", "histogram", "place_of_call", "roofline"]

_ALIKE = 1.15
"""Peaks that are no further apart share a label."""
_LABELS = 8
_BARS = 8
"""Room for at least so many bars: a few are not drawn as blocks."""
_TICKS = 6
_PIXELS = (7.0, 4.0)
"""About what a per cent of the chart is, across and up."""
_APART = 13.0
"""Pixels between labels that do not touch."""


class Mark(msgspec.Struct, frozen=True):
    """Something on the roofline."""

    label: str
    """What is written into it."""
    intensity: float
    """FLOPs a byte."""
    attained: float
    """FLOPs a second."""
    weight: float
    """Share of the time, 0 to 1: its area."""
    kind: str
    """``op``, ``small`` or ``whole``."""


class Roof(msgspec.Struct, frozen=True):
    """The machine's limits."""

    peak: float
    """FLOP/s of the model's own dtype."""
    slopes: Mapping[str, float]
    """Bytes a second, by what they are of; the slowest first."""
    flats: Mapping[str, float]
    """FLOP/s by dtype."""

    @classmethod
    def of(cls, peaks: Peaks, dtype: str) -> Roof | None:
        """The roof of a machine; None where nothing was measured."""
        flats = {name: rate for name, rate in peaks.flops_per_s.items() if rate > 0}
        rates = [b.bytes_per_s for b in peaks.bandwidth if b.bytes_per_s > 0]
        if not flats or not rates:
            return None
        slowest = "memory" if peaks.beyond_cache else "largest measured set"
        slopes = {slowest: rates[-1]}
        if max(rates) > _ALIKE * rates[-1]:
            slopes["cache"] = max(rates)
        return cls(flats.get(dtype) or max(flats.values()), slopes, flats)


def roofline(roof: Roof, marks: Sequence[Mark], label: str) -> Html:
    """FLOP/s over FLOPs a byte, both logarithmic; the machine's limits as the roof over the marks."""
    ridges = [roof.peak / slope for slope in roof.slopes.values()]
    xs = nice([*(m.intensity for m in marks), *ridges, min(ridges) / 10, max(ridges) * 8])
    lowest = min(roof.slopes.values()) * xs.low
    ys = nice([*(m.attained for m in marks), *roof.flats.values(), max(lowest, roof.peak / 1e4)])
    drawn = [
        *(_line(xs.at(t), 0, xs.at(t), 100, "grid") for t in xs.ticks),
        *(_line(0, ys.at(t), 100, ys.at(t), "grid") for t in ys.ticks),
        *(_slope(roof, name, xs, ys) for name in roof.slopes),
        *_flats(roof, xs, ys),
        *(_text(0, ys.at(t), _round(t), dy=-4) for t in ys.ticks),
        *_placed(marks, xs, ys),
    ]
    chart = element("svg", *drawn, width="100%", height="100%", role="img", aria_label=label)
    return element(
        "figure",
        element("p", "FLOP/s", class_="unit"),
        element("div", chart, class_="chart"),
        plots.axis(xs, lambda tick: f"{tick:g}"),
        element("p", "FLOPs a byte", class_="unit below"),
        class_="roofline",
    )


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """From one place to another, in per cent of the chart, y from below."""
    ends = {"x1": x1, "y1": 100 - y1, "x2": x2, "y2": 100 - y2}
    return element("line", **{k: f"{v:.2f}%" for k, v in ends.items()}, class_=class_)


def _text(x: float, y: float, text: str, **attributes: str | int) -> Html:
    return element("text", text, x=f"{x:.2f}%", y=f"{100 - y:.2f}%", **attributes)


def _round(tick: float) -> str:
    """``10 G`` where a figure would say ``10.0 G``."""
    number, _, prefix = fmt.si(tick).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {prefix}".rstrip()


def _slope(roof: Roof, name: str, xs: Scale, ys: Scale) -> Html:
    rate = roof.slopes[name]
    first = max(xs.low, ys.low / rate)
    ridge = roof.peak / rate
    line = _line(xs.at(first), ys.at(first * rate), xs.at(ridge), ys.at(roof.peak), "roof")
    middle = math.sqrt(first * ridge)
    label = f"{name} {fmt.size(rate)}/s"
    return element("g", line, _text(xs.at(middle), ys.at(middle * rate), label, dx=10, dy=12))


def _flats(roof: Roof, xs: Scale, ys: Scale) -> list[Html]:
    """Peaks by dtype; those nearly alike have one label."""
    best = max(roof.slopes.values())
    groups: list[list[str]] = []
    for name in sorted(roof.flats, key=lambda n: -roof.flats[n]):
        if groups and roof.flats[groups[-1][0]] <= _ALIKE * roof.flats[name]:
            groups[-1].append(name)
        else:
            groups.append([name])
    drawn = []
    for names in groups:
        rate = roof.flats[names[0]]
        own = any(roof.flats[n] == roof.peak for n in names)
        y, label = ys.at(rate), f"{', '.join(names)} {fmt.si(rate)}FLOP/s"
        line = _line(xs.at(rate / best), y, 100, y, "roof" if own else "roof other")
        drawn.append(element("g", line, _text(100, y, label, text_anchor="end", dy=-5)))
    return drawn


def _placed(marks: Sequence[Mark], xs: Scale, ys: Scale) -> Iterator[Html]:
    """Marks at their places, and over all of them their labels, none on another."""
    placed = [(mark, xs.at(mark.intensity), ys.at(mark.attained)) for mark in marks]
    for mark, x, y in placed:
        yield _at(x, y, _shape(mark))
    taken: list[tuple[float, float]] = []
    for mark, x, y in placed:
        if mark.label:
            right, down = _free(_radius(mark), (x * _PIXELS[0], (100 - y) * _PIXELS[1]), taken)
            yield _at(x, y, element("text", mark.label, x=right, y=down + 4, text_anchor="middle"))


def _at(x: float, y: float, drawn: Html) -> Html:
    return element("svg", drawn, x=f"{x}%", y=f"{100 - y:.2f}%", overflow="visible")


def _radius(mark: Mark) -> float:
    least, most = (2.5, 4.0) if mark.kind == "small" else (8.0, 16.0)
    return round(least + most * math.sqrt(max(0.0, min(1.0, mark.weight))), 1)


def _shape(mark: Mark) -> Html:
    if mark.kind == "whole":
        return element("path", d="M0 -9L9 0L0 9L-9 0Z", class_="mark whole")
    return element("circle", r=_radius(mark), class_=f"mark {mark.kind}")


def _free(
    radius: float, centre: tuple[float, float], taken: list[tuple[float, float]]
) -> tuple[float, float]:
    """Where a label goes from its mark's centre, in pixels: into it, or beside it where one is there."""
    out = radius + 8
    spots = [(0.0, 0.0), (out, 0.0), (-out, 0.0), (0.0, -out), (0.0, out), (out, out), (-out, out)]
    spots += [(out, -out), (-out, -out)]
    for right, down in spots:
        at = (centre[0] + right, centre[1] + down)
        if all(math.dist(at, other) >= _APART for other in taken):
            taken.append(at)
            return right, down
    return spots[0]


def histogram(bins: Sequence[SizeBin], label: str) -> Html:
    """Requests by size as bars, their sizes under them."""
    most = max((b.requests for b in bins), default=0) or 1
    width = 100 / max(_BARS, len(bins))
    bars = [
        element(
            "rect",
            x=f"{i * width + 0.08 * width:.2f}%",
            y=f"{100 - 100 * b.requests / most:.2f}%",
            width=f"{0.84 * width:.2f}%",
            height=f"{100 * b.requests / most:.2f}%",
            class_="block",
        )
        for i, b in enumerate(bins)
    ]
    step = math.ceil(len(bins) / _LABELS) if bins else 1
    names = [
        element("text", _named(b), x=f"{(i + 0.5) * width:.2f}%", y=12, text_anchor="middle")
        for i, b in enumerate(bins)
        if i % step == 0
    ]
    return element(
        "div",
        element("svg", *bars, width="100%", height=96, role="img", aria_label=label),
        element("svg", *names, class_="axis", width="100%", height=16, aria_hidden="true"),
        class_="histogram",
    )


def _named(bar: SizeBin) -> str:
    return str(bar.low) if bar.low == bar.high else f"{bar.low}.."


def place_of_call(call: int, calls: int) -> float:
    """Where a call stands in a timeline, in per cent."""
    return round(100 * (call + 0.5) / max(1, calls), 2)


def calls_axis(calls: int) -> Html:
    """Positions of calls, evenly spaced."""
    step = max(1, math.ceil(calls / _TICKS))
    labels = (
        element("text", str(call), x=f"{place_of_call(call, calls)}%", y=12, text_anchor="middle")
        for call in range(0, calls, step)
    )
    return element("svg", *labels, class_="axis", width="100%", height=16, aria_hidden="true")
