"""How far the model is from what the machine allows, and what the traffic asks of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchstone.records import Bounds, DimMix, Inspection, Inventory, SizeFigures, TrafficMix
from torchstone.report import format as fmt
from torchstone.report import inspect_words as words
from torchstone.report.html import plots
from torchstone.report.html.inspection import draw
from torchstone.report.html.inspection.pieces import figure, fine, strip_head, tick, who
from torchstone.report.html.inspection.work import NUMBERED
from torchstone.report.html.markup import Cell, Html, code, element, facts, join, section, table
from torchstone.report.html.scale import Scale, nice

__all__ = ["roofline", "traffic"]


# --- roofline -------------------------------------------------------------------------------------


def roofline(found: Inspection) -> Html:
    """The roofline with every operation, and eager beside its bounds."""
    inventory = found.inventory
    if inventory is None or inventory.roofline is None:
        return Html("")
    own = inventory.weights.by_dtype[0].dtype if inventory.weights.by_dtype else "float32"
    roof = draw.Roof.of(inventory.roofline.peaks, own)
    marks = [*_marks(inventory)]
    drawn = []
    if roof is not None:
        drawn = [draw.roofline(roof, marks, _label(inventory, len(marks))), _keys(inventory)]
    peaks = inventory.roofline.peaks
    where = f"{peaks.device}, {words.plural(peaks.threads, 'thread')}"
    return section(
        "roofline",
        "What this machine allows",
        element("h3", "Bounds"),
        *_bounds(inventory),
        element("h3", "Roofline") if drawn else "",
        *drawn,
        lead="The roof is what this machine was measured to do at best "
        f"({where}). A mark is an operation, its area the time it takes: far below the roof, its kernel "
        "is slow; under the slope, it waits for memory. The diamond is the whole model.",
    )


def _marks(inventory: Inventory) -> Iterator[draw.Mark]:
    """The whole model and every operation that computes; the largest first, so that it hides none."""
    numbered = [*enumerate(inventory.ops, 1)]
    for number, op in sorted(numbered, key=lambda item: -(item[1].seconds or 0.0)):
        at = words.attained(op)
        if at is not None:
            small = number > NUMBERED
            label, kind = ("", "small") if small else (str(number), "op")
            yield draw.Mark(label, *at, op.share or 0.0, kind)
    whole = next((m.total for m in inventory.modules if not m.path), None)
    if whole is not None and whole.bytes > 0 and whole.flops + whole.other_flops > 0:
        flops = whole.flops + whole.other_flops
        yield draw.Mark("", flops / whole.bytes, flops / inventory.example.median_s, 1.0, "whole")


def _label(inventory: Inventory, marks: int) -> str:
    peaks = inventory.roofline.peaks.flops_per_s if inventory.roofline else {}
    told = ", ".join(f"{name} {fmt.si(rate)}FLOP/s" for name, rate in peaks.items())
    return f"Roofline, peaks {told}; {words.plural(marks, 'mark')}"


def _keys(inventory: Inventory) -> Html:
    """What the numbers stand for."""
    items = []
    for number, op in enumerate(inventory.ops[:NUMBERED], 1):
        at = words.attained(op)
        if at is not None:
            best = words.of_bound(op)
            of_best = "" if best is None else f", {fmt.percent(best)} of best"
            badge = element("span", str(number), class_="badge")
            told = f"{fmt.si(at[1])}FLOP/s at {fmt.significant(at[0], 2)} FLOPs a byte{of_best}"
            items.append(element("li", badge, code(op.op), element("span", told, class_="fine")))
    return element("ol", *items, class_="keys") if items else Html("")


def _bounds(inventory: Inventory) -> Iterator[Html]:
    if inventory.roofline is None:
        return
    yield _bars("On the example", inventory.roofline.example)
    if inventory.roofline.mix is not None and inventory.traffic.recorded:
        yield _bars("Over the traffic, mean a request", inventory.roofline.mix)


def _bars(title: str, bounds: Bounds) -> Html:
    most = max(bounds.eager_s, bounds.operations_s, bounds.fused_s) or 1.0
    rows = (
        ("Eager", "as measured", bounds.eager_s, None, "eager"),
        ("Operations", "each at the roof", bounds.operations_s, bounds.eager_over_operations, "other"),
        ("Fused", "all at once at the roof", bounds.fused_s, bounds.eager_over_fused, "other"),
    )
    items = [
        element(
            "li",
            who(name, status),
            plots.bar_lane(f"{title}: {name} {fmt.seconds(seconds)}", seconds / most, kind),
            figure(fmt.seconds(seconds), "" if ratio is None else f"eager: {fmt.ratio(ratio)}"),
            class_="strip",
        )
        for name, status, seconds, ratio, kind in rows
    ]
    return join([fine(title), element("ol", *items, class_="strips")])


# --- traffic --------------------------------------------------------------------------------------


def traffic(found: Inspection) -> Html:
    """The mix of sizes, and eager's latency at each."""
    inventory = found.inventory
    if inventory is None:
        return Html("")
    mix = inventory.traffic
    lead = (
        f"Recorded: {words.requests(mix)}. Padded to the largest, {fmt.percent(mix.padding_waste)} of "
        "all input elements would be padding."
        if mix.recorded
        else "No traffic was recorded; the example stands for it."
    )
    charts = [_dim(dim) for dim in mix.dims if dim.histogram] if mix.recorded else []
    return section(
        "traffic",
        "What the traffic asks for",
        element("div", *charts, class_="pair") if charts else "",
        _scalars(mix),
        _by_size(inventory.sizes),
        facts(dict(_served(inventory))),
        lead=lead,
    )


