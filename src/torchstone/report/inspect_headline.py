"""What is worth knowing of an inspection, most important first; all functions are pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchstone.records import Cause, Inspection, Inventory, RecompileStudy, ShapeContract
from torchstone.report import format as fmt
from torchstone.report.inspect_words import (
    PARTS,
    bare,
    captured,
    caused,
    clauses,
    file_line,
    line_of,
    of_bound,
    place,
    plural,
)

__all__ = ["findings", "headline", "summary"]

_FINDINGS = 3
_MUCH = 0.3
"""Share of the time from which on one operation is a finding."""
_LAUNCH = 0.4
"""Share of a call outside operations from which on that is a finding."""
_WASTE = 0.3
"""Share of padding from which on it is a finding."""

_USUAL: tuple[Cause, ...] = ("FIRST_SIZE", "ZERO_ONE")
"""Causes of recompiles that every model with dynamic sizes has once."""


def headline(found: Inspection) -> tuple[str, ...]:
    """What the model is, what a call costs, and at most three findings, one sentence each."""
    return (*summary(found), *findings(found)[:_FINDINGS])


def summary(found: Inspection) -> tuple[str, ...]:
    """What the model is and, where it was timed, how long a call takes and what it costs."""
    facts = [_weighs(found), "" if found.capture is None else captured(found.capture)]
    what = ", ".join(filter(None, facts)) or "nothing is known of the model"
    timing = "" if found.inventory is None else _timing(found.inventory)
    return tuple(filter(None, (f"{found.workload.name}: {what}", timing)))


def _weighs(found: Inspection) -> str:
    if found.inventory is not None:
        w = found.inventory.weights
        dtype = f", {w.by_dtype[0].dtype}" if w.by_dtype else ""
        if not w.parameters:
            return "no parameters"
        return f"{fmt.si(w.parameters)} parameters ({fmt.size(w.parameter_bytes)}{dtype})"
    if found.capture is not None and found.capture.parameters:
        return f"{fmt.si(found.capture.parameters)} parameters"
    return ""


def _timing(inventory: Inventory) -> str:
    text = f"eager takes {fmt.seconds(inventory.example.median_s)} a call"
    bounds = inventory.roofline.example if inventory.roofline else None
    if bounds is not None and bounds.eager_over_operations is not None:
        text += (
            f", {fmt.ratio(bounds.eager_over_operations)} its roofline time of "
            f"{fmt.seconds(bounds.operations_s)}"
        )
    if inventory.dollars_per_million is not None:
        text += f"; a million requests cost {fmt.money(inventory.dollars_per_million)}"
    return text


def findings(found: Inspection) -> tuple[str, ...]:
    """What is worth knowing, what matters most first, one sentence each."""
    recompiled = [*_on_recompiles(found.recompiles)]
    grave = found.recompiles is not None and _is_grave(found.recompiles)
    return (
        *_on_answers(found),
        *_on_refusals(found),
        *(recompiled if grave else ()),
        *_on_shapes(found.contract),
        *_on_breaks(found),
        *_on_time(found.inventory),
        *(() if grave else recompiled),
        *_on_traffic(found.inventory),
    )


def _on_answers(found: Inspection) -> Iterator[str]:
    if found.stale is not None:
        yield f"compiled call {found.stale.call} answers wrongly: {bare(found.stale.sentence)}"
    for part_ in found.parts:
        if part_.failed is not None:
            yield f"{PARTS[part_.name].lower()}: not found out, {bare(part_.failed)}"


def _on_refusals(found: Inspection) -> Iterator[str]:
    for study in (found.breaks, found.recompiles):
        if study is not None and study.refused is not None:
            yield f"it cannot be compiled: {bare(study.refused)}"
            break


def _is_grave(study: RecompileStudy) -> bool:
    unusual = any(storm.cause not in _USUAL for storm in study.storms)
    return study.exceeds or bool(study.limited) or unusual


def _on_recompiles(study: RecompileStudy | None) -> Iterator[str]:
    if study is None or not study.recompiles:
        return
    told = [caused(storm) for storm in study.storms[:2]]
    rest = len(study.storms) - len(told)
    more = f" and {plural(rest, 'other cause')}" if rest else ""
    causes = f": {', '.join(told)}{more}" if told else ""
    limit = "; torch's limit was hit" if study.limited else ""
    counts = f"{plural(len(study.recompiles), 'recompile')} over {plural(study.calls, 'call')}"
    yield f"{counts}{causes}{limit}"


def _on_shapes(contract: ShapeContract | None) -> Iterator[str]:
    if contract is None or contract.sound:
        return
    if contract.subject == "none":
        refusal = next(reversed(contract.refusals.values()), None)
        if refusal is not None:
            at = f" ({line_of(refusal.where)})" if refusal.where is not None else ""
            yield f"no one graph holds for the declared sizes: {bare(refusal.text)}{at}"
        return
    found = sorted(clauses(contract), key=lambda c: (not c.silent, c.model, c.needless))
    if found:
        first, rest = found[0], len(found) - 1
        at = f" ({place(first.where.file, first.where.line)})" if first.where is not None else ""
        silent = ", else the answer is wrong without a word" if first.silent else ""
        more = f"; and {plural(rest, 'more condition')}" if rest else ""
        yield f"one graph holds only where {first.text}{at}{silent}{more}"


def _on_breaks(found: Inspection) -> Iterator[str]:
    study = found.breaks
    if study is None or not study.breaks:
        return
    first = study.breaks[0]
    at = file_line(first.file, first.line, first.text)
    text = f"{plural(len(study.breaks), 'graph break')}, the first at {at}"
    if study.plain is not None and study.nested is not None and study.nested.graphs < study.plain.graphs:
        text += f"; nested graph breaks leave {study.nested.graphs} of {study.plain.graphs} graphs"
    yield text


def _on_time(inventory: Inventory | None) -> Iterator[str]:
    if inventory is None:
        return
    outside = inventory.profile.outside if inventory.profile else 0.0
    if outside >= _LAUNCH:
        yield f"{fmt.percent(outside)} of a call is outside any operation, in Python and dispatch"
    top = inventory.ops[0] if inventory.ops else None
    if top is not None and (top.share or 0.0) >= _MUCH:
        share = of_bound(top)
        peak = "" if share is None else f", at {fmt.percent(share)} of what this machine allows"
        yield f"{fmt.percent(top.share or 0.0)} of the time in operations is in {top.op}{peak}"


def _on_traffic(inventory: Inventory | None) -> Iterator[str]:
    if inventory is not None and inventory.traffic.padding_waste >= _WASTE:
        waste = fmt.percent(inventory.traffic.padding_waste)
        yield f"requests padded to the largest size would be {waste} padding"
