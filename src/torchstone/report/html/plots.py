"""Drawings as inline SVG: one lane per candidate, x in per cent so that it fills whatever width it has.

No lane has a fixed width and none holds a legend: names and figures stand beside it as text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from torchstone.report.html.markup import Html, element, join
from torchstone.report.html.scale import Scale

__all__ = [
    "axis",
    "bar_lane",
    "error_lane",
    "event_lane",
    "gap_lane",
    "quantile_lane",
    "ridge_lane",
    "speed_lane",
]

_RIDGE = 40
"""Height of a hill with the ticks under it."""
_CURVE = 200
"""Points of a hill's outline."""


def axis(scale: Scale, form: Callable[[float], str]) -> Html:
    """The tick labels of lanes above or below; the lanes draw the lines themselves."""
    labels = (
        element("text", form(tick), x=f"{scale.at(tick)}%", y=12, text_anchor=_anchor(scale.at(tick)))
        for tick in scale.ticks
    )
    return element("svg", *labels, class_="axis", width="100%", height=16, aria_hidden="true")


def _anchor(place: float) -> str:
    return "end" if place > 94 else "middle"


def _lane(label: str, *marks: Html) -> Html:
    """A drawing that fills its cell, whatever size that has; marks are placed in per cent."""
    return element(
        "div",
        element("svg", *marks, class_="lane", width="100%", height="100%", role="img", aria_label=label),
        class_="plot",
    )


def _middle(*marks: Html, x: float = 0) -> Html:
    """Marks whose y counts from the lane's middle, and x from ``x`` per cent."""
    return element("svg", *marks, x=f"{x}%", y="50%", overflow="visible")


def _line(x1: float, x2: float, y1: float | str, y2: float | str, class_: str) -> Html:
    return element("line", x1=f"{x1}%", x2=f"{x2}%", y1=y1, y2=y2, class_=class_)


def _upright(x: float, class_: str) -> Html:
    return _line(x, x, 0, "100%", class_)


def _grid(scale: Scale, strong: float | None = None) -> Html:
    return join(_upright(scale.at(t), "strong" if t == strong else "grid") for t in scale.ticks)


def _band(low: float, high: float, class_: str) -> Html:
    return element("rect", x=f"{low}%", width=f"{round(high - low, 2)}%", height="100%", class_=class_)


def _dot(place: float, kind: str, radius: float) -> Html:
    return element("circle", cx=f"{place}%", r=radius, class_=f"dot {kind}")


def _cap(place: float, kind: str) -> Html:
    return _line(place, place, -6, 6, f"whisker {kind}")


def speed_lane(
    scale: Scale, label: str, figures: tuple[float, float, float] | None, noise: float, kind: str
) -> Html:
    """Speed-up (middle, low, high) as a dot with whiskers on a bar from 1x; the noise around 1x shaded.

    :param figures: None draws the empty lane.
    :param kind: class of the marks: ``promoted``, ``baseline`` or ``other``.
    """
    one = scale.at(1.0)
    marks = [_band(scale.at(1 / (1 + noise)), scale.at(1 + noise), "shade"), _grid(scale, strong=1.0)]
    if figures is not None:
        middle, low, high = (scale.at(v) for v in figures)
        bar = _line(one, middle, 0, 0, f"bar {kind}")
        whisker = _line(low, high, 0, 0, f"whisker {kind}")
        marks.append(_middle(bar, whisker, _cap(low, kind), _cap(high, kind), _dot(middle, kind, 3.5)))
    return _lane(label, *marks)


def error_lane(scale: Scale, label: str, relative: float | None, kind: str) -> Html:
    """Error over its bound as a dot, or a cross for a wrong candidate; what is beyond 1 is shaded.

    :param relative: error over bound; None where the error is not finite, which is drawn at the edge.
    :param kind: ``promoted``, ``baseline``, ``other``, ``wrong``, or ``none`` for the empty lane.
    """
    edge = scale.at(1.0)
    marks = [_band(edge, 100, "shade"), _grid(scale, strong=1.0)]
    place = 97.0 if relative is None else min(97.0, max(3.0, scale.at(relative)))
    if kind == "wrong":
        marks.append(_middle(element("path", d="M-5 -5L5 5M-5 5L5 -5", class_="cross"), x=place))
    elif kind != "none":
        marks.append(_middle(_dot(place, kind, 4.5)))
    return _lane(label, *marks)