def _dim(dim: DimMix) -> Html:
    told = ", ".join(f"{name} {size}" for name, size in dim.quantiles.items())
    text = (
        f"{told}; mean {fmt.significant(dim.mean)}; {words.plural(dim.distinct, 'size')}; "
        f"{fmt.percent(dim.padding_waste)} padding at the largest"
    )
    drawn = draw.histogram(dim.histogram, f"Requests by {dim.name}: {text}")
    return element("figure", element("h3", code(dim.name)), drawn, fine(text))


def _scalars(mix: TrafficMix) -> Html:
    if not mix.recorded or not mix.scalars:
        return Html("")
    rows = [
        (
            code(one.name),
            fmt.count(one.distinct),
            ", ".join(f"{value:g} ({n})" for value, n in one.frequent) or fmt.DASH,
        )
        for one in mix.scalars
    ]
    columns = ["Number", "Different values", "Most frequent (requests)"]
    return table("Python numbers among the inputs", columns, rows, class_="prose")


def _by_size(sizes: Sequence[SizeFigures]) -> Html:
    """Latency by size on one scale."""
    timed = [s for s in sizes if s.times is not None and s.times.median_s > 0]
    values = [
        v
        for s in timed
        if s.times is not None
        for v in (s.times.median_s, s.times.p90_s, s.operations_s, s.fused_s)
        if v is not None and v > 0
    ]
    if not sizes:
        return Html("")
    scale = nice(values, most=5) if values else None
    head = [strip_head(plots.axis(scale, tick))] if scale is not None else []
    rows = [_size(one, scale) for one in sizes]
    told = "The dot is eager's median, the cap its p90, the rings its roofline times." if values else ""
    return join(
        [element("h3", "Latency by size"), fine(told), element("ol", *head, *rows, class_="strips")]
    )


def _size(one: SizeFigures, scale: Scale | None) -> Html:
    named = words.sizes(one.sizes, one.scalars) if one.sizes or one.scalars else "fixed sizes"
    name = code(named)
    stands = words.plural(one.requests, "request")
    if one.times is None or scale is None or one.times.median_s <= 0:
        why = one.text or "no figures"
        return element("li", who(name, stands), element("p", why, class_="why"), class_="strip")
    times, bounds = one.times, [b for b in (one.operations_s, one.fused_s) if b is not None and b > 0]
    label = f"{named}: median {fmt.seconds(times.median_s)}"
    far = f"{fmt.ratio(times.median_s / bounds[0])} its roofline" if bounds else ""
    settled = "" if times.steady else "still falling"
    lane = plots.gap_lane(
        scale, label, bounds, (times.median_s, max(times.p90_s, times.median_s)), "other"
    )
    counted = "" if one.work is None else f"{fmt.si(one.work.flops + one.work.other_flops)}FLOP"
    status = "; ".join(filter(None, (stands, counted, settled, one.text)))
    return element(
        "li", who(name, status), lane, figure(fmt.seconds(times.median_s), far), class_="strip"
    )


def _served(inventory: Inventory) -> Iterator[tuple[str, Cell]]:
    mix, memory = inventory.traffic, inventory.memory
    yield "Mean a request", fmt.maybe(fmt.seconds, inventory.mean_s)
    mean = next((m.mix for m in inventory.modules if not m.path), None)
    if mean is not None:
        flops = fmt.si(mean.flops + mean.other_flops)
        yield "Mean work a request", f"{flops}FLOP, {fmt.size(mean.bytes)} moved"
    if inventory.requests_per_s is not None:
        yield "One process serves", fmt.rate(inventory.requests_per_s)
    if inventory.dollars_per_million is not None:
        yield "A million requests", fmt.money(inventory.dollars_per_million)
    if mix.frequent and mix.recorded:
        most = (f"{words.sizes(s.sizes, s.scalars)} ({fmt.percent(s.share)})" for s in mix.frequent[:5])
        yield "Most frequent", join(most, "; ")
    resident = f"{fmt.size(memory.resident_bytes)}, at most {fmt.size(memory.peak_bytes)} during a call"
    yield "Memory of the process", resident
    if memory.live_bytes is not None:
        yield "Intermediate tensors", f"at most {fmt.size(memory.live_bytes)} at once"
    if memory.device_peak_bytes is not None:
        yield "Memory of the device", f"at most {fmt.size(memory.device_peak_bytes)}"
    if inventory.least_bytes is not None:
        yield "Has to be moved", f"{fmt.size(inventory.least_bytes)} a call, even fused"