def quantile_lane(
    scale: Scale, label: str, places: Sequence[float], limit: float | None, kind: str
) -> Html:
    """Latency quantiles, rising: a dot at the first (p50), a tick at each other, a line through all.

    :param limit: latency that the policy allows, seconds.
    """
    xs = [scale.at(p) for p in places]
    marks = [_grid(scale)]
    if limit is not None:
        marks += [_band(scale.at(limit), 100, "shade"), _upright(scale.at(limit), "strong")]
    if xs:
        whisker = _line(xs[0], xs[-1], 0, 0, f"whisker {kind}")
        marks.append(_middle(whisker, *(_cap(x, kind) for x in xs[1:]), _dot(xs[0], kind, 4.5)))
    return _lane(label, *marks)


def gap_lane(
    scale: Scale, label: str, bounds: Sequence[float], times: tuple[float, float], kind: str
) -> Html:
    """A time (median and p90) as a dot with a cap, and how far it is from each bound, a ring."""
    median, high = (scale.at(t) for t in times)
    places = [scale.at(b) for b in bounds]
    whisker = _line(min([median, *places]), high, 0, 0, f"whisker {kind}")
    rings = (_dot(place, "baseline", 3.5) for place in places)
    marks = _middle(whisker, *rings, _cap(high, kind), _dot(median, kind, 4.5))
    return _lane(label, _grid(scale), marks)


def bar_lane(label: str, share: float, kind: str) -> Html:
    """A share of the lane, from its left, as a bar."""
    width = round(100 * max(0.0, min(1.0, share)), 2)
    bar = element("rect", y=-7, width=f"{width}%", height=14, class_=f"block {kind}")
    return _lane(label, _middle(bar))


def event_lane(label: str, places: Sequence[float], kind: str) -> Html:
    """Events as upright ticks, each at its place in per cent."""
    marks = (_line(p, p, -8, 8, f"event {kind}") for p in places)
    return _lane(label, _middle(_line(0, 100, 0, 0, "grid"), *marks))


def ridge_lane(scale: Scale, label: str, times: Sequence[float], kind: str) -> Html:
    """Density of raw times as a hill, every single one as a tick under it, the median as a line."""
    places = sorted(scale.at(t) for t in times)
    ticks = "".join(f"M{p:g} 35v5" for p in sorted({round(p, 1) for p in places}))
    stretched = element(
        "svg",
        element("path", d=_hill(places), class_=f"hill {kind}"),
        element("path", d=ticks, class_=f"rug {kind}"),
        viewBox=f"0 0 100 {_RIDGE}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
    median = _line(places[len(places) // 2], places[len(places) // 2], "10%", "100%", f"median {kind}")
    return _lane(label, _grid(scale), stretched, median)


def _hill(places: Sequence[float]) -> str:
    """Gaussian kernel density of places on the lane, as a closed path 33 high.

    The width is Silverman's, taken from the quartiles so that a second peak does not wash out the
    first, within 0.4 to 1.2 per cent of the lane.
    """
    quarter, three = places[len(places) // 4], places[3 * len(places) // 4]
    width = max(0.4, min(1.2, 0.9 * (three - quarter) / 1.34 * len(places) ** -0.2))
    xs = [100 * i / _CURVE for i in range(_CURVE + 1)]
    tally = Counter(round(p, 1) for p in places)
    heights = [
        sum(
            n * math.exp(-0.5 * ((x - p) / width) ** 2)
            for p, n in tally.items()
            if abs(x - p) < 4 * width
        )
        for x in xs
    ]
    top = max(heights)
    seen = [(x, 33 - 30 * h / top) for x, h in zip(xs, heights, strict=True) if h > top * 1e-3]
    curve = "".join(f"L{x:g} {y:.1f}" for x, y in seen)
    return f"M{seen[0][0]:g} 33{curve}L{seen[-1][0]:g} 33Z"
